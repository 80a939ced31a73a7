"""Every refusal: which argument, which rule, which value."""

import re
from pathlib import Path

import pytest
import torch

import logitless as ll
from logitless.core import option_checks as _option_checks
from logitless.core import target_checks as _target_checks
from logitless.core import tensor_checks as _checks
from logitless.heads import checks as _head_checks
from logitless.lazy import checks as _model_checks
from logitless.parallel import checks as _shard_checks
from logitless.store import checks as _rules
from logitless.store import training_checks as _training_checks
from logitless.targets import safetensors as _safetensors
from logitless.targets import sparse_checks as _sparse_checks
from tests.support.calls import MASK, TARGET, TEACHER, N, V, leaves, made
from tests.support.paths import TESTS
from tests.support.refusals import BAD_IDS as BAD
from tests.support.refusals import READERS, T, X, refusal, refuses
from tests.support.sizes import DEVICE

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
        "ids must be in [0, 5) or ignore_index (-100), got 5 at row 1.",
    ),
    "one of several": (
        X[0],
        torch.tensor([[0, 1], [4, -2], [0, 0]]),
        IndexError,
        "ids must be in [0, 5), got -2 at row (1, 1).",
    ),
    "another ignore_index": (
        X[0],
        torch.tensor([0, 1, -99]),
        IndexError,
        "ids must be in [0, 5) or ignore_index (-100), got -99 at row 2.",
    ),
}


