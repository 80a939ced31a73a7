"""Options: which numbers are legal, and that the extremes of them are finite."""

import pytest
import torch

import logitless as ll
from tests.support.calls import TARGET, N, leaves, made
from tests.support.refusals import READERS, T, X, refuses
from tests.support.sizes import DEVICE

POSITIVE = [
    (0, ValueError, "must be in [1e-12, 1e+12], got 0."),
    (-0.5, ValueError, "must be in [1e-12, 1e+12], got -0.5."),
    (float("inf"), ValueError, "must be in [1e-12, 1e+12], got inf."),
    (float("nan"), ValueError, "must be in [1e-12, 1e+12], got nan."),
    ("1", TypeError, "must be a number, got '1'."),
    (True, TypeError, "must be a number, got True."),
]


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("name", ["temperature", "softcap"])
@pytest.mark.parametrize(("value", "kind", "rule"), POSITIVE)
def test_temperature_and_softcap_are_positive_numbers(function, name, value, kind, rule):
    with refuses(kind, f"{name} {rule}"):
        function(X, **{name: value})


BAD_TEMPERATURES = {
    "shape": (
        torch.ones(3, 2),
        ValueError,
        "temperature must have shape (2, 3) to match logits (2, 3, 5), got (3, 2).",
    ),
    "device": (
        torch.ones(2, 3, device="meta"),
        ValueError,
        "temperature must be on cpu like logits, got meta.",
    ),
    "a number elsewhere": (
        torch.ones((), device="meta"),
        ValueError,
        "temperature must be on cpu like logits, got meta.",
    ),
    "integers": (
        torch.ones(2, 3, dtype=torch.int64),
        TypeError,
        "temperature must be a floating-point tensor, got torch.int64.",
    ),
    "gradient": (
        torch.ones(2, 3, requires_grad=True),
        ValueError,
        "temperature must not require grad, because losses compute no gradient for temperature; to "
        "train a scale, multiply the hidden states by the scale.",
    ),
}


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(
    ("bad", "kind", "message"), BAD_TEMPERATURES.values(), ids=BAD_TEMPERATURES.keys()
)
def test_temperature_of_each_row(function, bad, kind, message):
    with refuses(kind, message):
        function(X, temperature=bad)


BAD_OPTIONS = {
    "reduction": (
        {"reduction": "avg"},
        ValueError,
        "reduction must be one of 'mean', 'sum', 'none', got 'avg'.",
    ),
    "reduction None": (
        {"reduction": None},
        ValueError,
        "reduction must be one of 'mean', 'sum', 'none', got None.",
    ),
    "smoothing above 1": (
        {"label_smoothing": 1.5},
        ValueError,
        "label_smoothing must be in [0, 1], got 1.5.",
    ),
    "smoothing below 0": (
        {"label_smoothing": -0.1},
        ValueError,
        "label_smoothing must be in [0, 1], got -0.1.",
    ),
    "smoothing NaN": (
        {"label_smoothing": float("nan")},
        ValueError,
        "label_smoothing must be in [0, 1], got nan.",
    ),
    "smoothing None": (
        {"label_smoothing": None},
        TypeError,
        "label_smoothing must be a number, got None.",
    ),
    "z_loss below 0": (
        {"z_loss": -1e-4},
        ValueError,
        "z_loss must be in [0, 1e+12], got -0.0001.",
    ),
    "z_loss inf": (
        {"z_loss": float("inf")},
        ValueError,
        "z_loss must be in [0, 1e+12], got inf.",
    ),
    "z_loss text": ({"z_loss": "no"}, TypeError, "z_loss must be a number, got 'no'."),
    "ignore_index float": (
        {"ignore_index": -100.0},
        TypeError,
        "ignore_index must be an int, got -100.0.",
    ),
    "ignore_index None": (
        {"ignore_index": None},
        TypeError,
        "ignore_index must be an int, got None.",
    ),
    "ignore_index truth": (
        {"ignore_index": True},
        TypeError,
        "ignore_index must be an int, got True.",
    ),
    "weight list": (
        {"weight": [1.0] * 5},
        TypeError,
        "weight must be a Tensor of class weights, got list.",
    ),
    "weight integers": (
        {"weight": torch.ones(5, dtype=torch.int32)},
        TypeError,
        "weight must be a floating-point tensor, got torch.int32.",
    ),
    "weight shape": (
        {"weight": torch.ones(4)},
        ValueError,
        "weight must have shape (5,) to match logits (2, 3, 5), got (4,).",
    ),
    "weight elsewhere": (
        {"weight": torch.ones(5, device="meta")},
        ValueError,
        "weight must be on cpu like logits, got meta.",
    ),
    "row_weight number": (
        {"row_weight": 2.0},
        TypeError,
        "row_weight must be a Tensor, got float.",
    ),
    "row_weight complex": (
        {"row_weight": torch.ones(2, 3, dtype=torch.complex64)},
        TypeError,
        "row_weight must be real, got torch.complex64.",
    ),
    "row_weight shape": (
        {"row_weight": torch.ones(2, 1)},
        ValueError,
        "row_weight must have shape (2, 3) to match logits (2, 3, 5), got (2, 1).",
    ),
    "row_weight elsewhere": (
        {"row_weight": torch.ones(2, 3, device="meta")},
        ValueError,
        "row_weight must be on cpu like logits, got meta.",
    ),
}


@pytest.mark.parametrize(
    ("options", "kind", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys()
)
def test_cross_entropy_options(options, kind, message):
    with refuses(kind, message):
        ll.cross_entropy(X, T, **options)


def test_score_ignore_index():
    with refuses(TypeError, "ignore_index must be an int, got 'pad'."):
        ll.score(X, T, ignore_index="pad")
    with refuses(ValueError, f"ignore_index must fit into 64 bits, got {2**70}."):
        ll.score(X, T, ignore_index=2**70)


EXTREMES = [
    ({"softcap": 1e39}, "softcap must be in [1e-12, 1e+12], got 1e+39."),
    ({"softcap": 1e-46}, "softcap must be in [1e-12, 1e+12], got 1e-46."),
    ({"temperature": 1e-40}, "temperature must be in [1e-12, 1e+12], got 1e-40."),
    ({"temperature": 1e39}, "temperature must be in [1e-12, 1e+12], got 1e+39."),
    ({"z_loss": 1e39}, "z_loss must be in [0, 1e+12], got 1e+39."),
]


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize(("how", "words"), EXTREMES)
def test_extreme_options_are_refused(how, words, source):
    """softcap 1e39 and temperature 1e-40 gave NaN."""
    with pytest.raises(ValueError, match="must be in") as refused:
        ll.cross_entropy(made(source, leaves(source)), TARGET, **how)
    assert str(refused.value) == words


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
