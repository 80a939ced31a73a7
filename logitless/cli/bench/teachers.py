"""Cases with a teacher: known on K ids a row, gathered there already, or dense."""

from functools import partial

import torch
from torch import Tensor

import logitless as ll

from . import reference
from .cases import EAGER, Case, Inputs, Mode, normal

LARGE, PAIR, CPU = (8192, 128256), (4096, 128256), ((128, 50257), "fp32")
GATHERED = ((4, 2048, 64), (8, 1024, 512))
QUICK = {"cuda": ((1024, 32000), "bf16"), "cpu": ((32, 4001), "fp32")}
TAIL = {"divergence": "forward_kl", "support": "tail"}
MIXED = TAIL | {"labels": True, "temperature": 2.0, "ce_weight": 0.5, "kd_weight": 0.5}
RENORM = {"divergence": "forward_kl", "support": "renorm"}


def cases(device: str, quick: bool) -> list[Case]:
    if device == "cpu" or quick:
        return [*at(device, *(QUICK[device] if quick else CPU)), *gathered(device, (2, 64, 64))]
    small = [case for shape in GATHERED for case in gathered(device, shape)]
    return [*sparse(LARGE, "bf16"), *small, *pairs(PAIR, "bf16")]


def at(device: str, shape: tuple[int, ...], dtype: str) -> list[Case]:
    return [*sparse(shape, dtype), *pairs(shape, dtype)] if len(shape) == 2 else []


def sparse(shape: tuple[int, ...], dtype: str) -> list[Case]:
    """topk_distill, the cross-entropy that its targets speak of, and the making of a teacher."""
    case = partial(Case, shape=shape, dtype=dtype, alone=True)
    distill = partial(case, "teachers", "topk_distill", Mode.BACKWARD, passes=3)
    capture = partial(case, "teachers", "capture_topk", Mode.FORWARD, passes=1)
    many, sure = {"K": 512}, {"sure": True}

    def beside(limit: float, variant: str, given: dict, **how) -> Case:
        return distill(variant=variant, given=given, targets={"cross_entropy": limit}, **how)

    return [
        case("logits", "cross_entropy", Mode.BACKWARD, passes=3),
        beside(1.10, "tail, K=64", TAIL, alone=False),
        beside(1.25, "tail and cross_entropy, K=64", MIXED),
        beside(1.30, "tail, K=512", TAIL | many),
        distill(variant="small tails, K=64", given=TAIL | sure),
        distill(variant="small tails, K=512", given=TAIL | many | sure),
        distill(
            variant="renorm, K=64", given=RENORM, targets={"floor": 1.15}, yardstick="zeros_like"
        ),
        capture(
            variant="K=64", given={"k": 64}, targets={EAGER: 1 / 3}, alone=False, compiled=False
        ),
        *(capture(variant=f"K={k}", given={"k": k}) for k in (8, 256)),
    ]


def gathered(device: str, shape: tuple[int, ...]) -> list[Case]:
    """Over logits gathered at K ids: they, the teacher and the gradient are its bytes."""
    case = partial(Case, "teachers", "gathered_kl", shape=shape, dtype="fp32", passes=3)
    if device == "cpu":
        return [case(mode=Mode.BACKWARD)]
    replay = case(mode=Mode.REPLAY_BOTH, targets={"start + floor": 4.0}, compiled=False)
    return [case(mode=Mode.WALL, targets={EAGER: 1.0}), replay]


def pairs(shape: tuple[int, ...], dtype: str) -> list[Case]:
    """Of a dense teacher; the targets are three quarters of the copy bandwidth."""
    case = partial(Case, "teachers", mode=Mode.BACKWARD, shape=shape, dtype=dtype)
    kl = partial(case, "kl_div", targets={"floor": 1 / 0.75}, passes=5)
    return [
        *(kl(variant=way, given={"direction": way}) for way in ("forward", "reverse")),
        case("jsd", targets={"floor": 1 / 0.75}, passes=7),
        case("soft_cross_entropy"),
    ]


def inputs(case: Case, device: str) -> Inputs:
    x, options = normal(case, device), dict(case.given)
    if case.op == "topk_distill":
        sure = options.pop("sure", False)
        rows = sparse_teacher(len(x), x.shape[1], device, options)
        if sure:  # the student's rest is as small as the teacher's
            x.scatter_(1, rows[0], 20.0)
        return Inputs((x,), rows, options, {})
    if case.op == "capture_topk":
        return Inputs((x,), (), options, {})
    teacher = normal(case, device)
    if case.op == "gathered_kl":
        teacher = teacher.log_softmax(-1)
    if case.op == "soft_cross_entropy":
        teacher = teacher.float().softmax(-1)
    return Inputs((x,), (teacher,), options, {})


def sparse_teacher(N: int, V: int, device: str, options: dict) -> tuple[Tensor, ...]:
    """ids, log-probabilities and tail of a teacher of K random ids; and labels, if asked for."""
    K = min(options.pop("K", 64), V // 2)
    logprobs = (2 * torch.randn(N, 4096, device=device)).log_softmax(-1).topk(K).values
    ids = torch.stack([torch.randperm(V, device=device)[:K] for _ in range(min(N, 64))])
    ids = ids.repeat(-(-N // len(ids)), 1)[:N]
    tail = torch.log1p(-logprobs.exp().sum(-1).clamp(max=0.999))
    labels = (torch.randint(V, (N,), device=device),) if options.pop("labels", False) else ()
    return (ids, logprobs, tail, *labels)


def distill(logits, ids, logprobs, tail, labels=None, **options) -> Tensor:
    targets = ll.SparseTargets(ids, logprobs, tail)
    return ll.topk_distill(logits, targets, labels=labels, **options)


def ours() -> dict:
    names = ("capture_topk", "gathered_kl", "kl_div", "jsd", "soft_cross_entropy")
    return {"topk_distill": distill} | {name: getattr(ll, name) for name in names}


def of_log_softmax(loss):
    """For those that want log-probabilities: making them is part of the work."""
    return lambda x, teacher, **_: loss(x.log_softmax(-1), teacher.log_softmax(-1))


EAGER_OPS = reference.OPS
RIVALS = {
    "liger": (
        "liger_kernel.transformers",
        lambda m: {
            "kl_div, forward": of_log_softmax(m.LigerKLDIVLoss(log_target=True)),
            "jsd": of_log_softmax(m.LigerJSD(beta=0.5)),
        },
    ),
}
