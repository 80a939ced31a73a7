"""fuse(scores=True): metrics after a loss cost no further GEMM, and equal those of plain logits."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from logitless.core import call
from logitless.lazy import recipe, scores
from logitless.lazy.logits import LazyLogits
from tests.support.metrics_after_loss import (
    LOSSES,
    METRICS,
    B,
    D,
    Gemms,
    Model,
    T,
    V,
    assert_equal,
    causal,
    labels_of,
    logprob,
    pair,
    shifted,
    step,
    trl_entropy,
)


@pytest.fixture
def ids(device):
    return torch.randint(0, V, (B, T), device=device)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_cost_no_gemm(name, ids):
    """Loss, gradients and metrics equal those of plain logits. Else, metrics take GEMMs."""
    plain, fused = pair(ids.device)
    want, _ = step(plain, ids, LOSSES[name])
    got, gemms = step(fused, ids, LOSSES[name])
    assert not any(gemms.values()), gemms
    assert_equal(got, want)
    got, gemms = step(ll.fuse(fused), ids, LOSSES[name])
    assert all(sum(rows) >= B * (T - 1) for rows in gemms.values())
    assert_equal(got, want)


@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float32, "eager"), (torch.float16, "eager"), (torch.bfloat16, "triton")],
)
def test_dtypes(dtype, impl, ids):
    """The argmax is that of the rounded logits; other results are as near to fp64 as PyTorch's."""
    plain, fused = pair(ids.device, dtype=dtype)
    exact = Model(torch.float64).to(ids.device)
    exact.load_state_dict({k: p.double() for k, p in plain.state_dict().items()})
    with ll.impl(impl):
        got, gemms = step(fused, ids, shifted)
    assert not any(gemms.values())
    want, _ = step(plain, ids, shifted)
    truth, _ = step(exact, ids, shifted)
    for name, a, b, c in zip(METRICS, got[3:], want[3:], truth[3:], strict=True):
        assert a.dtype == b.dtype, name
        if not a.is_floating_point():
            assert torch.equal(a, b), name
            continue
        limit = 2 * (b.double() - c).abs().max() + 4 * torch.finfo(dtype).eps * c.abs().max()
        assert (a.double() - c).abs().max() <= limit, name


def test_ties_have_the_lowest_index(ids):
    plain, fused = pair(ids.device)
    for model in (plain, fused):
        model.lm_head.weight.data[10:20] = model.lm_head.weight.data[:10]
    got, _ = step(fused, ids, causal, {"argmax": METRICS["argmax"]})
    want = plain(ids)[:, :-1].argmax(-1)
    assert (want < 10).any()  # columns 0 to 9 equal columns 10 to 19
    assert torch.equal(got[-1], want)


