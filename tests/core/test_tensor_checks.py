"""Every refusal: which argument, which rule, which value."""

import pytest
import torch

import logitless as ll
from tests.support.calls import MASK, TARGET, TEACHER, N, V, leaves, made
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
