"""A backward writes its gradient and nothing else, and ranks record which ids repeat."""

import pytest
import torch

import logitless as ll
from logitless import contract, eager, kernels
from logitless.contract import COEFFICIENTS, Coefficients, Reading
from tests.support.rank_threads import on_ranks

WANTS = {"without a tail": ("logprob",), "with a tail": ("logprob", "tail")}


@pytest.mark.parametrize("wants", WANTS.values(), ids=WANTS)
@pytest.mark.parametrize("backend", [eager, kernels], ids=["eager", "kernels"])
def test_a_backward_leaves_the_saved_state_alone(backend, wants, device):
    x = torch.randn(3, 50, device=device)
    ids = torch.tensor([[1, 7, 1], [2, 3, 4], [5, 5, 5]], device=device)
    reading = Reading(50, ids=ids, wants=wants)
    state = backend.read(x, reading).state
    has = ("a", "a_ids") if "tail" in wants else ("a",)
    rows, g_ids = torch.randn(3, COEFFICIENTS, device=device), torch.randn(3, 3, device=device)
    coefficients, upstream = Coefficients(rows, has, g_ids), torch.ones((), device=device)
    before, given = state.clone(), (x, reading, state, coefficients, upstream)
    first = backend.gradient(*given)
    assert torch.equal(state, before)
    assert torch.equal(backend.gradient(*given), first)


def test_a_tail_records_repeated_ids(device):
    ids = [[1, 7, 1], [2, 3, 4], [5, contract.NO_ID, contract.NO_ID]]
    ids, x = torch.tensor(ids, device=device), torch.randn(3, 50, device=device)
    state = kernels.read(x, Reading(50, ids=ids, wants=("tail",))).state
    assert state[:, contract.REPEATS].tolist() == [1, 0, 0]
    empty = torch.zeros(3, contract.STATE, device=device)
    filled = kernels.with_repeats(empty, ids)
    assert filled[:, contract.REPEATS].tolist() == [1, 0, 0]
    assert not empty.any()


@pytest.mark.parametrize("support", ["tail", "truncate"])
def test_repeated_ids_on_ranks(impl, support, device):
    x = torch.randn(3, 40, device=device)
    ids = torch.tensor([[1, 30, 1, 5], [2, 33, 4, 33], [5, 6, 7, 8]], device=device)
    targets = ll.SparseTargets(ids, torch.full((3, 4), 0.1, device=device).log())

    def loss(z):
        return ll.topk_distill(z, targets, divergence="forward_kl", support=support)

    def work(ranks):
        leaf = x.chunk(2, 1)[ranks.index].clone().requires_grad_()
        value = loss(ll.VocabShard(leaf * 1.0, ranks))
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    whole = x.clone().requires_grad_()
    value = loss(whole)
    (want,) = torch.autograd.grad(value, whole)
    found = on_ranks(2, work)
    torch.testing.assert_close(found[0][0], value.detach())
    torch.testing.assert_close(torch.cat([d for _, d in found], 1), want)
