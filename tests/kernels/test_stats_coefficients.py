"""The kernel that computes coefficients from gradients of statistics agrees with eager's RULES."""

import itertools

import pytest
import torch

from logitless import eager, kernels
from logitless.contract import COEFFICIENTS, ENTROPY, FIELDS, STATE, TAIL, Reading
from logitless.eager.stats_coefficients import AT_IDS, RULES
from logitless.losses.statistics import Read
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


# --- coefficients inside the kernel of the gradient


def compare_gradients(reading, gradients, factor=None, into="new"):
    """One launch, without coefficients in memory, equals eager's two functions in fp64."""
    lead, device = reading.label.shape, reading.label.device
    logits = 3 * torch.randn(*lead, reading.vocab, device=device)
    x = logits.clone()
    dx = {"new": None, "logits": x, "other": torch.full_like(x, torch.nan)}[into]
    state = kernels.read(x, reading._replace(wants=PUBLIC)).state
    with poisoned_memory(), launched() as names:
        got = kernels.stats_gradient(x, reading, state, gradients, factor, dx)
    assert names == {"_stats_bwd_kernel"}
    assert dx is None or got is dx
    exact = reading._replace(wants=PUBLIC)
    state = eager.read(logits.double(), exact).state
    twice = {name: d.double() for name, d in gradients.items()}
    found = eager.coefficients(exact, state, twice)
    one = torch.ones((), device=device, dtype=torch.float64)
    factor = None if factor is None else factor.double()
    want = eager.gradient(logits.double(), exact, state, found, one, factor)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def labels(lead, device, vocab=50):
    label = torch.randint(0, vocab, lead, device=device)
    label[..., 1] = -100
    return label


@pytest.mark.parametrize(
    ("into", "options"),
    [("new", {}), ("logits", {"temperature": 0.7}), ("other", {"softcap": 5.0})],
)
def test_every_subset_of_gradients_in_one_launch(into, options, device):
    lead = (1, 3)
    reading = Reading(50, label=labels(lead, device), ignore_index=-100, wants=PUBLIC, **options)
    for names in SUBSETS:
        if 0 < len(names) <= (3 if into == "new" else 1):
            gradients = {name: torch.randn(lead, device=device) for name in names}
            compare_gradients(reading, gradients, into=into)


def test_gradients_in_any_memory_in_one_launch(device):
    lead, names = (2, 3), ("logprob", "entropy", "lse")
    reading = Reading(50, label=labels(lead, device), ignore_index=-100, wants=names)
    forms = [forms_of(torch.randn(lead, device=device)) for _ in names]
    factors = [None, torch.tensor(0.3, device=device), torch.rand(6, device=device), None]
    for factor, *found in zip(factors, *forms, strict=True):
        compare_gradients(reading, dict(zip(names, found, strict=True)), factor)


def test_one_launch_skips_what_is_not_given(device):
    """An infinite gradient or factor does not reach coefficients that do not depend on it."""
    x = torch.zeros(3, 50, device=device)
    reading = Reading(50, wants=("total", "lse"))
    state = kernels.read(x, reading).state
    d = torch.tensor([torch.inf, 1.0, -torch.inf], device=device)
    zero = torch.zeros(3, device=device)
    got = kernels.stats_gradient(x, reading, state, {"total": d, "lse": zero})
    assert torch.equal(got, d[:, None].expand(3, 50))
    factor = torch.tensor(torch.inf, device=device)
    got = kernels.stats_gradient(x, reading, state, {"total": zero + 1}, factor)
    assert torch.equal(got, factor.expand(3, 50))


@pytest.mark.parametrize("bad", [50, -1])
def test_a_bad_label_makes_its_row_nan(bad, device):
    """The row is NaN for every gradient, because a statistic that was read uses the label."""
    x = torch.randn(3, 50, device=device)
    label = torch.tensor([7, bad, 9], device=device)
    reading = Reading(50, label=label, ignore_index=-100, wants=("logprob", "entropy", "lse"))
    loss, d = Read(reading), torch.ones(3, device=device)
    for n in (1, 2, 3):
        for names in itertools.combinations(reading.wants, n):
            upstream = tuple(d if name in names else None for name in reading.wants)
            for backend, logits in ((kernels, x), (eager, x.double())):
                saved = (backend.read(logits, reading).state,)
                rows = loss.backward(backend, logits, saved, upstream).isnan()
                assert rows.all(-1).tolist() == rows.any(-1).tolist() == [False, True, False]


def test_other_logits_in_one_launch(device):
    """Logits of 16 bits, without rows, and in memory whose rows are not contiguous."""
    reading = Reading(50, label=labels((3,), device), ignore_index=-100, wants=("lse", "entropy"))
    d = {name: torch.randn(3, device=device) for name in reading.wants}
    x = torch.randn(50, 3, device=device).t()
    state = kernels.read(x, reading).state
    want = kernels.stats_gradient(x.contiguous(), reading, state, d)
    assert torch.equal(kernels.stats_gradient(x, reading, state, d), want)
    over = x.clone(memory_format=torch.preserve_format)
    assert kernels.stats_gradient(over, reading, state, d, None, over) is over
    assert torch.equal(over, want)
    short = kernels.stats_gradient(x.half(), reading, state, d)
    assert short.dtype == torch.float16
    torch.testing.assert_close(short.float(), want, rtol=2e-3, atol=2e-3)
    none = {name: t[:0] for name, t in d.items()}
    empty = reading._replace(label=reading.label[:0])
    assert kernels.stats_gradient(x[:0], empty, state[:0], none).shape == (0, 50)


def test_gradients_that_need_coefficients_in_memory(device):
    x, d = torch.zeros(4, 50, device=device), torch.randn(4, device=device)
    reading = Reading(50, label=labels((4,), device), ignore_index=-100, wants=PUBLIC)
    state = kernels.read(x, reading).state
    gradients = dict.fromkeys(("lse", "logprob", "entropy", "total"), d)
    assert kernels.stats_gradient(x, reading, state, gradients) is None
    assert kernels.stats_gradient(x, reading, state, {}) is None
    totals = reading._replace(wants=("log_total",))
    assert kernels.stats_gradient(x, totals, state, {"log_total": d}) is None
    ids = reading._replace(ids=torch.zeros(4, 2, dtype=torch.int64, device=device))
    assert kernels.stats_gradient(x, ids, state, {"lse": d}) is None
    assert eager.stats_gradient is None
