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
from logitless.targets import safetensors as _safetensors
from logitless.targets import sparse_checks as _sparse_checks
from tests.support.calls import MASK, TARGET, TEACHER, N, V, leaves, made
from tests.support.paths import TESTS
from tests.support.refusals import BAD_IDS as BAD
from tests.support.refusals import READERS, T, X, refusal, refuses
from tests.support.sizes import DEVICE

DTYPES = "logits must be float16, bfloat16, float32 or float64, got"
BAD_LOGITS = [
    ([1.0], TypeError, "logits must be a Tensor, got list."),
    (X.int(), TypeError, f"{DTYPES} torch.int32."),
    (X.to(torch.complex64), TypeError, f"{DTYPES} torch.complex64."),
    (torch.tensor(1.0), ValueError,
     "logits must have a vocabulary as its last dimension, got shape ()."),
    (torch.zeros(2, 3, 0), ValueError,
     "logits must have at least one column in its last dimension, got (2, 3, 0)."),
]  # fmt: skip


@pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
def test_logits(function):
    for bad, kind, message in BAD_LOGITS:
        with refuses(kind, message):
            function(bad)


SHAPE = "must have shape (2, 3) to match logits (2, 3, 5), got"
RANGE = "must be in [0, 5) or ignore_index (-100), got"
BAD_TARGETS = [
    (None, TypeError, "must be a Tensor of integers, got NoneType."),
    ([1, 2], TypeError, "must be a Tensor of integers, got list."),
    (T.numpy(), TypeError, "must be a Tensor of integers, got ndarray."),
    (T.float(), TypeError, "must hold integers, got torch.float32; soft_cross_entropy takes "
     "probabilities."),
    (T.bool(), TypeError, "must hold integers, got torch.bool."),
    (T.cfloat(), TypeError, "must hold integers, got torch.complex64."),
    (torch.zeros(2, 3, 5).long(), ValueError, f"{SHAPE} (2, 3, 5)."),
    (T[..., None], ValueError, f"{SHAPE} (2, 3, 1)."),
    (T.view(6), ValueError, f"{SHAPE} (6,)."),
    (T.to("meta"), ValueError, "must be on cpu like logits, got meta."),
    (torch.tensor([[0, 4, 0], [0, 0, 5]]), IndexError, f"{RANGE} 5 at row (1, 2)."),
    (torch.tensor([[0, -100, -1], [0, 0, 7]]), IndexError, f"{RANGE} -1 at row (0, 2)."),
]  # fmt: skip
TAKES_CLASSES = [
    ("target", ll.cross_entropy),
    ("target", ll.score),
    ("labels", lambda x, t: ll.topk_distill(
        x, ll.capture_topk(X, 3), divergence="tvd", support="tail", labels=t,
        ce_weight=0.0 if t is None else 0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function"), TAKES_CLASSES)
def test_target(name, function):
    """Over a head a list was "'bool' object has no attribute 'sum'", numpy "must be on cpu"."""
    for x in (X, ll.LinearLogits(torch.zeros(2, 3, 4), torch.zeros(5, 4))):
        for bad, kind, rule in BAD_TARGETS:
            if name == "labels" and bad is None:
                assert function(x, bad).isfinite()  # there need be none
                continue
            with refuses(kind, f"{name} {rule}"):
                function(x, bad)


def test_target_may_be_the_ignore_index_that_is_given():
    ll.cross_entropy(X, T + 9, ignore_index=9)
    with refuses(
        IndexError, "target must be in [0, 5) or ignore_index (9), got -100 at row (0, 0)."
    ):
        ll.cross_entropy(X, T - 100, ignore_index=9)


BAD_IDS = [
    (X, [1, 2], TypeError, "must be a Tensor of integers, got list."),
    (X, T.double(), TypeError, "must hold integers, got torch.float64."),
    (X, T.view(3, 2), ValueError,
     "must have shape (2, 3) or (2, 3, K) to match logits (2, 3, 5), got (3, 2)."),
    (X[0], T, ValueError, "must have shape (3,) or (3, K) to match logits (3, 5), got (2, 3)."),
    (X[0, 0], T, ValueError, "must have shape () or (K) to match logits (5,), got (2, 3)."),
    (X, T.to("meta"), ValueError, "must be on cpu like logits, got meta."),
    (X[0], torch.tensor([0, 5, 9]), IndexError, f"{RANGE} 5 at row 1."),
    (X[0], torch.tensor([[0, 1], [4, -2], [0, 0]]), IndexError,
     "must be in [0, 5), got -2 at row (1, 1)."),
    (X[0], torch.tensor([0, 1, -99]), IndexError, f"{RANGE} -99 at row 2."),
]  # fmt: skip


@pytest.mark.parametrize("function", [ll.token_logprobs, ll.row_stats])
def test_ids(function):
    for x, bad, kind, rule in BAD_IDS:
        with refuses(kind, f"ids {rule}"):
            function(x, bad)


def test_masks():
    for x in (X, ll.LinearLogits(torch.zeros(2, 3, 4), torch.zeros(5, 4))):
        for bad in ([True] * 3, T.numpy(), "all"):
            with refuses(TypeError, f"mask must be a Tensor, got {type(bad).__name__}."):
                ll.kl_div(x, X, direction="forward", mask=bad)
            with refuses(TypeError, f"mask must be a Tensor, got {type(bad).__name__}."):
                ll.soft_cross_entropy(x, X, mask=bad)


def test_every_check_is_reached():
    """Each rule of the files that hold them is broken in some test."""
    files = (_checks, _head_checks, _model_checks, _option_checks, _safetensors, _shard_checks)
    files += (_sparse_checks, _target_checks, _rules)
    source = "".join(Path(file.__file__).read_text() for file in files)
    rules = re.findall(r" must ([a-z][a-z ,\-]*[a-z])", source)
    here = "".join(path.read_text() for path in TESTS.rglob("*.py"))
    assert len(rules) > 15
    assert [rule for rule in rules if f"must {rule}" not in here] == []


@pytest.mark.parametrize("value", BAD)
def test_cpu_raises_naming_row_and_value(value, impl, device):
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
def test_target_count_must_match(count, device):
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
@pytest.mark.parametrize("loss", WEIGHED.values(), ids=WEIGHED.keys())
def test_a_row_weight_that_fits_no_rows(loss, source):
    """Over a head row_weight=1.0 gave the sum for the mean, and (4, 2) weighed rows 1, 9, 1, 9."""
    for weight in (1.0, [1.0] * N, "heavy", torch.ones(N, 2), torch.ones(1)):
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


@pytest.mark.parametrize("shape", [(2, V, 3), (2, V, 3, 4)])
def test_classes_in_dimension_1_are_answered_with_movedim(shape):
    """As F.cross_entropy has them."""
    x = torch.zeros(shape, device=DEVICE)
    labels = torch.zeros((2, *shape[2:]), dtype=torch.int64, device=DEVICE)
    words = refusal(lambda: ll.cross_entropy(x, labels))
    assert "the vocabulary must be the last dimension" in words
    assert words.endswith("for logits of shape (N, V, ...), pass logits.movedim(1, -1).")
    assert ll.cross_entropy(x.movedim(1, -1), labels).isfinite()
