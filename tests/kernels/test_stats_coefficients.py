"""The kernel that computes coefficients from gradients of statistics agrees with eager's RULES."""

import itertools

import pytest
import torch

from logitless import eager, kernels
from logitless.contract import COEFFICIENTS, ENTROPY, FIELDS, STATE, TAIL, Reading
from logitless.eager.stats_coefficients import AT_IDS, RULES
from tests.support.launches import launched
from tests.support.laws import poisoned_memory

PUBLIC = ("lse", "picked", "logprob", "entropy", "total", "argmax")  # statistics of row_stats
SUBSETS = [
    names for n in range(6) for names in itertools.combinations(PUBLIC[:5], n)
]  # statistics that have a gradient in this call


def state_of(N, device):
    state = torch.zeros(N, STATE, device=device)
    state[:, ENTROPY], state[:, TAIL] = torch.rand(N) * 9, -torch.rand(N) * 40
    return state


def ids_of(lead, K, device):
    return None if K is None else torch.zeros((*lead, K), dtype=torch.int64, device=device)


def compare(reading, state, gradients, one_launch=True):
    """The kernel writes to poisoned memory. Its coefficients must equal those of eager in fp64."""
    with poisoned_memory(), launched() as names:
        got = kernels.coefficients(reading, state, gradients)
    assert ("_stats_coefficients_kernel" in names) == one_launch
    exact = {name: None if d is None else d.double() for name, d in gradients.items()}
    want = eager.coefficients(reading, state.double(), exact)
    assert got.has == want.has
    assert got.rows.shape == (len(state), COEFFICIENTS)
    torch.testing.assert_close(got.rows.double(), want.rows, rtol=1e-5, atol=1e-5)
    if want.ids is None:
        assert got.ids is None
    else:
        torch.testing.assert_close(got.ids.double(), want.ids)


@pytest.mark.parametrize("K", [None, 1, 5, 130])
def test_every_subset_of_gradients(K, device):
    lead = (2, 3)
    reading = Reading(50, ids=ids_of(lead, K, device), wants=PUBLIC)
    for names in SUBSETS:
        gradients = dict.fromkeys(PUBLIC)
        for name in names:
            many = K is not None and name in AT_IDS
            gradients[name] = torch.randn((*lead, K) if many else lead, device=device)
        compare(reading, state_of(6, device), gradients)


def forms_of(d):
    """Yields tensors with the shape of d and the strides that gradients can have in autograd."""
    yield d.mean().expand(d.shape)  # the gradient of a sum or mean
    yield d.mT.contiguous().mT
    yield torch.stack((d, -d), -1)[..., 0]
    yield d[:1].expand(d.shape)


@pytest.mark.parametrize("K", [None, 3])
def test_gradients_in_any_memory(K, device):
    lead = (4, 70)  # more rows than one program computes
    reading = Reading(50, ids=ids_of(lead, K, device), wants=("lse", "logprob", "entropy"))
    shapes = {"lse": lead, "logprob": lead if K is None else (*lead, K), "entropy": lead}
    forms = {name: forms_of(torch.randn(shape, device=device)) for name, shape in shapes.items()}
    for found in zip(*forms.values(), strict=True):
        compare(reading, state_of(280, device), dict(zip(shapes, found, strict=True)))


def test_an_infinite_gradient_stays_in_its_own_coefficients(device):
    reading = Reading(50, wants=("total", "entropy"))
    d = torch.tensor([torch.inf, torch.nan, 1.0], device=device)
    rows = kernels.coefficients(reading, state_of(3, device), {"total": d}).rows
    assert torch.equal(rows[:, FIELDS.index("total")].nan_to_num(7), d.nan_to_num(7))
    rows[:, FIELDS.index("total")] = 0
    assert torch.equal(rows, torch.zeros_like(rows))


def test_rules_that_one_launch_cannot_compute(device):
    state, d = state_of(4, device), torch.randn(4, device=device)
    every = Reading(50, wants=tuple(RULES))
    compare(every, state, {name: d * i for i, name in enumerate(RULES)}, one_launch=False)
    weight = torch.rand(50, device=device)
    totals = Reading(50, class_weight=weight, wants=("log_total",))
    compare(totals, state, {"log_total": d}, one_launch=False)
    ids = torch.zeros(4, 2, dtype=torch.int64, device=device)
    slots = Reading(50, ids=ids, wants=("logprob", "tail"))
    at_ids = torch.randn(4, 2, device=device)
    for tail in (d, None):
        compare(slots, state, {"logprob": at_ids, "tail": tail}, one_launch=False)


def test_no_rows(device):
    for K in (None, 2):
        reading = Reading(50, ids=ids_of((0,), K, device), wants=("logprob", "lse"))
        gradients = {"logprob": torch.zeros((0,) if K is None else (0, K), device=device)}
        compare(reading, state_of(0, device), gradients, one_launch=False)
