"""Every refusal: which argument, which rule, which value; and that a choice of code is obeyed."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from sizes import ON_GPU
from triton.runtime.interpreter import GridExecutor

import logitless as ll
from logitless.core import call as _call
from logitless.core import checks as _checks
from logitless.core import options as _options
from logitless.heads import checks as _head_checks
from logitless.lazy import checks as _model_checks
from logitless.parallel import checks as _shard_checks
from logitless.store import checks as _rules
from logitless.targets import checks as _target_checks
from logitless.targets import safetensors as _safetensors

X = torch.zeros(2, 3, 5)
T = torch.zeros(2, 3, dtype=torch.int64)

READERS = {  # every public function, called with the logits and nothing wrong
    "logsumexp": ll.logsumexp,
    "entropy": ll.entropy,
    "row_stats": ll.row_stats,
    "token_logprobs": lambda x, **how: ll.token_logprobs(x, T, **how),
    "score": lambda x, **how: ll.score(x, T, **how),
    "cross_entropy": lambda x, **how: ll.cross_entropy(x, T, **how),
}


def refuses(kind, message):
    """The whole message, word for word."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


BAD_LOGITS = {
    "a list": ([1.0], TypeError, "logits must be a Tensor, got list."),
    "integers": (
        X.int(),
        TypeError,
        "logits must be float16, bfloat16, float32 or float64, got torch.int32.",
    ),
    "complex": (
        X.to(torch.complex64),
        TypeError,
        "logits must be float16, bfloat16, float32 or float64, got torch.complex64.",
    ),
    "a scalar": (
        torch.tensor(1.0),
        ValueError,
        "logits must have a vocabulary as its last dimension, got shape ().",
    ),
    "no columns": (
        torch.zeros(2, 3, 0),
        ValueError,
        "logits must have at least one column in its last dimension, got (2, 3, 0).",
    ),
}


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(("bad", "kind", "message"), BAD_LOGITS.values(), ids=BAD_LOGITS.keys())
def test_logits(function, bad, kind, message):
    with refuses(kind, message):
        function(bad)


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
        "temperature must not require grad: it is taken as a constant.",
    ),
}


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(
    ("bad", "kind", "message"), BAD_TEMPERATURES.values(), ids=BAD_TEMPERATURES.keys()
)
def test_temperature_of_each_row(function, bad, kind, message):
    with refuses(kind, message):
        function(X, temperature=bad)


BAD_TARGETS = {
    "None": (None, TypeError, "target must be a Tensor of integers, got NoneType."),
    "a list": ([1, 2], TypeError, "target must be a Tensor of integers, got list."),
    "floats": (
        T.float(),
        TypeError,
        "target must hold integers, got torch.float32; soft_cross_entropy takes probabilities.",
    ),
    "truths": (T.bool(), TypeError, "target must hold integers, got torch.bool."),
    "complex": (T.cfloat(), TypeError, "target must hold integers, got torch.complex64."),
    "one a column": (
        torch.zeros(2, 3, 5, dtype=torch.int64),
        ValueError,
        "target must have shape (2, 3) to match logits (2, 3, 5), got (2, 3, 5).",
    ),
    "flat": (
        T.view(6),
        ValueError,
        "target must have shape (2, 3) to match logits (2, 3, 5), got (6,).",
    ),
    "elsewhere": (
        T.to("meta"),
        ValueError,
        "target must be on cpu like logits, got meta.",
    ),
    "too large": (
        torch.tensor([[0, 4, 0], [0, 0, 5]]),
        IndexError,
        "target must be in [0, 5) or ignore_index (-100), got 5 at row (1, 2).",
    ),
    "negative": (
        torch.tensor([[0, -100, -1], [0, 0, 7]]),
        IndexError,
        "target must be in [0, 5) or ignore_index (-100), got -1 at row (0, 2).",
    ),
}


@pytest.mark.parametrize("function", [ll.cross_entropy, ll.score])
@pytest.mark.parametrize(("bad", "kind", "message"), BAD_TARGETS.values(), ids=BAD_TARGETS.keys())
def test_target(function, bad, kind, message):
    with refuses(kind, message):
        function(X, bad)


