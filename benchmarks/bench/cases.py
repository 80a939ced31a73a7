"""Defines the cases of the benchmark: functions, sizes, lower bounds on times, and our targets.

The size of the logits in bytes is B = rows · vocab · itemsize. A forward moves B bytes, because it
reads the logits once. A forward + backward moves 3 · B bytes, because it reads the logits twice and
writes a gradient of the same size. An in-place forward + backward moves 2 · B bytes, because it
reads and overwrites each logit once. The copy bandwidth C is measured in the same run. The *floor*
of a case is a lower bound on its time: the number of moved bytes divided by C.

If a function is not limited by memory bandwidth, its floor is the time of a *yardstick*. A
yardstick is a simpler computation that is timed in the same run. For a loss over a head, the
yardstick is the GEMMs of the head, computed by cuBLAS. A mean or a sum needs three GEMMs. A loss
with one result per row needs four GEMMs. On a CPU, cases have no floor, and times are compared with
PyTorch's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

OURS, EAGER, COMPILED = "logitless", "eager", "compile"
OUR_PLAIN = "our cross_entropy"  # our `cross_entropy` without options, at the shape of the case
FAMILIES = ("logits", "teachers", "heads")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = "plain"  # the variant without options
MIB = 2**20


class Mode:
    """Names of modes.

    The name of a mode states which passes are timed, and which clock is used (graph replay or wall
    time). If the name states no clock, device time is measured.
    """

    FORWARD, BACKWARD = "forward", "forward + backward"
    INPLACE = "forward + backward, in place"
    REPLAY, REPLAY_BOTH = "forward, graph replay", "forward + backward, graph replay"
    WALL = "forward + backward, wall time"


@dataclass
class Work:
    """The fields that identify a case."""

    family: str
    op: str
    mode: str
    variant: str = PLAIN
    shape: str = field(default="", kw_only=True)  # rows×vocab, or rows×width×vocab for a head
    dtype: str = field(default="", kw_only=True)

    @property
    def work(self) -> str:
        return self.op if self.variant == PLAIN else f"{self.op}, {self.variant}"

    @property
    def name(self) -> str:
        return f"{self.work}, {self.mode}, {self.shape} {self.dtype}"


@dataclass
class Case(Work):
    """One case of the benchmark.

    The case is run for every contender (library) that supports the op.

    For each reference, our time must be at most `targets[reference]` times the reference's time. A
    reference is one of these strings:

    - "floor" is the lower bound on the time of the case (see the docstring of this file).

    - "start + floor" is for small inputs. Our time must be at most 6 µs + targets[reference] times
      the floor, because starting the kernels takes time.

    - OUR_PLAIN is the time of our cross_entropy without options.

    - A comma-separated list of contenders means the time of the fastest contender in the list.

    - "cpu" is PyTorch's time on a CPU.
    """

    options: dict[str, Any] = field(default_factory=dict)  # options of op, head and inputs
    targets: dict[str, float] = field(default_factory=dict)
    passes: float = 0.0  # number of moved bytes, as a multiple of the size of the logits
    yardstick: str = ""  # name of a yardstick (see runner.yardstick), or empty
    spare_mib: float | None = None  # largest allowed memory in MiB, without the gradients
    alone: bool = False  # whether only logitless is run
    compiled: bool = True  # whether torch.compile is run; compiling is slow

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(int, self.shape.split("×")))

    @property
    def rows(self) -> int:
        return self.sizes[0] if self.family == "heads" else prod(self.sizes[:-1])

    @property
    def row_bytes(self) -> int:
        return self.sizes[-1] * DTYPES[self.dtype].itemsize

    def at(self, shape: str, dtype: str, device: str = "cuda") -> Case:
        case, floor = replace(self, shape=shape, dtype=dtype), self.targets.get("floor")
        if device == "cpu":  # torch.compile runs in few cases, because compiling is slow
            case.mode = Mode.BACKWARD if case.mode in (Mode.WALL, Mode.REPLAY_BOTH) else case.mode
            case.compiled &= (case.family, case.mode) == ("logits", Mode.BACKWARD)
            case.targets = {EAGER: case.targets["cpu"]} if "cpu" in case.targets else {}
            case.passes, case.yardstick = 0.0, ""
        elif floor and case.family != "heads" and case.row_bytes % 16:
            # The target is less strict if some rows are not 16-byte aligned.
            case.targets = case.targets | {"floor": max(1.15, floor)}
        return case


FORWARD, BOTH, INPLACE, WALL = Mode.FORWARD, Mode.BACKWARD, Mode.INPLACE, Mode.WALL
LOGITS, TEACHERS, HEADS = (partial(Case, family) for family in FAMILIES)
NEAR, START, DENSE = {"floor": 1.06}, {"start + floor": 1.3}, {"floor": 1 / 0.75}
# torch.compile is not run for score and logsumexp, because compiling is slow.
READ = [LOGITS(op, FORWARD, PLAIN, {}, NEAR, 1, compiled=False) for op in ("score", "logsumexp")]
FEW = [replace(case, mode=Mode.REPLAY, targets=START) for case in READ]
STREAM = [
    LOGITS("cross_entropy", FORWARD, targets=NEAR, passes=1),
    *READ,
    LOGITS("cross_entropy", BOTH, targets=NEAR, passes=3, spare_mib=8.0),
    LOGITS("cross_entropy", INPLACE, targets={"floor": 1.15}, passes=2, spare_mib=8.0),
]
ON_CPU = [replace(STREAM[-2], targets={"cpu": 1.15}), STREAM[-1]]
OTHERS = f"{COMPILED}, liger, fla, flash-attn"
SHORT = partial(LOGITS, "cross_entropy", WALL, PLAIN, {})
HALF = partial(LOGITS, "cross_entropy", FORWARD, targets={OUR_PLAIN: 0.55}, passes=0.5, alone=True)
MORE = partial(LOGITS, mode=BOTH, targets={OUR_PLAIN: 1.10}, passes=3, spare_mib=8.0, alone=True)
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "temperature": 0.7}
OPTIONS |= {"weight": True}  # `contenders.inputs` replaces True with random class weights
VARIANTS = [
    HALF("every other row ignored", options={"runs": 1}),
    HALF("runs of 256 rows ignored", options={"runs": 256}),
    *(MORE("cross_entropy", variant=name, options={name: x}) for name, x in OPTIONS.items()),
    MORE("score", variant="with entropy"),
]
TAIL = {"divergence": "forward_kl", "support": "tail"}
MIXED = TAIL | {"labels": True, "temperature": 2.0, "ce_weight": 0.5, "kd_weight": 0.5}
RENORM = {"divergence": "forward_kl", "support": "renorm"}
SMALL_TAIL = TAIL | {"small_tail": True}  # the student's tail has almost no mass
DISTILL = partial(TEACHERS, "topk_distill", BOTH, passes=3, alone=True)
CAPTURE = partial(TEACHERS, "capture_topk", FORWARD, passes=1, compiled=False)
SPARSE = [  # the targets of cases with a tail are multiples of the time of `cross_entropy`
    LOGITS("cross_entropy", BOTH, passes=3, alone=True),
    DISTILL("tail, K=64", TAIL, {OUR_PLAIN: 1.10}, alone=False),
    DISTILL("tail and cross_entropy, K=64", MIXED, {OUR_PLAIN: 1.25}),
    DISTILL("tail, K=512", TAIL | {"K": 512}, {OUR_PLAIN: 1.30}),
    DISTILL("small tails, K=64", SMALL_TAIL),
    DISTILL("small tails, K=512", SMALL_TAIL | {"K": 512}),
    DISTILL("renorm, K=64", RENORM, {"floor": 1.15}, passes=0, yardstick="zeros_like"),
    CAPTURE("K=64", {"k": 64}, {EAGER: 1 / 3}),
    CAPTURE("K=8", {"k": 8}, alone=True),
    CAPTURE("K=256", {"k": 256}, alone=True),
]
GATHERED = [  # 3 passes: `gathered_kl` reads the student and the teacher, and writes the gradient
    TEACHERS("gathered_kl", WALL, targets={EAGER: 1.0}),
    TEACHERS("gathered_kl", Mode.REPLAY_BOTH, PLAIN, {}, {"start + floor": 4.0}, 3, compiled=False),
]
PAIRS = [
    TEACHERS("kl_div", BOTH, "forward", {"direction": "forward"}, DENSE, 5),
    TEACHERS("kl_div", BOTH, "reverse", {"direction": "reverse"}, DENSE, 5),
    TEACHERS("jsd", BOTH, targets=DENSE, passes=7),
    TEACHERS("tvd", BOTH, targets=DENSE, passes=7),
    TEACHERS("soft_cross_entropy", BOTH),
]
ROOMY = {"floor": 1.25}
LIGER = {"liger": 1.0}  # if our workspace is as large as Liger's memory, our limit is Liger's time
ALONE = partial(HEADS, "cross_entropy", BOTH, alone=True)
PLAIN_HEAD = HEADS("cross_entropy", BOTH, targets=NEAR, yardstick="3 GEMMs")
IN_WEIGHT = {"workspace": 128 * MIB, "accumulate": "weight"}
OTHER_SUMS = [
    ALONE("128 MiB, summed in the weight's dtype", IN_WEIGHT),
    ALONE("summed in fp32", {"accumulate": "fp32"}),
]
OVER_A_HEAD = [
    HEADS("policy_loss", BOTH, "GRPO mean by row_loss", {}, NEAR, yardstick="3 GEMMs"),
    HEADS("score", BOTH, "with entropy", {}, {"floor": 1.08}, yardstick="4 GEMMs", alone=True),
    HEADS("topk_distill", BOTH, "tail, K=64", TAIL, {OUR_PLAIN: 1.05}, alone=True),
    ALONE("half of the rows ignored", {"runs": 1}, {OUR_PLAIN: 0.56}),
]


def workspaces(targets: dict[int, dict]) -> list[Case]:
    """Returns cases of `cross_entropy` over a head.

    The cases have different options `workspace` and `accumulate`. `targets` maps each workspace
    size, in MiB, to the targets of the case with this size (see `Case`).
    """
    small = [(f"{mib} MiB", {"workspace": mib * MIB}, limit) for mib, limit in targets.items()]
    return [PLAIN_HEAD, *(ALONE(*case, yardstick="3 GEMMs") for case in small), *OTHER_SUMS]


SHAPES = (  # rows of the last two shapes are not 16-byte aligned
    "8192×128256 bf16, 4096×151936 bf16, 16384×32000 bf16, 8192×128256 fp32, "
    "16384×50257 bf16, 8192×128255 bf16"
)
FEW_SHAPES = "1×128256 bf16, 2×129920 fp32, 16×128256 bf16, 128×128256 bf16"
LARGE, LARGE_HEAD = "8192×128256 bf16", "8192×4096×128256 bf16"
CPU, CPU_HEAD = "128×50257 fp32", "256×512×32000 fp32"
GROUPS = (  # fields: family, cases, shapes on a GPU, shapes on a CPU, `kinds` (see `suits`)
    ("logits", STREAM, SHAPES, f"{CPU}, 128×50257 bf16", ("many",)),
    ("logits", ON_CPU, "", "512×128256 fp32", ()),
    ("logits", FEW, FEW_SHAPES, "", ("few",)),
    ("logits", VARIANTS, LARGE, "", ()),
    ("logits", [SHORT({EAGER: 2.0, OTHERS: 1.0})], "64×1024 bf16", "", ()),
    ("logits", [SHORT({EAGER: 2.7, OTHERS: 1.0})], "512×32000 bf16", "", ()),
    ("teachers", SPARSE, LARGE, CPU, ("few", "many")),
    ("teachers", GATHERED, "4×2048×64 fp32, 8×1024×512 fp32", "2×64×64 fp32", ()),
    ("teachers", PAIRS, "4096×128256 bf16", CPU, ("few", "many")),
    ("heads", workspaces({128: ROOMY, 64: LIGER}), LARGE_HEAD, CPU_HEAD, ("few", "many")),
    ("heads", workspaces({128: ROOMY, 64: {}, 37: LIGER}), "8192×2048×151936 bf16", "", ()),
    ("heads", workspaces({128: ROOMY | LIGER, 64: {}}), "16384×2304×256000 bf16", "", ()),
    ("heads", OVER_A_HEAD, LARGE_HEAD, CPU_HEAD, ()),
)
FEW_ROWS = 256  # shapes with at most this many rows are of the kind "few" on a GPU (see `suits`)
QUICK = {"cuda": (1024, 32000), "cpu": (64, 4001)}  # largest (rows, vocabulary) with --quick


def parse_shape(text: str) -> str:
    """Checks a shape, and returns the shape with × instead of x between the sizes."""
    sizes = text.lower().replace("×", "x").split("x")
    if len(sizes) not in (2, 3) or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape must be ROWSxVOCAB or ROWSxWIDTHxVOCAB, got {text!r}.")
    return "×".join(sizes)


def smaller(shape: str, device: str) -> str:
    """Returns the shape with each size reduced to the limit of --quick."""
    rows, vocab = QUICK[device]
    *others, last = map(int, shape.split("×"))
    return "×".join(map(str, [*(min(size, rows) for size in others), min(last, vocab)]))


def suits(shape: str, family: str, kinds: tuple[str, ...], device: str) -> bool:
    """Returns whether a group of cases accepts a shape that is passed with --shape.

    Shapes of heads have three dimensions, and other shapes have two dimensions. On a GPU, a shape
    of at most FEW_ROWS rows is of the kind "few". All other shapes are of the kind "many". The
    group accepts only shapes whose kind is in `kinds`.
    """
    rows, *width, _ = map(int, shape.split("×"))
    kind = "few" if device == "cuda" and rows <= FEW_ROWS else "many"
    return bool(width) == (family == "heads") and kind in kinds


def choose(
    device: str, *, quick=False, families=None, ops=None, shapes=None, dtypes=None
) -> list[Case]:
    """Returns the cases that pass all filters. A case that occurs twice is returned once."""
    default = ["fp32" if device == "cpu" else "bf16"]
    requested = list(product(map(parse_shape, shapes or ()), dtypes or default))
    chosen: dict[str, Case] = {}
    for family, cases, cuda, cpu, kinds in GROUPS:
        sizes = [text.split() for text in (cpu if device == "cpu" else cuda).split(", ") if text]
        sizes = [(smaller(shape, device) if quick else shape, dtype) for shape, dtype in sizes]
        if requested:
            sizes = [size for size in requested if suits(size[0], family, kinds, device)]
        for (shape, dtype), case in product(sizes, cases):
            filters = ((family, families), (case.op, ops), (dtype, dtypes))
            if all(value in (allowed or [value]) for value, allowed in filters):
                case = case.at(shape, dtype, device)
                case.compiled &= not quick
                chosen.setdefault(case.name, case)
    if not chosen:
        raise ValueError("no case has this family, op, shape and dtype.")
    return list(chosen.values())
