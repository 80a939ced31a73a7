"""What a mistake is answered with: the argument, the rule, the value, the same on every source."""

import pytest
import torch
from calls import IDS, TARGET, TEACHER, K, N, V, leaves, made
from sizes import DEVICE

import logitless as ll

SOURCES = ["tensor", "head"]


def refusal(f) -> str:
    """The words of the error that f raises."""
    with pytest.raises((TypeError, ValueError)) as refused:
        f()
    return str(refused.value)


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
    assert words.endswith("from (N, V, ...) it does by logits.movedim(1, -1).")
    assert ll.cross_entropy(x.movedim(1, -1), labels).isfinite()


def head():
    return leaves("head")[:2]


POSITIONS = {
    "cross_entropy": (lambda: ll.cross_entropy(TEACHER, TARGET, torch.ones(V)),
                      "cross_entropy must be given all arguments but logits, target by name, "
                      "such as weight=..., got 3 without one."),
    "linear_cross_entropy": (lambda: ll.linear_cross_entropy(*head(), TARGET, None),
                             "linear_cross_entropy must be given all arguments but hidden, weight, "
                             "target by name, such as bias=..., got 4 without one."),
    "a head": (lambda: ll.LinearLogits(*head(), None, 1 << 20),
               "LinearLogits must be given all arguments but hidden, weight, bias by name, "
               "such as workspace=..., got 4 without one."),
    "a module": (lambda: ll.nn.KLDivLoss("forward"),
                 "KLDivLoss must be given all arguments by name, such as direction=..., "
                 "got 1 without one."),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), POSITIONS.values(), ids=POSITIONS.keys())
def test_an_option_without_its_name(call, words):
    assert refusal(call) == words


