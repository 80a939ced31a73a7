"""Options: which numbers are legal, and that the extremes of them are finite."""

import pytest
import torch

import logitless as ll
from tests.support.calls import TARGET, N, leaves, made
from tests.support.refusals import READERS, T, X, refuses
from tests.support.sizes import DEVICE

RANGE = "must be in [1e-12, 1e+12], got"
POSITIVE = [
    (0, ValueError, f"{RANGE} 0."),
    (-0.5, ValueError, f"{RANGE} -0.5."),
    (1e-40, ValueError, f"{RANGE} 1e-40."),  # gave NaN, as softcap 1e39 did
    (1e39, ValueError, f"{RANGE} 1e+39."),
    (float("inf"), ValueError, f"{RANGE} inf."),
    (float("nan"), ValueError, f"{RANGE} nan."),
    ("1", TypeError, "must be a number, got '1'."),
    (True, TypeError, "must be a number, got True."),
]


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
def test_temperature_and_softcap_are_positive_numbers(function):
    for x in (X, ll.LinearLogits(torch.zeros(2, 3, 4), torch.zeros(5, 4))):
        for name in ("temperature", "softcap"):
            for value, kind, rule in POSITIVE:
                with refuses(kind, f"{name} {rule}"):
                    function(x, **{name: value})


BAD_TEMPERATURES = [
    (torch.ones(3, 2), ValueError, "must have shape (2, 3) to match logits (2, 3, 5), got (3, 2)."),
    (torch.ones(2, 3, device="meta"), ValueError, "must be on cpu like logits, got meta."),
    (torch.ones((), device="meta"), ValueError, "must be on cpu like logits, got meta."),
    (torch.ones(2, 3).int(), TypeError, "must be a floating-point tensor, got torch.int32."),
    (torch.ones(2, 3, requires_grad=True), ValueError,
     "must not require grad, because losses compute no gradient for temperature; to train a scale, "
     "multiply the hidden states by the scale."),
]  # fmt: skip


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
def test_temperature_of_each_row(function):
    for bad, kind, rule in BAD_TEMPERATURES:
        with refuses(kind, f"temperature {rule}"):
            function(X, temperature=bad)


NUMBER, INT = "must be a number", "must be an int"
REDUCTIONS = "must be one of 'mean', 'sum', 'none'"
SHAPE = "to match logits (2, 3, 5), got"
META = {"device": "meta"}
BAD_OPTIONS = [  # the option, a bad value, and "NAME must ..."
    ("reduction", "avg", ValueError, f"{REDUCTIONS}, got 'avg'."),
    ("reduction", None, ValueError, f"{REDUCTIONS}, got None."),
    ("label_smoothing", 1.5, ValueError, "must be in [0, 1], got 1.5."),
    ("label_smoothing", -0.1, ValueError, "must be in [0, 1], got -0.1."),
    ("label_smoothing", float("nan"), ValueError, "must be in [0, 1], got nan."),
    ("label_smoothing", None, TypeError, f"{NUMBER}, got None."),
    ("z_loss", -1e-4, ValueError, "must be in [0, 1e+12], got -0.0001."),
    ("z_loss", 1e39, ValueError, "must be in [0, 1e+12], got 1e+39."),
    ("z_loss", float("inf"), ValueError, "must be in [0, 1e+12], got inf."),
    ("z_loss", "no", TypeError, f"{NUMBER}, got 'no'."),
    ("ignore_index", -100.0, TypeError, f"{INT}, got -100.0."),
    ("ignore_index", None, TypeError, f"{INT}, got None."),
    ("ignore_index", True, TypeError, f"{INT}, got True."),
    ("weight", [1.0] * 5, TypeError, "must be a Tensor of class weights, got list."),
    ("weight", torch.ones(5).int(), TypeError, "must be a floating-point tensor, got torch.int32."),
    ("weight", torch.ones(4), ValueError, f"must have shape (5,) {SHAPE} (4,)."),
    ("weight", torch.ones(5, **META), ValueError, "must be on cpu like logits, got meta."),
    ("row_weight", 2.0, TypeError, "must be a Tensor, got float."),
    ("row_weight", torch.ones(2, 3).cfloat(), TypeError, "must be real, got torch.complex64."),
    ("row_weight", torch.ones(2, 1), ValueError, f"must have shape (2, 3) {SHAPE} (2, 1)."),
    ("row_weight", torch.ones(2, 3, **META), ValueError, "must be on cpu like logits, got meta."),
]


def test_cross_entropy_options():
    for x in (X, ll.LinearLogits(torch.zeros(2, 3, 4), torch.zeros(5, 4))):
        for name, value, kind, rule in BAD_OPTIONS:
            with refuses(kind, f"{name} {rule}"):
                ll.cross_entropy(x, T, **{name: value})


def test_score_ignore_index():
    with refuses(TypeError, "ignore_index must be an int, got 'pad'."):
        ll.score(X, T, ignore_index="pad")
    with refuses(ValueError, f"ignore_index must fit into 64 bits, got {2**70}."):
        ll.score(X, T, ignore_index=2**70)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40, 1e39, float("nan")])
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_extreme_temperatures_of_rows_are_refused_on_a_cpu(temperature, source):
    each = torch.ones(N, dtype=torch.float64, device=DEVICE)
    each[2] = temperature  # which is ignored
    logits = made(source, leaves(source))
    assert ll.cross_entropy(logits, TARGET, temperature=each).isfinite()
    each[4] = temperature
    for f in (lambda: ll.cross_entropy(logits, TARGET, temperature=each),
              lambda: ll.entropy(logits, temperature=each.roll(-4))):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"temperature must be in \[1e-12, 1e\+12\], got .* at"
        ):
            f()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1e-12}, {"temperature": 1e12}, {"softcap": 1e12}, {"softcap": 1e-12},
        {"temperature": 1e-12, "softcap": 1e12}, {"z_loss": 1e12},
    ],
    ids=str,
)  # fmt: skip
def test_the_limits_themselves_are_finite(how, dtype, impl):
    x = leaves("tensor", dtype)[0].requires_grad_()
    loss = ll.cross_entropy(x, TARGET, **how)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
