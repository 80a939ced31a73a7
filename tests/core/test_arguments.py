"""Arguments by name, and ids: the same rules on every source."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.contract import NO_ID
from logitless.core import call as _call
from logitless.core import target_checks
from logitless.core.rules import RULES
from tests.support import calls
from tests.support.calls import IDS, ROWS, TARGET, TEACHER, K, N, V, leaves, made, normal
from tests.support.refusals import X, refusal, refuses


def head():
    return leaves("head")[:2]


POSITIONS = {
    "cross_entropy": (lambda: ll.cross_entropy(TEACHER, TARGET, torch.ones(V)),
                      "cross_entropy must be called with all arguments except logits, target by "
                      "name, such as weight=..., got 3 by position."),
    "linear_cross_entropy": (lambda: ll.linear_cross_entropy(*head(), TARGET, None),
                             "linear_cross_entropy must be called with all arguments except "
                             "hidden, weight, target by name, such as bias=..., got 4 by "
                             "position."),
    "a head": (lambda: ll.LinearLogits(*head(), None, 1 << 20),
               "LinearLogits must be called with all arguments except hidden, weight, bias by "
               "name, such as workspace=..., got 4 by position."),
    "a module": (lambda: ll.nn.KLDivLoss("forward"),
                 "KLDivLoss must be called with all arguments by name, such as direction=..., "
                 "got 1 by position."),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), POSITIONS.values(), ids=POSITIONS.keys())
def test_an_option_without_its_name(call, words):
    assert refusal(call) == words


@pytest.mark.parametrize("loss", [ll.contrastive, ll.sigmoid_contrastive])
def test_a_temperature_is_answered_with_the_scale(loss):
    words = refusal(lambda: loss(torch.eye(3), torch.eye(3), temperature=0.07))
    assert "got 'temperature'. scale multiplies the similarities, so pass 1 / temperature" in words


def test_an_option_like_no_other_is_named_with_those_there_are():
    want = "logsumexp must be called with only the arguments logits, temperature, softcap, mask, "
    want += "got 'dim'."
    assert refusal(lambda: ll.logsumexp(TEACHER, dim=-1)) == want


HEAD = dict(zip(("hidden", "weight"), head(), strict=True))
SPARSE = {"divergence": "tvd", "support": "tail"}
SLOTS = {"targets": ll.capture_topk(TEACHER, K)}
BOTH = {"student": TEACHER, "teacher": TEACHER}
X_AND_TARGET = {"logits": TEACHER, "target": TARGET}
VALID = {
    ll.cross_entropy: X_AND_TARGET,
    ll.cross_entropy_and_scores: X_AND_TARGET,
    ll.logsumexp: {"logits": TEACHER},
    ll.entropy: {"logits": TEACHER},
    ll.token_logprobs: {"logits": TEACHER, "ids": IDS},
    ll.score: X_AND_TARGET,
    ll.kept_scores: X_AND_TARGET | {"kept": IDS},
    ll.row_stats: {"logits": TEACHER},
    ll.row_loss: {"formula": lambda s: s.lse, "logits": TEACHER},
    ll.group_loss: {"formula": lambda s: s.lse, "logits": TEACHER},
    ll.slot_loss: {"formula": lambda s: s.student_tail, "logits": TEACHER} | SLOTS,
    ll.kl_div: BOTH | {"direction": "forward"},
    ll.jsd: BOTH,
    ll.tvd: BOTH,
    ll.soft_cross_entropy: {"logits": TEACHER, "probs": TEACHER},
    ll.topk_distill: {"logits": TEACHER} | SLOTS | SPARSE,
    ll.gathered_kl: {"student_logits": TEACHER, "teacher_logprobs": TEACHER},
    ll.capture_topk: {"logits": TEACHER, "k": K},
    ll.capture_sampled: {"logits": TEACHER, "n": K},
    ll.sampled_softmax: HEAD | {"target": TARGET, "negatives": IDS},
}


BY_NAME = VALID | {  # what else has options
    ll.linear_cross_entropy: HEAD | {"target": TARGET},
    ll.LinearLogits: HEAD,
    ll.nn.FusedHead: {"in_features": 2, "out_features": 3},
    ll.nn.KLDivLoss: {"direction": "forward"},
    ll.nn.TopKDistillLoss: SPARSE,
    **{
        getattr(ll.nn, name): {}
        for name in ll.nn.__all__
        if name not in ("FusedHead", "KLDivLoss", "TopKDistillLoss")
    },
}


@pytest.mark.parametrize("function", BY_NAME, ids=lambda f: f.__name__)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(function):
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    meant = named[-1] if named else "softcap"
    words = refusal(lambda: function(**BY_NAME[function], **{f"{meant}_": None}))
    assert words.startswith(f"{function.__name__} must be called with only the arguments ")
    assert words.endswith(f", got '{meant}_'. Did you mean {meant!r}?")


@pytest.mark.parametrize("function", VALID, ids=lambda f: f.__name__)
def test_every_argument_whose_name_has_a_rule_is_checked(function):
    names = [name for name in inspect.signature(function).parameters if name in RULES]
    assert names
    for name in names:
        assert refusal(lambda name=name: function(**VALID[function] | {name: object()})).startswith(
            f"{name} must "
        )


def test_the_rules_of_a_new_function_are_those_of_its_names():
    @_call.named()
    def margin(logits, target, *, mask: torch.Tensor | None = None, temperature: float = 1.0):
        _call.checked(margin, logits=logits, target=target, mask=mask, temperature=temperature)
        return temperature

    assert margin(TEACHER, TARGET) == 1.0
    with refuses(ValueError, "target must have shape (6,) to match logits (6, 37), got (5,)."):
        margin(TEACHER, TARGET[1:])
    with refuses(TypeError, "temperature must be one number for all rows, got a Tensor."):
        margin(TEACHER, TARGET, temperature=torch.ones(N))


class TestCheck:
    """Targets are looked at where that is free, and where LOGITLESS_CHECK asks."""

    class Elsewhere(torch.Tensor):
        """A CPU tensor that says it is on a GPU."""

        is_cpu = False

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
            target_checks.in_range(ids, 5, None, "ids", None)

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_a_cpu_is_always_asked(self, value, monkeypatch):
        monkeypatch.setenv("LOGITLESS_CHECK", value)
        with refuses(IndexError, "ids must be in [0, 5) or ignore_index (-100), got 7 at row 1."):
            ll.token_logprobs(X[0, :2], torch.tensor([0, 7]))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("dtype", "label", "ignored"),
    [
        (torch.uint8, 156, -100),
        (torch.int8, -1, 255),
        (torch.int32, 0, 2**32),
        (torch.int16, -100, 65436),
    ],
)
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_a_label_that_equals_ignore_index_only_in_its_own_dtype(dtype, label, ignored, source):
    """Over a head uint8 label 156 was -100, and int32 zeros were 2**32: their loss was 0."""
    hidden, weight = normal(2, 5, seed=1), normal(200, 5, seed=2)
    logits = ll.LinearLogits(hidden, weight) if source == "head" else hidden @ weight.T
    labels = torch.full((2,), label, dtype=dtype, device=weight.device)
    if label < 0:  # no class, and not ignored either
        with pytest.raises(IndexError, match=f"got {label} at row 0"):
            ll.cross_entropy(logits, labels, ignore_index=ignored)
        return
    got = ll.cross_entropy(logits, labels, ignore_index=ignored)
    torch.testing.assert_close(got, F.cross_entropy(hidden @ weight.T, labels.long()))


class TestSignatures:
    def check(self, *args):
        self.calls = [*getattr(self, "calls", []), args]

    def test_equal_arguments_are_checked_once(self):
        first = _call.check_once(self.check, torch.ones(2, 3), None, 1.0)
        assert first is _call.check_once(self.check, torch.zeros(2, 3), None, 1.0)
        assert len(self.calls) == 1

    @pytest.mark.parametrize(
        "other",
        [(torch.ones(3, 2), 1), (torch.ones(2, 3, dtype=torch.float64), 1),
         (torch.ones(2, 3, requires_grad=True), 1), (torch.ones(2, 3, device="meta"), 1),
         (torch.nn.Parameter(torch.ones(2, 3), requires_grad=False), 1), (torch.ones(2, 3), 2),
         (torch.ones(2, 3), 1.0), (torch.ones(2, 3), True)],
    )  # fmt: skip
    def test_other_arguments_have_another_signature(self, other):
        first = _call.check_once(self.check, torch.ones(2, 3), 1)
        assert first is not _call.check_once(self.check, *other)
        assert len(self.calls) == 2

    def test_another_check_has_another_signature(self):
        first = _call.check_once(self.check, 1)
        assert first is not _call.check_once(lambda *_: None, 1)

    def test_an_argument_without_a_hash(self):
        for _ in range(2):
            assert _call.check_once(self.check, [1]) is None
        assert len(self.calls) == 2

    def test_arguments_that_do_not_pass_are_checked_again(self):
        def check(*args):
            self.check(*args)
            raise ValueError("refused")

        for _ in range(2):
            with pytest.raises(ValueError, match="refused"):
                _call.check_once(check, 1)
        assert len(self.calls) == 2

    def test_all_are_forgotten_if_there_are_too_many(self, monkeypatch):
        """Too many signatures of the same types, and too many types."""
        monkeypatch.setattr(_call, "_REMEMBERED", 3)
        signatures, types = [], []
        for number in range(7):
            _call.check_once(self.check, number)
            ((_, passed),) = _call._passed.values()
            signatures.append(len(passed))
        _call._passed.clear()
        for count in range(7):
            _call.check_once(self.check, *range(count))
            types.append(len(_call._passed))
        assert signatures == types == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("source", ["tensor", "head", "head of two chunks"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_number_of_an_empty_slot_is_refused_as_an_id(dtype, source):
    """A masked slot has the id NO_ID inside. As an id that counts, the number is out of range."""
    x, ids = made(source, leaves(source)), IDS.to(dtype, copy=True)
    ids[1, 2] = NO_ID
    masked = torch.ones_like(ids, dtype=torch.bool)
    masked[1, 2] = False

    def losses(mask):
        targets = ll.SparseTargets(ids, calls.SPARSE.logprobs, calls.SPARSE.tail, mask)
        how = {"divergence": "forward_kl", "targets": targets}
        return {
            "targets.ids": lambda: ll.topk_distill(x, support="tail", **how),
            "targets.ids ": lambda: ll.topk_distill(x, support="renorm", **how),
            "targets.ids  ": lambda: ll.slot_loss(calls.slot_formula, x, targets, rows=(ROWS,)),
        }

    kept = "kept (except -1 for an empty slot)"
    refused = losses(None) | {
        "ids": lambda: ll.row_stats(x, ids, ignore_index=None),
        kept: lambda: ll.kept_scores(x, TARGET, ids),
    }
    for name, loss in refused.items():
        words = f"{name.rstrip()} must be in [0, {V}), got {NO_ID} at row (1, 2)."
        with refuses(IndexError, words):
            loss()
    assert all(loss().isfinite() for loss in losses(masked).values())
    assert (
        ll.kept_scores(
            x, TARGET.index_fill(0, torch.tensor([1], device=TARGET.device), -100), ids
        ).entropy[1]
        == 0
    )
