"""Cases over logits in hand: cross_entropy, score, logsumexp."""

from functools import partial

import torch

import logitless as ll

from . import reference
from .cases import COMPILED, DTYPES, EAGER, Case, Inputs, Mode, normal

LARGE, CPU_LARGE = (8192, 128256), (512, 128256)
GPU_SHAPES = (
    (LARGE, "bf16"),
    ((4096, 151936), "bf16"),
    ((16384, 32000), "bf16"),
    (LARGE, "fp32"),
    ((16384, 50257), "bf16"),  # this and the next: rows that aren't 16-byte aligned
    ((8192, 128255), "bf16"),
)
GPU_FEW = (
    ((1, 128256), "bf16"),
    ((2, 129920), "fp32"),
    ((16, 128256), "bf16"),
    ((128, 128256), "bf16"),
)
CPU_SHAPES = (((128, 50257), "fp32"), ((128, 50257), "bf16"))
QUICK = {"cuda": ((1024, 32000), "bf16"), "cpu": ((32, 4001), "fp32")}
FEW_ROWS = 256  # at most: work so short that a GPU is timed by graph replay
SPARE_MIB = 8.0
OPTIONS = {
    "label_smoothing": 0.1,
    "z_loss": 1e-4,
    "softcap": 30.0,
    "temperature": 0.7,
    "weight": True,
}


def cases(device: str, quick: bool) -> list[Case]:
    """The whole table of this kind of device; `quick` keeps its form and shrinks its shapes."""
    if device == "cpu":
        found = [c for s in ([QUICK["cpu"]] if quick else CPU_SHAPES) for c in at(device, *s)]
        large = [] if quick else at(device, CPU_LARGE, "fp32")
        return found + [case for case in large if case.mode != Mode.FORWARD]
    shapes = [QUICK["cuda"]] if quick else GPU_SHAPES
    wall = partial(Case, "logits", "cross_entropy", Mode.WALL, dtype="bf16")
    rivals = (COMPILED, "liger", "fla", "flash-attn")
    return [
        *(case for shape in (*shapes, *GPU_FEW) for case in at(device, *shape)),
        *variants(*shapes[0]),
        wall((64, 1024), targets={EAGER: 2.0, rivals: 1.0}),
        wall((512, 32000), targets={EAGER: 2.7, rivals: 1.0}),
    ]


def at(device: str, shape: tuple[int, ...], dtype: str) -> list[Case]:
    """The main cases at one shape."""
    if len(shape) != 2:
        return []
    case = partial(Case, "logits", shape=shape, dtype=dtype)
    if device == "cuda" and shape[0] <= FEW_ROWS:
        few = partial(case, mode=Mode.REPLAY, targets={"start + floor": 1.3}, passes=1)
        return [few(op, compiled=False) for op in ("logsumexp", "score")]
    aligned = shape[1] * DTYPES[dtype].itemsize % 16 == 0
    stream = {"floor": 1.06 if aligned else 1.15}
    forward = partial(case, mode=Mode.FORWARD, targets=stream, passes=1)
    both = partial(case, "cross_entropy", spare_mib=SPARE_MIB)
    on_cpu = 1.15 if shape == CPU_LARGE else None
    return [
        forward("cross_entropy", compiled=device == "cuda"),
        # These compile to much the same, and starting the compiler takes long.
        *(forward(op, compiled=False) for op in ("score", "logsumexp")),
        both(Mode.BACKWARD, targets=stream, passes=3, cpu_target=on_cpu),
        both(Mode.INPLACE, targets={"floor": 1.15}, passes=2),
    ]


def variants(shape: tuple[int, ...], dtype: str) -> list[Case]:
    case = partial(Case, "logits", shape=shape, dtype=dtype, alone=True)
    half = partial(case, "cross_entropy", Mode.FORWARD, targets={"cross_entropy": 0.55}, passes=0.5)
    both = partial(case, mode=Mode.BACKWARD, passes=3, spare_mib=SPARE_MIB)
    option = partial(both, targets={"cross_entropy": 1.10})
    return [
        half(variant="every other row ignored", given={"runs": 1}),
        half(variant="runs of 256 rows ignored", given={"runs": 256}),
        *(option("cross_entropy", variant=name, given={name: x}) for name, x in OPTIONS.items()),
        option("score", variant="with entropy"),
    ]


def inputs(case: Case, device: str) -> Inputs:
    options = dict(case.given)
    target = torch.randint(case.shape[-1], (case.rows,), device=device)
    if run := options.pop("runs", None):  # every other run of rows is ignored
        target[torch.arange(case.rows, device=device) // run % 2 == 0] = reference.IGNORED
    if "weight" in options:
        options["weight"] = torch.rand(case.shape[-1], device=device) + 0.5
    return Inputs((normal(case, device),), (target,), options, {})


def ours() -> dict:
    found = fused(ll.cross_entropy, partial(ll.cross_entropy, inplace=True))
    return found | {"logsumexp": lambda x, target: ll.logsumexp(x), "score": ll.score}


def fused(default, inplace) -> dict:
    return {"cross_entropy": default, "cross_entropy in place": inplace}


EAGER_OPS = reference.OPS
RIVALS = {
    "liger": (  # one function for both: it always leaves the gradient in the caller's logits
        "liger_kernel.transformers.functional",
        lambda m: fused(m.liger_cross_entropy, m.liger_cross_entropy),
    ),
    "fla": (  # its logsumexp is left out: one block of 65,536, autotuned, takes minutes to compile
        "fla.modules.fused_cross_entropy",
        lambda m: fused(m.FusedCrossEntropyLoss(), m.FusedCrossEntropyLoss(inplace_backward=True)),
    ),
    "flash-attn": (
        "flash_attn.losses.cross_entropy",
        lambda m: fused(m.CrossEntropyLoss(), m.CrossEntropyLoss(inplace_backward=True)),
    ),
    "quack": (
        "quack.cross_entropy",
        lambda m: fused(m.cross_entropy, partial(m.cross_entropy, inplace_backward=True)),
    ),
}