OPTIONS = {
    "temperature": lambda z: z / 0.7,
    "softcap": lambda z: 2 * torch.tanh(z / 2),
    "both": lambda z: 2 * torch.tanh(z / 2) / 0.7,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_softmax(name, ids):
    """A loss and metrics with the same options cost nothing; other options are computed."""
    option, some = OPTIONS[name], {k: METRICS[k] for k in ("argmax", "entropy of TRL", "logsumexp")}
    plain, fused = pair(ids.device)

    def loss(z, ids):
        return shifted(option(z), ids)

    def under(change):
        return {k: lambda z, ids, f=f: f(change(z), ids) for k, f in some.items()}

    for metrics, free in ((under(option), True), (some, False)):
        got, gemms = step(fused, ids, loss, metrics)
        want, _ = step(plain, ids, loss, metrics)
        assert_equal(got, want)
        assert any(gemms.values()) is not free, gemms


def ignoring(ids):
    labels = labels_of(ids).clone()
    labels[0] = labels[1, 2] = -100
    return labels


@pytest.mark.parametrize("metric", ["argmax", "logsumexp", "entropy of TRL"])
def test_ignored_rows_are_computed_once(metric, ids):
    """The loss ignores the first sequence, the last row of each sequence, and one more row."""
    plain, fused = pair(ids.device)
    labels, function = ignoring(ids), METRICS[metric]
    count = int((labels == -100).sum())
    assert count == T + 1 + 2
    z = fused(ids)
    F.cross_entropy(z.flatten(0, 1), labels.flatten())
    want = function(plain(ids).detach(), ids)
    with torch.no_grad(), Gemms() as seen:
        assert_equal([function(z, ids)], [want])
    assert sum(seen.rows) == count
    with torch.no_grad(), Gemms() as seen:
        got = [function(z, ids), z.argmax(-1)]
    assert not seen.rows
    assert_equal(got, [want, plain(ids).argmax(-1)])


def test_log_probabilities_of_other_ids(ids):
    """Only rows whose id is not the label of the loss are computed."""
    plain, fused = pair(ids.device)
    labels = labels_of(ids)

    def metric(z, index):
        return z.detach().log_softmax(-1).gather(-1, index.unsqueeze(-1))

    other = labels.clamp_min(0)
    other[0, 3] = (other[0, 3] + 1) % V
    z = fused(ids)
    causal(z.double(), ids)
    for index in (other, other.flip(0), other):
        assert_equal([metric(z, index)], [metric(plain(ids), index)])
    z = fused(ids)
    F.cross_entropy(z.flatten(0, 1), labels.flatten())
    with Gemms() as seen:
        metric(z, other)
    assert sum(seen.rows) == B + 1
    metric(z, other.flip(0))
    with Gemms() as seen:  # the scores of the loss's labels are still known
        metric(z, labels.clamp_min(0))
    assert sum(seen.rows) <= B


def test_an_id_out_of_range_is_nan_where_values_are_not_checked(ids, monkeypatch):
    """On a GPU, ids are not checked. The id -1 of an ignored row must not look like a known row."""
    _, fused = pair(ids.device)
    labels = ignoring(ids)
    z = fused(ids)
    F.cross_entropy(z.flatten(0, 1), labels.flatten())
    monkeypatch.setattr(call, "reads_values", lambda t: False)
    got = ll.token_logprobs(z.detach(), labels.masked_fill(labels == -100, -1), ignore_index=None)
    assert torch.equal(got.isnan(), labels == -100)


def test_repeated_rows_with_different_labels(ids):
    """A loss can read a row several times; a log-probability belongs to the label it was asked."""
    plain, fused = pair(ids.device)
    places = torch.tensor([0, 5, 5, 5, 2, 0], device=ids.device)
    labels = torch.tensor([1, 2, 3, -100, 5, 6], device=ids.device)
    z = fused(ids).view(-1, V)
    F.cross_entropy(z[places], labels)
    for ask in (labels.clamp_min(0), labels.clamp_min(0).flip(0)):
        got = ll.token_logprobs(z.detach()[places], ask)
        want = ll.token_logprobs(plain(ids).detach().view(-1, V)[places], ask)
        assert_equal([got], [want])


def test_no_rows(ids):
    """A loss over no rows, or over ignored rows only, and a batch without rows."""
    plain, fused = pair(ids.device)
    for labels in (ids[:0], torch.full_like(ids, -100)):
        z = fused(ids)
        F.cross_entropy(z[: len(labels)].flatten(0, 1), labels.flatten(), reduction="sum")
        assert torch.equal(z.argmax(-1), plain(ids).argmax(-1))
        assert_equal([trl_entropy(z.detach(), ids)], [trl_entropy(plain(ids).detach(), ids)])
    z = fused(ids[:0])
    F.cross_entropy(z.flatten(0, 1), ids[:0].flatten(), reduction="sum")
    assert z.argmax(-1).shape == (0, T)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode, ids, monkeypatch):
    """An evaluation with labels, and preprocess_logits_for_metrics=argmax."""
    monkeypatch.setattr(recipe, "SMALL", 0)
    plain, fused = pair(ids.device)
    with mode():
        z = fused.eval()(ids)
        assert type(z) is LazyLogits
        loss = shifted(z, ids)
        with Gemms() as seen:
            predictions = z[:, :-1].argmax(-1)
        assert not seen.rows
        assert_equal([loss, predictions], [shifted(plain(ids), ids), plain(ids)[:, :-1].argmax(-1)])
    with mode():  # a write after the loss changes the metrics
        z = fused(ids)
        shifted(z, ids)
        z[:, :, 4] = 1e3
        assert (z.argmax(-1) == 4).all()
        assert (z[:, :-1].argmax(-1) == 4).all()


def test_the_host_waits_once_for_the_same_rows(ids, monkeypatch):
    _, fused = pair(ids.device)
    waits, lacks = [], scores.lacks
    monkeypatch.setattr(scores, "lacks", lambda *a: waits.append(a) or lacks(*a))
    z = fused(ids)
    shifted(z, ids)
    assert not waits
    rows = z.detach()[:, :-1]
    for _ in range(3):
        rows.argmax(-1)
        rows.logsumexp(-1)
    assert len(waits) == 1