SPARSE = {"divergence": "tvd", "support": "tail"}
TYPOS = {
    "cross_entropy": (
        lambda o: ll.cross_entropy(TEACHER, TARGET, **o), "ignore_idx", "ignore_index"),
    "linear_cross_entropy": (
        lambda o: ll.linear_cross_entropy(*head(), TARGET, **o), "ignore_idx", "ignore_index"),
    "linear_cross_entropy, its own": (
        lambda o: ll.linear_cross_entropy(*head(), TARGET, **o), "workspaces", "workspace"),
    "LinearLogits": (lambda o: ll.LinearLogits(*head(), **o), "accumulated", "accumulate"),
    "logsumexp": (lambda o: ll.logsumexp(TEACHER, **o), "temperatur", "temperature"),
    "entropy": (lambda o: ll.entropy(TEACHER, **o), "soft_cap", "softcap"),
    "token_logprobs": (lambda o: ll.token_logprobs(TEACHER, IDS, **o), "temprature", "temperature"),
    "score": (lambda o: ll.score(TEACHER, TARGET, **o), "ignored_index", "ignore_index"),
    "row_stats": (lambda o: ll.row_stats(TEACHER, **o), "entropies", "entropy"),
    "row_loss": (lambda o: ll.row_loss(lambda s: s.lse, TEACHER, **o), "reduce", "reduction"),
    "kl_div": (lambda o: ll.kl_div(TEACHER, TEACHER, direction="forward", **o), "masks", "mask"),
    "jsd": (lambda o: ll.jsd(TEACHER, TEACHER, **o), "t_square", "t_squared"),
    "soft_cross_entropy": (
        lambda o: ll.soft_cross_entropy(TEACHER, TEACHER, **o), "smoothing", "label_smoothing"),
    "topk_distill": (
        lambda o: ll.topk_distill(TEACHER, ll.capture_topk(TEACHER, K), **SPARSE, **o), "label",
        "labels"),
    "gathered_kl": (lambda o: ll.gathered_kl(TEACHER, TEACHER, **o), "reductions", "reduction"),
    "capture_topk": (lambda o: ll.capture_topk(TEACHER, K, **o), "temperature_", "temperature"),
    "CrossEntropyLoss": (lambda o: ll.nn.CrossEntropyLoss(**o), "ignore_idx", "ignore_index"),
    "LinearCrossEntropyLoss": (lambda o: ll.nn.LinearCrossEntropyLoss(**o), "soft_cap", "softcap"),
    "Score": (lambda o: ll.nn.Score(**o), "temperatures", "temperature"),
    "LogSumExp": (lambda o: ll.nn.LogSumExp(**o), "soft_cap", "softcap"),
    "TopKDistillLoss": (lambda o: ll.nn.TopKDistillLoss(**SPARSE, **o), "betas", "beta"),
    "JSDLoss": (lambda o: ll.nn.JSDLoss(**o), "betta", "beta"),
    "FusedHead": (lambda o: ll.nn.FusedHead(2, 3, **o), "worksp", "workspace"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPOS)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(name):
    """It was "_Reads.__init__() got an unexpected keyword argument"."""
    call, typo, meant = TYPOS[name]
    words = refusal(lambda: call({typo: None}))
    assert words.startswith(f"{name.split(',')[0]} must be given arguments among ")
    assert words.endswith(f", got {typo!r}. Did you mean {meant!r}?")


def test_an_option_like_no_other_is_named_with_those_there_are():
    want = "logsumexp must be given arguments among logits, temperature, softcap, got 'dim'."
    assert refusal(lambda: ll.logsumexp(TEACHER, dim=-1)) == want


BAD_MODULES = {
    "reduction": (lambda v: ll.nn.CrossEntropyLoss(reduction=v), "avg"),
    "reduction of a head's": (lambda v: ll.nn.LinearCrossEntropyLoss(reduction=v), "avg"),
    "reduction of jsd": (lambda v: ll.nn.JSDLoss(reduction=v), None),
    "label_smoothing": (lambda v: ll.nn.CrossEntropyLoss(label_smoothing=v), 2),
    "z_loss": (lambda v: ll.nn.CrossEntropyLoss(z_loss=v), -1),
    "ignore_index": (lambda v: ll.nn.Score(ignore_index=v), None),
    "temperature": (lambda v: ll.nn.LogSumExp(temperature=v), 0),
    "softcap": (lambda v: ll.nn.Entropy(softcap=v), -1),
    "direction": (lambda v: ll.nn.KLDivLoss(direction=v), "back"),
    "divergence": (lambda v: ll.nn.TopKDistillLoss(divergence=v, support="tail"), "kl"),
    "support": (lambda v: ll.nn.TopKDistillLoss(divergence="tvd", support=v), "top"),
    "beta": (lambda v: ll.nn.JSDLoss(beta=v), 2),
    "ce_weight": (lambda v: ll.nn.TopKDistillLoss(**SPARSE, ce_weight=v), float("nan")),
    "accumulate": (lambda v: ll.nn.FusedHead(2, 3, accumulate=v), "bf16"),
}


@pytest.mark.parametrize("name", BAD_MODULES)
def test_a_module_refuses_a_bad_option_when_it_is_made(name):
    make, value = BAD_MODULES[name]
    words = refusal(lambda: make(value))
    assert words.startswith(f"{name.split()[0]} must ")
    assert words.endswith(f"got {value!r}.")


@pytest.mark.parametrize("of", ["the logits", "their base", "a view"])
def test_logits_that_retain_their_gradient_cannot_be_overwritten(of, impl):
    """It was an INTERNAL ASSERT of PyTorch's, or a gradient that never came."""
    base = leaves("tensor")[0].requires_grad_() * 1
    logits = base if of == "the logits" else base.view(2, N // 2, V)
    (logits if of == "a view" else base).retain_grad()
    words = refusal(lambda: ll.cross_entropy(logits, TARGET.view(logits.shape[:-1]), inplace=True))
    assert words.startswith("logits must not retain grad (retain_grad was called) for inplace=True")
    with torch.no_grad():
        ll.cross_entropy(logits, TARGET.view(logits.shape[:-1]), inplace=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("source", SOURCES)
def test_meta_tensors_have_shapes_on_every_source(source, reduction):
    """A head said "unknown device type for autocast"."""
    parts = [t.to("meta").requires_grad_() for t in leaves(source)]
    loss = ll.cross_entropy(made(source, parts), TARGET.to("meta"), reduction=reduction)
    assert (loss.device.type, loss.shape) == ("meta", () if reduction == "mean" else (N,))
    loss.sum().backward()
    assert [t.grad.shape for t in parts] == [t.shape for t in parts]
    scores = ll.score(made(source, parts), TARGET.to("meta"))
    assert all(t.shape == (N,) for t in scores)
    assert ll.capture_topk(made(source, parts), 3).ids.shape == (N, 3)


def test_kernels_refuse_meta_tensors():
    words = "must have a GPU tensor, or a cpu tensor and TRITON_INTERPRET=1, got a meta tensor"
    with ll.impl("triton"), pytest.raises(RuntimeError, match=words):
        ll.logsumexp(TEACHER.to("meta"))
