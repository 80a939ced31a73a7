"""What is timed, and what each time is held against.

Every case counts the bytes it must move: B = rows · vocab · itemsize is one reading of the logits.
A forward reads them once (B), a forward + backward reads them twice and writes the gradient (3B),
and in place, where each element is read once and written once, 2B. Bytes over C, the copy
bandwidth measured in the same run, is the *floor* that no implementation can beat by much.
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, INPLACE = "forward", "forward + backward", "forward + backward, in place"
FEW, HOST = "few rows, graph replay", "host overhead"
PASSES = {FORWARD: 1.0, FEW: 1.0, BACKWARD: 3.0, INPLACE: 2.0, HOST: 3.0}
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
OPS = ("cross_entropy", "score", "logsumexp")
HALF = ("alternating", "runs")  # which rows are ignored in the half-ignored cases
OPTIONS = ("label_smoothing", "z_loss", "softcap", "temperature", "weight")

KERNEL_START_MS = 0.006  # what a call on few rows may cost beyond its bytes
SPARE_MIB = 8.0  # what any call may allocate beyond the gradient


class Target(NamedTuple):
    """Time must be at most `limit` times what `of` names.

    floor     the case's bytes over the copy bandwidth
    few rows  the same, after 6 µs for starting the kernels
    plain     our own time for the same work without the variant
    eager     PyTorch's time for the same case
    """

    limit: float
    of: str


class Case(NamedTuple):
    """One line of the benchmark, run once by every contender."""

    mode: str
    op: str
    rows: int
    vocab: int
    dtype: str
    target: Target | None = None
    variant: str = "plain"
    compiled: bool = True  # whether torch.compile, slow to start, takes part

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * ITEMSIZE[self.dtype]

    @property
    def floor_bytes(self) -> float:
        """Bytes that must move: half of the rows when half are ignored, and need not be read."""
        return self.logits_bytes * PASSES[self.mode] * (0.5 if self.variant in HALF else 1.0)

    @property
    def aligned(self) -> bool:
        return self.vocab * ITEMSIZE[self.dtype] % 16 == 0

    @property
    def ours_only(self) -> bool:
        return self.variant != "plain"

    @property
    def shape(self) -> str:
        return f"{self.rows}×{self.vocab}"

    @property
    def group(self) -> str:
        """The table this case is printed in."""
        if self.variant in HALF:
            return "half of the rows ignored"
        if self.ours_only:
            return "options"
        unaligned = self.mode == FORWARD and not self.aligned
        return f"{self.mode}, rows not 16-byte aligned" if unaligned else self.mode


class Shape(NamedTuple):
    rows: int
    vocab: int
    dtype: str


LARGE = Shape(8192, 128256, "bf16")
GPU_SHAPES = (
    LARGE,
    Shape(4096, 151936, "bf16"),
    Shape(16384, 32000, "bf16"),
    Shape(8192, 128256, "fp32"),
    Shape(16384, 50257, "bf16"),
    Shape(8192, 128255, "bf16"),
)
GPU_FEW = (
    Shape(1, 128256, "bf16"),
    Shape(2, 129920, "fp32"),
    Shape(16, 128256, "bf16"),
    Shape(128, 128256, "bf16"),
)
GPU_SMALL = Shape(64, 1024, "bf16")
CPU_LARGE = Shape(512, 128256, "fp32")
CPU_SHAPES = (Shape(128, 50257, "fp32"), Shape(128, 50257, "bf16"))
QUICK_GPU, QUICK_CPU = Shape(1024, 32000, "bf16"), Shape(32, 4001, "fp32")
FEW_ROWS = 256  # at most: the shapes for which a GPU is timed by graph replay


def default_cases(device: str, *, quick: bool = False) -> list[Case]:
    """The whole table of this kind of device; `quick` keeps its form and shrinks its shapes."""
    if device == "cpu":
        cases = [case for shape in ((QUICK_CPU,) if quick else CPU_SHAPES) for case in cpu(shape)]
        if not quick:
            cases += [case for case in cpu(CPU_LARGE) if case.mode != FORWARD]
    else:
        large = QUICK_GPU if quick else LARGE
        cases = [
            *(case for shape in ((large,) if quick else GPU_SHAPES) for case in gpu(shape)),
            *(few(op, shape) for shape in GPU_FEW for op in ("logsumexp", "score")),
            *variants(large),
            Case(HOST, "cross_entropy", *GPU_SMALL, Target(2.5, "eager")),
        ]
    return [case._replace(compiled=case.compiled and not quick) for case in cases]


def shape_cases(device: str, shape: Shape) -> list[Case]:
    """The main cases at a shape of the user's own."""
    if device == "cpu":
        return cpu(shape)
    if shape.rows <= FEW_ROWS:
        return [few(op, shape) for op in ("logsumexp", "score")]
    return gpu(shape)


def gpu(shape: Shape) -> list[Case]:
    aligned = shape.vocab * ITEMSIZE[shape.dtype] % 16 == 0
    stream = Target(1.06 if aligned else 1.15, "floor")
    return [
        # The two that compile to much the same are not compiled: starting the compiler takes long.
        *(Case(FORWARD, op, *shape, stream, compiled=op == "cross_entropy") for op in OPS),
        Case(BACKWARD, "cross_entropy", *shape, stream),
        Case(INPLACE, "cross_entropy", *shape, Target(1.15, "floor")),
    ]


def cpu(shape: Shape) -> list[Case]:
    no_slower = Target(1.15, "eager") if shape == CPU_LARGE else None
    return [
        *(Case(FORWARD, op, *shape, compiled=False) for op in OPS),
        Case(BACKWARD, "cross_entropy", *shape, no_slower),
        Case(INPLACE, "cross_entropy", *shape),
    ]


def few(op: str, shape: Shape) -> Case:
    return Case(FEW, op, *shape, Target(1.3, "few rows"), compiled=False)


def variants(shape: Shape) -> list[Case]:
    half, option = Target(0.55, "plain"), Target(1.10, "plain")
    return [
        *(Case(FORWARD, "cross_entropy", *shape, half, variant) for variant in HALF),
        *(Case(BACKWARD, "cross_entropy", *shape, option, variant) for variant in OPTIONS),
        Case(BACKWARD, "score", *shape, option, "entropy"),
    ]


def parse_shape(text: str) -> tuple[int, int]:
    """'8192x128256' as (8192, 128256)."""
    rows, _, vocab = text.lower().replace("×", "x").partition("x")
    if not (rows.isdigit() and vocab.isdigit() and int(rows) and int(vocab)):
        raise ValueError(f"--shape must be ROWSxVOCAB, as in 8192x128256, got {text!r}.")
    return int(rows), int(vocab)