@pytest.mark.parametrize("function", [ll.token_logprobs, ll.row_stats])
@pytest.mark.parametrize(("x", "bad", "kind", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
def test_ids(function, x, bad, kind, message):
    with refuses(kind, message):
        function(x, bad)


def test_every_check_is_reached():
    """Each rule of the files that hold them is broken in some test."""
    files = (_checks, _head_checks, _model_checks, _option_checks, _safetensors, _shard_checks)
    files += (_sparse_checks, _target_checks, _rules, _training_checks)
    source = "".join(Path(file.__file__).read_text() for file in files)
    rules = re.findall(r" must ([a-z][a-z ,\-]*[a-z])", source)
    here = "".join(path.read_text() for path in TESTS.rglob("*.py"))
    assert len(rules) > 15
    assert [rule for rule in rules if f"must {rule}" not in here] == []


@pytest.mark.parametrize("value", BAD)
def test_bug_21_cpu_raises_naming_row_and_value(value, impl, device):
    if device != "cpu":
        pytest.skip("a GPU does not look: tests/gpu")
    x = torch.randn(4, 37)
    target = torch.tensor([0, -100, value, 36])
    rule = rf"target must be in \[0, 37\) or ignore_index \(-100\), got {value} at row 2\."
    for f in (ll.cross_entropy, ll.score):
        with pytest.raises(IndexError, match=rule):
            f(x, target)
    ids = target.where(target != -100, 0)
    for f in (ll.token_logprobs, ll.row_stats):
        with pytest.raises(IndexError, match=rule.replace("target", "ids")):
            f(x, ids)


@pytest.mark.parametrize("count", [3, 5, 1])
def test_bug_21_target_count_must_match(count, device):
    """Target count that doesn't match the rows accepted."""
    x, target = torch.randn(4, 37, device=device), torch.zeros(count, dtype=int, device=device)
    for f in (ll.cross_entropy, ll.score):
        with pytest.raises(ValueError, match=rf"target must have shape \(4,\).*got \({count},\)"):
            f(x, target)


WEIGHED = {
    "cross_entropy": lambda x, w: ll.cross_entropy(x, TARGET, row_weight=w),
    "kl_div": lambda x, w: ll.kl_div(x, TEACHER, direction="forward", row_weight=w),
    "soft_cross_entropy": lambda x, w: ll.soft_cross_entropy(x, TEACHER.softmax(-1), row_weight=w),
    "topk_distill": lambda x, w: ll.topk_distill(
        x, ll.capture_topk(TEACHER, 3), divergence="forward_kl", support="tail", row_weight=w
    ),
}


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("weight", [1.0, [1.0] * N, "heavy", torch.ones(N, 2), torch.ones(1)])
@pytest.mark.parametrize("loss", WEIGHED.values(), ids=WEIGHED.keys())
def test_a_row_weight_that_fits_no_rows(loss, weight, source):
    """Over a head row_weight=1.0 gave the sum for the mean, and (4, 2) weighed rows 1, 9, 1, 9."""
    with pytest.raises((TypeError, ValueError), match="row_weight must"):
        loss(made(source, leaves(source)), weight)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("source", ["tensor", "head", "head of two chunks"])
@pytest.mark.parametrize(
    ("row", "value"), [(4, V), (5, -1)], ids=["of the second chunk", "of the last row"]
)
def test_rows_in_errors_count_from_the_first(row, value, source):
    """Over a head a bad target's row was counted within its chunk."""
    labels = TARGET.clone()
    labels[row] = value
    with pytest.raises(IndexError, match=f"got {value} at row {row}"):
        ll.cross_entropy(made(source, leaves(source)), labels)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_a_batch_of_ignored_rows_is_checked_too(source):
    """With all rows ignored, nothing was validated over a head."""
    logits, ignored = made(source, leaves(source)), torch.full((N,), -100, device=DEVICE)
    bad = [
        {"row_weight": torch.ones(N + 1)}, {"weight": torch.ones(V - 1)}, {"reduction": "avg"},
        {"label_smoothing": 2}, {"temperature": torch.ones(N, 1)},
    ]  # fmt: skip
    for how in bad:
        with pytest.raises(ValueError, match="must"):
            ll.cross_entropy(logits, ignored, **how)
    with pytest.raises(ValueError, match="teacher must have shape"):
        ll.kl_div(logits, TEACHER[:, 1:], direction="forward", mask=MASK & False)
    assert ll.cross_entropy(logits, ignored) == 0


SOURCES = ["tensor", "head"]
TAKES_CLASSES = {  # by what the argument is called
    "target": lambda z, t: ll.cross_entropy(z, t),
    "target of score": lambda z, t: ll.score(z, t),
    "labels": lambda z, t: ll.topk_distill(
        z, ll.capture_topk(TEACHER, 3), divergence="tvd", support="tail", labels=t
    ),
}


NOT_CLASSES = {
    "a list": ([1] * N, "must be a Tensor of integers, got list."),
    "numpy": (TARGET.cpu().numpy(), "must be a Tensor of integers, got ndarray."),
    "None": (None, "must be a Tensor of integers, got NoneType."),
    "a column": (
        TARGET[:, None],
        f"must have shape ({N},) to match logits ({N}, {V}), got ({N}, 1).",
    ),
    "floats": (
        TARGET.float(),
        "must hold integers, got torch.float32; soft_cross_entropy takes probabilities.",
    ),
    "probabilities": (
        TEACHER.softmax(-1),
        "must hold integers, got torch.float32; soft_cross_entropy takes probabilities.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("bad", "words"), NOT_CLASSES.values(), ids=NOT_CLASSES.keys())
@pytest.mark.parametrize("name", TAKES_CLASSES)
def test_what_is_no_class_a_row(name, bad, words, source):
    """Over a head a list was "'bool' object has no attribute 'sum'", numpy "must be on cpu"."""
    logits = made(source, leaves(source))
    if name == "labels" and bad is None:
        assert TAKES_CLASSES[name](logits, bad).isfinite()  # there need be none
        return
    assert refusal(lambda: TAKES_CLASSES[name](logits, bad)) == f"{name.split()[0]} {words}"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "bad", [[True] * N, TARGET.cpu().numpy(), "all"], ids=["list", "numpy", "str"]
)
def test_what_is_no_mask(bad, source):
    logits, kind = made(source, leaves(source)), type(bad).__name__
    want = f"mask must be a Tensor, got {kind}."
    assert refusal(lambda: ll.kl_div(logits, TEACHER, direction="forward", mask=bad)) == want
    assert refusal(lambda: ll.soft_cross_entropy(logits, TEACHER, mask=bad)) == want
    assert refusal(lambda: ll.token_logprobs(logits, bad)).startswith("ids must be a Tensor")


@pytest.mark.parametrize("shape", [(2, V, 3), (2, V, 3, 4)])
def test_classes_in_dimension_1_are_answered_with_movedim(shape):
    """As F.cross_entropy has them."""
    x = torch.zeros(shape, device=DEVICE)
    labels = torch.zeros((2, *shape[2:]), dtype=torch.int64, device=DEVICE)
    words = refusal(lambda: ll.cross_entropy(x, labels))
    assert "the vocabulary must be the last dimension" in words
    assert words.endswith("for logits of shape (N, V, ...), pass logits.movedim(1, -1).")
    assert ll.cross_entropy(x.movedim(1, -1), labels).isfinite()