def test_target_may_be_the_ignore_index_that_is_given():
    ll.cross_entropy(X, T + 9, ignore_index=9)
    with refuses(
        IndexError, "target must be in [0, 5) or ignore_index (9), got -100 at row (0, 0)."
    ):
        ll.cross_entropy(X, T - 100, ignore_index=9)


BAD_IDS = {
    "a list": (X, [1, 2], TypeError, "ids must be a Tensor of integers, got list."),
    "floats": (X, T.double(), TypeError, "ids must hold integers, got torch.float64."),
    "rows": (
        X,
        T.view(3, 2),
        ValueError,
        "ids must have shape (2, 3) or (2, 3, K) to match logits (2, 3, 5), got (3, 2).",
    ),
    "rows of a matrix": (
        X[0],
        T,
        ValueError,
        "ids must have shape (3,) or (3, K) to match logits (3, 5), got (2, 3).",
    ),
    "ids of one row": (
        X[0, 0],
        T,
        ValueError,
        "ids must have shape () or (K) to match logits (5,), got (2, 3).",
    ),
    "elsewhere": (
        X,
        T.to("meta"),
        ValueError,
        "ids must be on cpu like logits, got meta.",
    ),
    "too large": (
        X[0],
        torch.tensor([0, 5, 9]),
        IndexError,
        "ids must be in [0, 5), got 5 at row 1.",
    ),
    "one of several": (
        X[0],
        torch.tensor([[0, 1], [4, -2], [0, 0]]),
        IndexError,
        "ids must be in [0, 5), got -2 at row (1, 1).",
    ),
    "no ignore_index": (
        X[0],
        torch.tensor([0, 1, -100]),
        IndexError,
        "ids must be in [0, 5), got -100 at row 2.",
    ),
}


@pytest.mark.parametrize("function", [ll.token_logprobs, ll.row_stats])
@pytest.mark.parametrize(("x", "bad", "kind", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
def test_ids(function, x, bad, kind, message):
    with refuses(kind, message):
        function(x, bad)


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
    with refuses(ValueError, f"ignore_index must fit 64 bits, got {2**70}."):
        ll.score(X, T, ignore_index=2**70)


def test_class_weight_gets_a_right_gradient_or_a_refusal():
    """A gradient that misses a term would train wrongly in silence."""
    x, target = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 2, 4, 2])
    weight = torch.rand(5, dtype=torch.float64) + 0.5

    def f(weight):
        return ll.cross_entropy(x, target, weight=weight, label_smoothing=0.3, reduction="sum")

    weight.requires_grad_()
    refused = False
    try:
        f(weight)
    except ValueError as refusal:
        refused = "weight must not require grad" in str(refusal)
    assert refused or torch.autograd.gradcheck(f, (weight,))


def test_expanded_logits_cannot_be_overwritten():
    x = torch.zeros(1, 5, requires_grad=True).expand(3, 5)
    with refuses(
        ValueError,
        "logits must not share memory among themselves for inplace=True, "
        "got shape (3, 5) with strides (0, 1).",
    ):
        ll.cross_entropy(x, T[0], inplace=True)
    with torch.no_grad():  # nothing is overwritten
        ll.cross_entropy(x, T[0], inplace=True)