def test_a_head_that_must_not_wait_or_gather(ids):
    """The option drop_ignored=False, and an FSDP module, whose ranks gather the weight together."""
    model = ll.fuse(Model().to(ids.device), scores=True, drop_ignored=False)
    _, gemms = step(model, ids, shifted)
    assert all(gemms.values())

    class Sharded(nn.Linear):
        def unshard(self):
            raise AssertionError("the weight is in memory")

    model = Model()
    model.lm_head = Sharded(D, V, bias=False).double()
    model = ll.fuse(model.to(ids.device), scores=True)
    assert model(ids).recipe.scores is None
    assert ll.fuse(Model().to(ids.device))(ids).recipe.scores is None


def warm(ids, **how):
    plain, fused = pair(ids.device, **how)
    z = fused(ids)
    causal(z, ids).backward()
    assert z.recipe.scores.tables
    return plain, fused, z


@pytest.mark.parametrize("asked", [False, True])
def test_after_a_step_of_the_optimiser(asked, ids):
    """As without scores: reading logits of the old weight raises."""
    _, fused, z = warm(ids)
    if asked:
        z.argmax(-1)
    torch.optim.SGD(fused.parameters(), 0.1).step()
    for metric in (lambda: z.argmax(-1), lambda: trl_entropy(z.detach(), ids)):
        with pytest.raises(RuntimeError, match="must not be modified in place"):
            metric()


def test_after_a_write_to_hidden(ids):
    _, fused = pair(ids.device)
    hidden = []
    fused.lm_head.register_forward_hook(lambda _, args, out: hidden.append(args[0]))
    z = fused(ids)
    causal(z, ids)
    with torch.no_grad():
        hidden[0].mul_(2)
    with pytest.raises(RuntimeError, match="must not be modified in place"):
        z.argmax(-1)


def biased(z):
    return z + torch.linspace(-9, 9, V).to(z)


CHANGES = {
    "bias": biased,
    "minus": lambda z: -z,
    "columns": lambda z: z[..., 3:9],
    "masked": lambda z: z.masked_fill(torch.arange(V, device=z.device) > 4, -torch.inf),
    "another head": lambda z: z + biased(z),
    "function": lambda z: z.square(),
    "repeated": lambda z: torch.cat([z.detach(), z.detach()[[2, 1, 0]]]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_logits(name, ids):
    plain, _, z = warm(ids)
    change = CHANGES[name]
    with torch.no_grad():
        for metric in (METRICS["argmax"], METRICS["logsumexp"], METRICS["entropy by softmax"]):
            got, want = (metric(change(logits), ids) for logits in (z, plain(ids)))
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_bias_of_minus_infinity(ids):
    """PyTorch's p log p is NaN, before and after a loss."""
    plain, fused = pair(ids.device, bias=True)
    for model in (plain, fused):
        model.lm_head.bias.data[3] = -torch.inf
    target = torch.zeros_like(ids)
    z = fused(ids)
    F.cross_entropy(z.flatten(0, 1), target.flatten())
    with torch.no_grad():
        assert torch.equal(z.argmax(-1), plain(ids).argmax(-1))
        assert trl_entropy(z, ids).isnan().all()


def test_gradients_flow_through_metrics(ids):
    """A statistic with a gradient is computed from the head, with the gradient of plain logits."""
    plain, _, z = warm(ids)
    _, fused = pair(ids.device)
    z = fused(ids)
    causal(z, ids)
    weight, wanted = fused.lm_head.weight, plain.lm_head.weight
    for metric in (logprob, METRICS["entropy by softmax"], METRICS["logsumexp"]):
        (got,) = torch.autograd.grad(metric(z[:, :-1], ids).square().sum(), weight)
        (want,) = torch.autograd.grad(metric(plain(ids)[:, :-1], ids).square().sum(), wanted)
        assert_equal([got], [want])


def test_invariant_metrics_are_invariant(ids):
    """A metric under invariant() is not read from a loss outside of it."""
    *_, z = warm(ids)
    with ll.invariant(), torch.no_grad(), Gemms() as seen:
        z.argmax(-1)
    assert seen.rows


def test_scores_live_as_long_as_the_logits(ids):
    _, fused = pair(ids.device)
    z = fused(ids)
    loss = causal(z, ids)
    z.argmax(-1)
    answers = weakref.ref(z.recipe.scores)
    assert answers().tables
    del z
    gc.collect()
    assert answers() is None
    loss.backward()
