"""The table of cases, and the choice of those that are asked for.

The floor of a head is the matrix products that it cannot do without, by cuBLAS at full size: three
for a mean or sum, four where results a row come back. `workspace` bounds its memory; Liger is
compared at the memory that it takes itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from .cases import COMPILED, EAGER, PLAIN, Case, Mode, Shape
from .timing import MIB

FORWARD, BOTH, INPLACE, WALL = Mode.FORWARD, Mode.BACKWARD, Mode.INPLACE, Mode.WALL
LOGITS, TEACHERS, HEADS = (partial(Case, family) for family in ("logits", "teachers", "heads"))
ALONE = partial(HEADS, "cross_entropy", BOTH, alone=True)

# What a case is given, and what its time is compared with.
TAIL = {"divergence": "forward_kl", "support": "tail"}
MIXED = TAIL | {"labels": True, "temperature": 2.0, "ce_weight": 0.5, "kd_weight": 0.5}
RENORM = {"divergence": "forward_kl", "support": "renorm"}
SURE = TAIL | {"sure": True}  # the student's rest is as small as the teacher's
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "temperature": 0.7}
OPTIONS |= {"weight": True}  # of the classes, drawn with the inputs
NEAR, START, DENSE = {"floor": 1.06}, {"start + floor": 1.3}, {"floor": 1 / 0.75}
OTHERS = (COMPILED, "liger", "fla", "flash-attn")


def beside(factor: float) -> dict:
    return {"cross_entropy": factor}


def wall(factor: float) -> Case:
    return LOGITS("cross_entropy", WALL, targets={EAGER: factor, OTHERS: 1.0})


STREAM = [
    LOGITS("cross_entropy", FORWARD, PLAIN, {}, NEAR, 1),
    # These two compile to much the same, and starting the compiler takes long.
    LOGITS("score", FORWARD, PLAIN, {}, NEAR, 1, compiled=False),
    LOGITS("logsumexp", FORWARD, PLAIN, {}, NEAR, 1, compiled=False),
    LOGITS("cross_entropy", BOTH, PLAIN, {}, NEAR, 3, spare_mib=8.0),
    LOGITS("cross_entropy", INPLACE, PLAIN, {}, {"floor": 1.15}, 2, spare_mib=8.0),
]
ON_CPU = [replace(STREAM[-2], targets={"cpu": 1.15}), STREAM[-1]]
FEW = [
    LOGITS("logsumexp", Mode.REPLAY, PLAIN, {}, START, 1, compiled=False),
    LOGITS("score", Mode.REPLAY, PLAIN, {}, START, 1, compiled=False),
]
HALF = partial(LOGITS, "cross_entropy", FORWARD, targets=beside(0.55), passes=0.5, alone=True)
MORE = partial(LOGITS, mode=BOTH, targets=beside(1.10), passes=3, spare_mib=8.0, alone=True)
VARIANTS = [
    HALF(variant="every other row ignored", given={"runs": 1}),
    HALF(variant="runs of 256 rows ignored", given={"runs": 256}),
    *(MORE("cross_entropy", variant=name, given={name: x}) for name, x in OPTIONS.items()),
    MORE("score", variant="with entropy"),
]
DISTILL = partial(TEACHERS, "topk_distill", BOTH, passes=3, alone=True)
CAPTURE = partial(TEACHERS, "capture_topk", FORWARD, passes=1, compiled=False)
SPARSE = [  # and the cross-entropy that its targets speak of, and the making of a teacher
    LOGITS("cross_entropy", BOTH, passes=3, alone=True),
    DISTILL("tail, K=64", TAIL, beside(1.10), alone=False),
    DISTILL("tail and cross_entropy, K=64", MIXED, beside(1.25)),
    DISTILL("tail, K=512", TAIL | {"K": 512}, beside(1.30)),
    DISTILL("small tails, K=64", SURE),
    DISTILL("small tails, K=512", SURE | {"K": 512}),
    DISTILL("renorm, K=64", RENORM, {"floor": 1.15}, yardstick="zeros_like"),
    CAPTURE("K=64", {"k": 64}, {EAGER: 1 / 3}),
    CAPTURE("K=8", {"k": 8}, alone=True),
    CAPTURE("K=256", {"k": 256}, alone=True),
]
GATHERED = [  # its bytes: logits gathered at K ids, the teacher's and the gradient
    TEACHERS("gathered_kl", WALL, PLAIN, {}, {EAGER: 1.0}, 3),
    TEACHERS("gathered_kl", Mode.REPLAY_BOTH, PLAIN, {}, {"start + floor": 4.0}, 3, compiled=False),
]
PAIRS = [
    TEACHERS("kl_div", BOTH, "forward", {"direction": "forward"}, DENSE, 5),
    TEACHERS("kl_div", BOTH, "reverse", {"direction": "reverse"}, DENSE, 5),
    TEACHERS("jsd", BOTH, PLAIN, {}, DENSE, 7),
    TEACHERS("soft_cross_entropy", BOTH),
]
OVER_A_HEAD = [
    HEADS("policy_loss", BOTH, "GRPO mean by row_loss", {}, NEAR, yardstick="3 GEMMs"),
    HEADS("score", BOTH, "with entropy", {}, {"floor": 1.08}, yardstick="4 GEMMs", alone=True),
    HEADS("topk_distill", BOTH, "tail, K=64", TAIL, beside(1.05), alone=True),
    ALONE("half of the rows ignored", {"runs": 1}, beside(0.56)),
]
GROWING = [  # memory for more and more rows: see its column
    ALONE("default workspace, growing rows", study=True),
    ALONE("128 MiB, growing rows", {"workspace": 128 * MIB}, study=True),
]


def workspaces(*sizes: int, liger: int | None = None) -> list[Case]:
    """Cross-entropy over a head with these MiB of workspace, and with its sums in other dtypes."""
    found = [HEADS("cross_entropy", BOTH, PLAIN, {}, NEAR, yardstick="3 GEMMs")]
    for mib in sizes:
        targets = {"floor": 1.25} if mib == 128 else {}
        targets |= {"liger": 1.0} if mib == liger else {}
        found.append(ALONE(f"{mib} MiB", {"workspace": mib * MIB}, targets, yardstick="3 GEMMs"))
    small = {"workspace": 128 * MIB, "accumulate": "weight"}
    return [
        *found,
        ALONE("128 MiB, summed in the weight's dtype", small),
        ALONE("summed in fp32", {"accumulate": "fp32"}),
    ]


def exactness(rows: int, vocab: int) -> list[Case]:
    """The error of the weight's gradient, summed over more and more chunks: see its column."""
    found = [HEADS("cross_entropy", BOTH, "beside an unfused head", study=True, compiled=False)]
    for chunks in (1, 2, 4, 8, 16, 64):
        for way in ("auto", "fp32", "weight"):
            given = {"workspace": rows // chunks * vocab * 2, "accumulate": way}
            found.append(ALONE(f"{chunks} chunks, accumulate={way}", given, study=True))
    return found


class Group(NamedTuple):
    """Cases at the same places: "ROWSxVOCAB DTYPE, ..." on a GPU, and on a CPU."""

    family: str
    cases: list[Case]
    cuda: str = ""
    cpu: str = ""
    moves: str = ""  # where to, if --shape is given: "many" rows, "few", or "any"


SHAPES = (  # the last two have rows that aren't 16-byte aligned
    "8192x128256 bf16, 4096x151936 bf16, 16384x32000 bf16, 8192x128256 fp32, "
    "16384x50257 bf16, 8192x128255 bf16"
)
FEW_SHAPES = "1x128256 bf16, 2x129920 fp32, 16x128256 bf16, 128x128256 bf16"
LARGE, LARGE_HEAD = "8192x128256 bf16", "8192x4096x128256 bf16"
CPU, CPU_HEAD = "128x50257 fp32", "256x512x32000 fp32"
GROUPS = (
    Group("logits", STREAM, SHAPES, f"{CPU}, 128x50257 bf16", moves="many"),
    Group("logits", ON_CPU, cpu="512x128256 fp32"),
    Group("logits", FEW, FEW_SHAPES, moves="few"),
    Group("logits", VARIANTS, LARGE),
    Group("logits", [wall(2.0)], "64x1024 bf16"),
    Group("logits", [wall(2.7)], "512x32000 bf16"),
    Group("teachers", SPARSE, LARGE, CPU, moves="any"),
    Group("teachers", GATHERED, "4x2048x64 fp32, 8x1024x512 fp32", "2x64x64 fp32"),
    Group("teachers", PAIRS, "4096x128256 bf16", CPU, moves="any"),
    Group("heads", workspaces(128, 64, liger=64), LARGE_HEAD, CPU_HEAD, moves="any"),
    Group("heads", workspaces(128, 64, 37, liger=37), "8192x2048x151936 bf16"),
    Group("heads", workspaces(128, 64, liger=128), "16384x2304x256000 bf16"),
    Group("heads", OVER_A_HEAD, LARGE_HEAD, CPU_HEAD),
    Group("heads", exactness(8192, 32768), "8192x1024x32768 bf16"),
    Group("heads", GROWING, ", ".join(f"{2**n}x4096x128256 bf16" for n in range(12, 17))),
)
FEW_ROWS = 256  # at most: work so short that a GPU is timed by graph replay
QUICK = {  # more logits than this are too many; what they become, with and without a head
    "cuda": (2**25, {2: ((1024, 32000), "bf16"), 3: ((1024, 1024, 32000), "bf16")}),
    "cpu": (2**20, {2: ((32, 4001), "fp32"), 3: ((64, 32, 4001), "fp32")}),
}


def parse_shape(text: str) -> Shape:
    """'8192x128256' as (8192, 128256)."""
    sizes = text.lower().replace("×", "x").split("x")
    if len(sizes) not in (2, 3) or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape must be ROWSxVOCAB or ROWSxWIDTHxVOCAB, got {text!r}.")
    return tuple(map(int, sizes))


def moved(group: Group, device: str, shape: Shape) -> bool:
    """Whether a group takes part at a shape of --shape."""
    rows = "few" if device == "cuda" and shape[0] <= FEW_ROWS else "many"
    dimensions = 3 if group.family == "heads" else 2
    return len(shape) == dimensions and group.moves in (rows, "any")


def choose(
    device: str, *, quick=False, families=None, ops=None, shapes=None, dtypes=None
) -> list[Case]:
    """The cases that are asked for. Some are in two groups: the first stays."""
    asked = [parse_shape(shape) for shape in shapes or ()]
    kinds = dtypes or ["fp32" if device == "cpu" else "bf16"]
    most, small = QUICK[device]
    found: dict[str, Case] = {}
    for group in GROUPS:
        listed = [place.split() for place in getattr(group, device).split(", ") if place]
        places = [(parse_shape(shape), dtype) for shape, dtype in listed]
        if asked:
            places = [(s, kind) for s in asked if moved(group, device, s) for kind in kinds]
        elif quick:
            places = [small[len(s)] if s[0] * s[-1] > most else (s, kind) for s, kind in places]
        for case in (case.at(*place) for place in places for case in group.cases):
            wanted = group.family in (families or [group.family]) and case.op in (ops or [case.op])
            if wanted and case.dtype in (dtypes or [case.dtype]) and not (quick and case.study):
                case = case.on_cpu() if device == "cpu" else case
                case = replace(case, compiled=case.compiled and not quick)
                found.setdefault(case.name, case)
    if not found:
        raise ValueError("no case has this family, op, shape and dtype.")
    return list(found.values())