def kernels_run(f):
    """Whether f launches any kernel, on the CPU: whether the interpreter is asked for one."""
    launched = []
    run = GridExecutor.__call__

    def recorded(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", recorded):
        f()
    return bool(launched)


interpreted = pytest.mark.skipif(ON_GPU, reason="where there is a GPU, nothing is interpreted")


class TestImpl:
    """An explicit choice of code is obeyed or refused, never replaced."""

    @pytest.mark.parametrize("name", ["cuda", "", None, "Triton"])
    def test_unknown_name(self, name):
        with (
            refuses(ValueError, f"impl must be one of 'triton', 'eager', got {name!r}."),
            ll.impl(name),
        ):
            pass

    @interpreted
    def test_default_follows_the_tensor(self, monkeypatch):
        monkeypatch.delenv("LOGITLESS_IMPL", raising=False)
        assert kernels_run(lambda: ll.logsumexp(X)) is False

    @interpreted
    @pytest.mark.parametrize("name", ["eager", "triton"])
    @pytest.mark.parametrize("by", ["block", "environment"])
    def test_choice_is_what_runs(self, name, by, monkeypatch):
        if by == "environment":
            monkeypatch.setenv("LOGITLESS_IMPL", name)
            assert kernels_run(lambda: ll.logsumexp(X)) is (name == "triton")
        else:
            monkeypatch.setenv("LOGITLESS_IMPL", "triton" if name == "eager" else "eager")
            with ll.impl(name):  # the block wins over the environment
                assert kernels_run(lambda: ll.logsumexp(X)) is (name == "triton")

    @interpreted
    def test_blocks_nest_and_end(self):
        with ll.impl("eager"):
            with ll.impl("triton"):
                assert kernels_run(lambda: ll.logsumexp(X)) is True
            assert kernels_run(lambda: ll.logsumexp(X)) is False
            with pytest.raises(KeyError), ll.impl("triton"):
                raise KeyError
            assert kernels_run(lambda: ll.logsumexp(X)) is False

    def test_unknown_name_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("LOGITLESS_IMPL", "fast")
        with refuses(ValueError, "LOGITLESS_IMPL must be one of 'triton', 'eager', got 'fast'."):
            ll.logsumexp(X)

    @pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
    def test_triton_refuses_fp64(self, function):
        rule = "impl 'triton' must be given float16, bfloat16 or float32, got float64."
        with ll.impl("triton"), refuses(TypeError, rule):
            function(X.double())

    @pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
    def test_triton_refuses_a_cpu_tensor_without_its_interpreter(self, function, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        rule = (
            "impl 'triton' must have a GPU tensor, or a cpu tensor and TRITON_INTERPRET=1, "
            "got a cpu tensor."
        )
        with ll.impl("triton"), refuses(RuntimeError, rule):
            function(X)


class TestCheck:
    """Targets are looked at where that is free, and where LOGITLESS_CHECK asks."""

    class Elsewhere(torch.Tensor):
        """A CPU tensor that says it is on a GPU."""

        @property
        def device(self):
            return torch.device("cuda")

    @pytest.mark.parametrize("value", [None, "", "0"])
    def test_a_gpu_is_not_asked(self, value, monkeypatch):
        monkeypatch.delenv("LOGITLESS_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("LOGITLESS_CHECK", value)
        ids = torch.tensor([0, 7]).as_subclass(self.Elsewhere)
        assert not _call.reads_values(ids)

    @pytest.mark.parametrize("value", ["1", "yes"])
    def test_a_gpu_is_asked_on_request(self, value, monkeypatch):
        monkeypatch.setenv("LOGITLESS_CHECK", value)
        ids = torch.tensor([0, 7]).as_subclass(self.Elsewhere)
        with refuses(IndexError, "ids must be in [0, 5), got 7 at row 1."):
            assert _call.reads_values(ids)
            _checks.in_range(ids, 5, None, "ids", None)

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_a_cpu_is_always_asked(self, value, monkeypatch):
        monkeypatch.setenv("LOGITLESS_CHECK", value)
        with refuses(IndexError, "ids must be in [0, 5), got 7 at row 1."):
            ll.token_logprobs(X[0, :2], torch.tensor([0, 7]))


def test_every_check_is_reached():
    """Each rule of the files that hold them is broken in some test."""
    files = (_checks, _head_checks, _model_checks, _options, _safetensors, _shard_checks)
    files += (_target_checks, _rules)
    source = "".join(Path(file.__file__).read_text() for file in files)
    rules = re.findall(r" must ([a-z][a-z ,\-]*[a-z])", source)
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    assert len(rules) > 15
    assert [rule for rule in rules if f"must {rule}" not in here] == []


def test_a_module_refuses_class_weights_as_its_function_does():
    with refuses(TypeError, "weight must be a Tensor of class weights, got list."):
        ll.nn.CrossEntropyLoss([1.0] * 5)
