"""`eager` defines a backend: others have its functions, with the same parameters."""

import inspect
import types

import pytest
import torch

import logitless as ll
from logitless import eager, kernels
from logitless.contract import PRECISION
from logitless.core import choose_backend
from logitless.core.backend import Completed
from logitless.heads.blocks import BlockBackend
from logitless.parallel.rank_merge import ColumnBackend
from tests.support.calls import CALLS, leaves, made, outcome
from tests.support.sizes import ON_GPU

OWN = {"merge_pairs"}  # of what ranks gather, for every backend
# What a backend has only if `one_pass`, `can_accumulate` or `is_narrow` say so.
SHORTCUTS = {"plan_total", "exponents", "accumulate", "narrow_partial", "narrow_gradients"}
NAMES = {*eager.__all__} - OWN

# Blocks of a head serve losses that need only merged statistics (RowLoss.merges).
WHOLE_ROWS = {
    "above", "outside", "with_repeats", "gather", "gather_gradient", "pair_read", "pair_gradient",
    "topk", "sampled",
}  # fmt: skip
# What reads no logits of a vocabulary, and is called on no wrapper of a backend.
ELSEWHERE = {
    "row_dots", "row_dots_gradients", "pair_partial", "pair_sums", "pair_finish",
    "contrastive_read", "contrastive_finish", "contrastive_gradient", "sigmoid_contrastive",
    "single_rows",
}  # fmt: skip
WRAPPERS = {
    "columns": (
        ColumnBackend(eager, 0, 4, 8, lambda t: t),
        {"above", "outside", "with_repeats"} | ELSEWHERE,
    ),
    "blocks": (BlockBackend(eager), WHOLE_ROWS | {"partial", "merge", "finish"} | ELSEWHERE),
}


def parameters(function) -> list[tuple]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_kernels_have_the_functions_of_eager():
    assert {*kernels.__all__} == NAMES | SHORTCUTS
    for name in NAMES:
        wanted, found = getattr(eager, name), getattr(kernels, name)
        if callable(wanted):
            assert parameters(found) == parameters(wanted), name


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_have_functions_with_the_same_parameters(name):
    """What is optional in one of them can be missing in the other, or have another default."""
    backend, lacks = WRAPPERS[name]
    assert {name for name in NAMES if not hasattr(backend, name)} == lacks
    for name in NAMES - lacks:
        wanted, found = getattr(eager, name), getattr(backend, name)
        if not callable(wanted):
            continue
        wanted, found = parameters(wanted), parameters(found)
        both = min(len(wanted), len(found))
        assert [p for p, _ in found[:both]] == [p for p, _ in wanted[:both]], name
        nothing = inspect.Parameter.empty
        for (_, default), (_, other) in zip(wanted, found, strict=False):
            assert default is nothing or other is not nothing, name
        assert all(d is not nothing for _, d in [*wanted[both:], *found[both:]]), name


# --- a port that has begun


def scale_(x, g):
    x *= g[:, None] if g.dim() else g


def scale_two_(x, y, g):
    x *= g
    y *= g


def zero_ignored(x, reading):
    return x if reading.ignore_index is None else x * live(reading)[:, None]


def live(reading):
    return (reading.label != reading.ignore_index).reshape(-1)


def share(reading, mass, rows, like):
    total = torch.tensor(float(rows)) if reading.ignore_index is None else live(reading).sum()
    total = total if mass is None else mass.sum()
    return (1 / torch.where(total == 0, 1, total)).to(PRECISION[like.dtype])


def label_mass(reading, dtype):
    v = reading.class_weight
    v = torch.ones(reading.vocab) if v is None else v
    mass = v.to(PRECISION[dtype])[reading.label.reshape(-1).clamp(min=0).long()]
    return mass if reading.ignore_index is None else torch.where(live(reading), mass, 0)


def weighted_nll(nll, reading):
    return nll * label_mass(reading, nll.dtype).view(nll.shape)


def above(x, reading, y0):
    y = x if reading.softcap is None else reading.softcap * (x / reading.softcap).tanh()
    return (~(y <= y0[:, None])).sum(-1)


def topk(x, k, temperature, softcap, invariant=False):
    y = x if softcap is None else softcap * (x / softcap).tanh()
    logp = (y / temperature).log_softmax(-1)
    found = logp.topk(k)
    return found.indices, found.values, torch.log(-torch.expm1(found.values.logsumexp(-1)))


def row_dots(hidden, weight, ids):
    return torch.einsum("nd,nmd->nm", hidden, weight[ids.clamp(min=0)]) * (ids >= 0)


def with_repeats(state, ids):
    return state


PORT = (
    scale_, scale_two_, zero_ignored, share, label_mass, weighted_nll, above, topk, row_dots,
    with_repeats,
)  # fmt: skip


@pytest.fixture
def toy(monkeypatch):
    """A backend of ten functions, as an implementation that can be chosen; what ran of it."""
    ran = set()

    def recorded(function):
        def run(*args, **how):
            ran.add(function.__name__)
            return function(*args, **how)

        return run

    module = types.SimpleNamespace(**{f.__name__: recorded(f) for f in PORT})
    monkeypatch.setitem(choose_backend.BACKENDS, "toy", lambda: Completed(module))
    with ll.impl("toy"):
        yield ran


def test_ten_functions_of_a_port():
    assert all(f.__name__ in NAMES for f in PORT)
    assert len(PORT) == 10
    for function in PORT:
        assert parameters(function) == parameters(getattr(eager, function.__name__))


@pytest.mark.skipif(ON_GPU, reason="the toy knows no GPU")
@pytest.mark.parametrize("source", ["tensor", "head of two chunks"])
@pytest.mark.parametrize("name", CALLS)
def test_a_port_of_ten_functions_computes_every_loss(name, source, toy):
    with ll.impl("eager"):
        want = outcome(name, source)
    for got, right in zip(outcome(name, source), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(ON_GPU, reason="the toy knows no GPU")
def test_a_port_is_what_runs(toy):
    head = [t.requires_grad_() for t in leaves("head")]
    ll.cross_entropy(made("head of two chunks", head), torch.arange(6)).backward()
    ll.capture_topk(torch.randn(3, 9), 2)
    with ll.invariant():
        ll.kl_div(torch.randn(3, 9), torch.randn(3, 9), direction="forward")
    ll.contrastive(torch.randn(3, 2), torch.randn(3, 2))
    assert {"share", "topk"} <= toy
