"""sampled_softmax against its definition over materialised logits, in fp64, and its laws."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless import eager, kernels
from logitless.contract import NO_ID
from logitless.eager import table_rows
from logitless.heads import choose_cut
from logitless.kernels.sampled_softmax import table_rows as table_kernels
from tests.support.laws import FLOOR, error, gradients
from tests.support.sampled import D, K, N, V, by_definition, case

NAN = math.nan
OPTIONS = {
    "mean": {},
    "all hits count": {"remove_hits": False, "reduction": "sum"},
    "temperature": {"temperature": 0.3, "reduction": "sum"},
    "none": {"reduction": "none"},
    "no correction": {"log_q": None, "target_log_q": None},
    "of negatives": {"target_log_q": None},
    "of the target": {"log_q": None},
    "no bias": {"bias": None},
    "sparse": {"sparse_grad": True},
}
KINDS = pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])


def arguments(options, device, per_row, dtype=torch.float64, **made):
    tensors, how = case(device, dtype, per_row, **made)
    how |= OPTIONS[options]
    if "bias" in how:
        del tensors["bias"]
    return tensors, how


def assert_close(got, want, bound):
    assert got.shape == want.shape
    assert error(got.detach(), want.detach()) <= bound


@KINDS
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunked", [False, True])
def test_values_and_gradients_in_fp64(options, per_row, chunked, device, monkeypatch):
    tensors, how = arguments(options, device, per_row)
    if chunked:  # chunks of two rows
        how["workspace"] = 2 * 32 * 8
        monkeypatch.setattr(table_rows, "CHUNK_BYTES", 2 * (K + 1) * D * 8)
    got, want = ll.sampled_softmax(**tensors, **how), by_definition(**tensors, **how)
    assert_close(got, want, 1e-12)
    leaves = list(tensors.values())
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert_close(a, b, 1e-12)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", ["mean", "none", "sparse"])
def test_values_and_gradients_by_each_backend(options, per_row, dtype, impl, device):
    """The error is at most twice that of the definition in fp32, plus one rounding of gradients."""
    tensors, how = arguments(options, device, per_row, dtype)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    single = {name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    want, plain = by_definition(**wide, **how), by_definition(**single, **how)
    got = ll.sampled_softmax(**tensors, **how)
    assert got.dtype == torch.float32
    floor = FLOOR[torch.float32]
    assert_close(got.double(), want, 2 * error(plain.detach(), want.detach()) + floor)
    # Logits have a gradient of the dtype of hidden.
    rounding = 0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    found = (
        gradients(x, list(t.values())) for x, t in ((got, tensors), (want, wide), (plain, single))
    )
    for t, a, b, c in zip(tensors.values(), *found, strict=True):
        assert a.dtype == t.dtype
        assert_close(a.double(), b, 2 * error(c, b) + floor + rounding)


@KINDS
def test_the_kernels_beside_the_eager_functions(per_row, device):
    """row_dots of kernels and eager: ids out of range, ignored rows, rows of any stride."""
    h = (
        torch.randn(N, 2 * D, device=device)[:, ::2]
        if per_row
        else torch.randn(N, D, device=device)
    )
    w = torch.randn(D, V, device=device).T
    ids = torch.randint(0, V, (N, K), device=device)
    ids[0], ids[1, 3], ids[2, 4] = NO_ID, V, -1
    g = torch.randn(N, K, device=device)
    g[3, ::2] = 0
    w[5] = NAN
    g[ids == 5] = 0  # 0 · NaN adds 0 to the gradients
    got, want = kernels.row_dots(h, w, ids), eager.row_dots(h, w, ids)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[1, 3].isnan()
    assert (got[0] == 0).all()
    for sparse in (False, True):
        many = [b.row_dots_gradients(h, w, ids, g, (True, True), sparse) for b in (kernels, eager)]
        for a, b in zip(*many, strict=True):
            assert a.is_sparse == b.is_sparse
            assert a.to_dense().isfinite().all()
            torch.testing.assert_close(a.to_dense(), b.to_dense())
    for needs in ((True, False), (False, True)):
        found = kernels.row_dots_gradients(h, w, ids, g, needs, False)
        assert tuple(t is not None for t in found) == needs


@pytest.mark.parametrize("ids", ["one", "few", "sorted", "long runs"])
def test_sums_over_blocks_of_pairs(ids, device, monkeypatch):
    """Runs that end with a block, cross one or many blocks, or fill whole blocks."""
    monkeypatch.setattr(table_kernels, "LENGTH", 4)
    made = (
        {
            "one": torch.zeros(6, 5),
            "few": torch.randint(0, 3, (6, 5)),
            "sorted": torch.arange(30).view(6, 5) // 4,
            "long runs": torch.tensor([0] * 3 + [1] * 14 + [2] * 3 + [4] * 9 + [7]).view(6, 5),
        }[ids]
        .long()
        .to(device)
    )
    h, g = torch.randn(6, 3, device=device), torch.randn(6, 5, device=device)
    w = torch.randn(9, 3, device=device)
    for sparse in (False, True):
        _, got = kernels.row_dots_gradients(h, w, made, g, (False, True), sparse)
        want = torch.zeros_like(w).index_add_(
            0, made.view(-1), (g.unsqueeze(-1) * h.unsqueeze(1)).view(-1, 3)
        )
        torch.testing.assert_close(got.to_dense(), want)
        if sparse:
            assert got.indices()[0].tolist() == made.unique().tolist()


@KINDS
def test_more_dimensions(per_row, impl, device):
    tensors, how = case(device, torch.float32, per_row, lead=(2, 3))
    how["row_weight"] = torch.rand(2, 3, device=device)
    got = ll.sampled_softmax(**tensors, **how, reduction="none")
    assert got.shape == (2, 3)
    assert_close(got, by_definition(**tensors, **how, reduction="none"), 1e-5)
    module = ll.nn.SampledSoftmaxLoss(reduction="none")
    target, negatives = how.pop("target"), how.pop("negatives")
    hidden, weight, bias = tensors.values()
    again = module(hidden, weight, target, negatives, bias=bias, **how)
    assert torch.equal(again, got)


@KINDS
def test_an_ignored_row_is_not_read(per_row, impl, device):
    """NaN in the hidden state of an ignored row, and of a masked row, changes nothing."""
    tensors, how = case(device, torch.float32, per_row)
    mask = torch.arange(N, device=device) != 4
    with torch.no_grad():
        tensors["hidden"][1] = tensors["hidden"][4] = NAN
    if per_row:  # an id out of range in an ignored row is not read either
        how["negatives"][1, 0] = V + 5
    got = ll.sampled_softmax(**tensors, **how, mask=mask)
    want = by_definition(**tensors, **how, mask=mask)
    assert_close(got, want, 1e-5)
    leaves = list(tensors.values())
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@KINDS
def test_no_row_counts(per_row, impl, device):
    tensors, how = case(device, torch.float32, per_row)
    how["target"].fill_(-100)
    loss = ll.sampled_softmax(**tensors, **how)
    assert loss == 0
    assert not any(t.any() for t in gradients(loss, list(tensors.values())))


@KINDS
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_target_of_many_rows(dtype, sparse, per_row, device):
    """The gradients of 4,096 equal targets are added in fp32, and the sum is rounded once."""
    g, rows = torch.Generator().manual_seed(0), 4096
    tensors = {
        "hidden": torch.rand(rows, 8, generator=g) * 0.5 + 0.1,
        "weight": torch.randn(50, 8, generator=g) * 0.1,
        "bias": torch.randn(50, generator=g) * 0.1,
    }
    tensors = {name: t.to(device, dtype).requires_grad_() for name, t in tensors.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    negatives = torch.tensor([5, 6, 7], device=device)
    how = {
        "target": torch.zeros(rows, dtype=torch.int64, device=device),
        "negatives": negatives.expand(rows, 3) if per_row else negatives,
        "reduction": "sum",
    }
    loss = ll.sampled_softmax(**tensors, **how, sparse_grad=sparse)
    found = [torch.autograd.grad(x, [t["weight"], t["bias"]]) for x, t in (
        (loss, tensors), (by_definition(**wide, **how), wide),
    )]  # fmt: skip
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        assert error(got.to_dense().double(), want) <= 2 * torch.finfo(dtype).eps


@KINDS
def test_every_negative_is_a_hit(per_row, impl, device):
    """The target is alone, so the loss and its gradient are 0, not NaN."""
    tensors, how = case(device, torch.float32, per_row)
    how["target"].fill_(3)
    how["negatives"].fill_(3)
    loss = ll.sampled_softmax(**tensors, **how, reduction="none")
    assert (loss.abs() < 1e-6).all()
    assert all((t.abs() < 1e-5).all() for t in gradients(loss, list(tensors.values())))
    with_hits = ll.sampled_softmax(**tensors, **how, remove_hits=False)
    assert_close(with_hits, by_definition(**tensors, **how, remove_hits=False), 1e-5)


def test_in_batch_negatives(device):
    """The targets of the batch are the negatives. Equal targets are no negatives of each other."""
    h = torch.randn(6, D, device=device, dtype=torch.float64)
    w = torch.randn(V, D, device=device, dtype=torch.float64)
    target = torch.tensor([3, 5, 3, 8, 9, 5], device=device)
    got = ll.sampled_softmax(h, w, target, target, reduction="none")
    z = h @ w[target].T
    other = target[:, None] != target[None, :]
    lse = torch.cat((z.diagonal()[:, None], z.masked_fill(~other, -torch.inf)), 1).logsumexp(1)
    torch.testing.assert_close(got, lse - z.diagonal())


@pytest.mark.parametrize("per_row", [True, False], ids=["per row", "shared"])
@pytest.mark.few(1)
def test_the_sum_over_all_items_is_estimated_without_bias(per_row, device):
    """With log_q = log(K q), the mean of e^loss over many samples is e^loss of the full softmax.

    The seed is fixed. The bound is four standard errors of the mean, and a standard error is below
    1 %, so a missing correction, or a hit that counts, is found.
    """
    g = torch.Generator().manual_seed(1)
    rows, count = 2000, 32
    h = torch.randn(1, D, generator=g, dtype=torch.float64).to(device)
    w = (torch.randn(V, D, generator=g, dtype=torch.float64) * 0.5).to(device)
    q = torch.softmax(torch.randn(V, generator=g, dtype=torch.float64), 0)
    target = q.argmax().to(device).expand(1)  # the item with the most hits
    full = torch.nn.functional.cross_entropy(h @ w.T, target).exp()
    drawn = torch.multinomial(q, rows * count, True, generator=g).view(rows, count)
    log_q, drawn = (count * q).log().to(device)[drawn], drawn.to(device)
    if per_row:
        losses = ll.sampled_softmax(
            h.expand(rows, D), w, target.expand(rows), drawn, log_q=log_q, reduction="none"
        )
    else:
        some = zip(drawn[:1000], log_q[:1000], strict=True)
        losses = torch.stack([ll.sampled_softmax(h, w, target, n, log_q=x) for n, x in some])
    found = losses.exp()
    standard = found.std() / math.sqrt(len(found))
    assert standard < 0.01 * full
    assert (found.mean() - full).abs() < 4 * standard


# PyTorch's own Adagrad does not say whether it wants checks of the sparse tensors that it makes.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
@KINDS
def test_a_sparse_gradient_holds_the_touched_rows(optimizer, per_row, device):
    """The sparse gradient is the dense gradient, and optimizers take it."""
    torch.manual_seed(0)
    h = torch.randn(3, D, device=device)
    target = torch.tensor([2, 7, -100], device=device)
    negatives = torch.tensor([4, 4, 9], device=device)
    negatives = negatives.expand(3, 3).clone() if per_row else negatives
    items = nn.Embedding(V, D, device=device)
    (dense,) = torch.autograd.grad(
        ll.sampled_softmax(h, items.weight, target, negatives), items.weight
    )
    before = items.weight.detach().clone()
    step = optimizer(items.parameters(), lr=0.1)
    ll.sampled_softmax(h, items.weight, target, negatives, sparse_grad=True).backward()
    assert items.weight.grad.is_sparse
    torch.testing.assert_close(items.weight.grad.to_dense(), dense)
    step.step()
    touched = (items.weight != before).any(1).nonzero()[:, 0].tolist()
    assert touched == [2, 4, 7, 9]


@KINDS
def test_autocast(per_row, device):
    """A table in fp32 beside 16-bit hidden states, as under autocast."""
    tensors, how = case(device, torch.float32, per_row)
    want = ll.sampled_softmax(**tensors, **how)
    hidden = tensors.pop("hidden").to(torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        got = ll.sampled_softmax(hidden, **tensors, **how)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    with pytest.raises(TypeError, match=r"weight must be torch\.bfloat16 like hidden"):
        ll.sampled_softmax(hidden, **tensors, **how)


@KINDS
@pytest.mark.few(1)
def test_compiled(per_row, device):
    tensors, how = case(device, torch.float32, per_row)
    got = torch.compile(ll.sampled_softmax, backend="eager")(**tensors, **how)
    want, leaves = ll.sampled_softmax(**tensors, **how), list(tensors.values())
    assert torch.equal(got, want)
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(ll.sampled_softmax, backend="eager", fullgraph=True)(**tensors, **how)


@pytest.mark.parametrize("mode", [torch.enable_grad, lambda: FlopCounterMode(display=False)])
def test_backward_twice_over_a_small_head(mode, device, monkeypatch):
    """A small head saves its logits. Under a dispatch mode, it calls an operator."""
    monkeypatch.setattr(choose_cut, "is_small", lambda *_: True)
    tensors, how = case(device)
    leaves, want = list(tensors.values()), by_definition(**tensors, **how)
    with mode():
        got = ll.sampled_softmax(**tensors, **how)
        both = gradients(got, leaves), gradients(got, leaves)
    exact = gradients(want, leaves)
    for a, b in zip((got, *both[0], *both[1]), (want, *exact, *exact), strict=True):
        assert_close(a, b, 1e-12)


@KINDS
def test_a_second_derivative_is_refused(per_row, device):
    tensors, how = case(device, torch.float32, per_row)
    loss = ll.sampled_softmax(**tensors, **how)
    (d,) = torch.autograd.grad(loss, tensors["weight"], create_graph=True)
    with pytest.raises(RuntimeError, match="must not be differentiated twice"):
        d.sum().backward()


@KINDS
@pytest.mark.usefixtures("nobody_looks")
def test_ids_out_of_range_are_not_read(per_row, impl, device):
    """As on a GPU: the row of a bad id is NaN; a bad shared negative is in every row."""
    tensors, how = case(device, torch.float32, per_row)
    how["target"][3] = V
    if per_row:
        how["negatives"][5, 2] = -3
    loss = ll.sampled_softmax(**tensors, **how, reduction="none")
    assert loss.isnan().nonzero()[:, 0].tolist() == ([3, 5] if per_row else [3])
    if not per_row:
        how["negatives"][2] = V + 7
        loss = ll.sampled_softmax(**tensors, **how, reduction="none")
        assert loss.isnan().tolist() == (how["target"] != -100).tolist()


def test_no_logits_of_all_rows(device, monkeypatch):
    """Shared negatives are a head: three GEMMs for a mean, and chunks in a workspace."""
    seen = []
    choose = choose_cut.choose

    def record(work, workspace, kind):
        seen.append((work.rows, work.vocab, work.merges, choose(work, workspace, kind)))
        return seen[-1][-1]

    monkeypatch.setattr(choose_cut, "choose", record)
    tensors, how = case(device, torch.float32)
    ll.sampled_softmax(**tensors, **how, workspace=2 * 32 * 4).backward()
    rows, columns, merges, cut = seen[0]
    assert (rows, columns, merges) == (N, K, False)
    assert cut.columns is None
    assert cut.rows == 2
