"""What a case is: some work, the floor under its time, and the targets for our own time.

B = rows · vocab · itemsize is one reading of the logits. A forward reads them once, a forward +
backward reads them twice and writes the gradient (3B), in place each element is read and written
once (2B). Bytes over C, the copy bandwidth measured in the same run, are the *floor* that nothing
beats by much. Where bytes aren't what limits the work, a *yardstick* timed beside it is the floor:
the matrix products of a head, say. A CPU has neither: PyTorch's own time is the reference there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

OURS, EAGER, COMPILED = "logitless", "eager", "compile"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = "plain"  # the variant that others are compared with


class Mode:
    """What is run, and by which clock: device time where nothing is said."""

    FORWARD, BACKWARD = "forward", "forward + backward"
    INPLACE = "forward + backward, in place"
    REPLAY, REPLAY_BOTH = "forward, graph replay", "forward + backward, graph replay"
    WALL = "forward + backward, wall time"


class Inputs(NamedTuple):
    """What a contender is called with: f(*leaves, *rows, **options)."""

    leaves: tuple[Tensor, ...]  # (rows, vocab) logits; or hidden states and the weight of a head
    rows: tuple[Tensor, ...]  # each with one entry for each row of logits
    options: dict[str, Any]
    ours: dict[str, Any]  # options that only our own function has


@dataclass(frozen=True)
class Case:
    """One line of the benchmark, run by every contender that can.

    Our time must be at most `targets[of]` times that of each `of`: "floor"; "start + floor", the
    same after 6 µs for starting the kernels; "cross_entropy", our own plain one of the same shape;
    or contenders, of which the fastest counts.
    """

    family: str  # the module that makes its inputs and knows its contenders
    op: str
    mode: str
    shape: tuple[int, ...]  # (rows, vocab), or (rows, width, vocab) of a head
    dtype: str
    variant: str = PLAIN
    given: dict[str, Any] = field(default_factory=dict)  # to the inputs, and to the op as options
    targets: dict[str | tuple[str, ...], float] = field(default_factory=dict)
    cpu_target: float | None = None  # times PyTorch's time
    passes: float = 0.0  # over the logits, for the floor in bytes
    yardstick: str = ""  # instead of bytes: a name in runner.YARDSTICKS
    spare_mib: float | None = None  # what may be allocated beyond the gradients
    alone: bool = False  # without rivals
    compiled: bool = True  # whether torch.compile, slow to start, takes part
    needs: str = ""  # a function that not every version of the library has
    study: bool = False  # about exactness or memory rather than time

    @property
    def rows(self) -> int:
        return self.shape[0] if self.family == "heads" else prod(self.shape[:-1])

    @property
    def floor_bytes(self) -> float:
        return self.passes * self.rows * self.shape[-1] * DTYPES[self.dtype].itemsize

    @property
    def work(self) -> str:
        return self.op if self.variant == PLAIN else f"{self.op}, {self.variant}"

    @property
    def name(self) -> str:
        """All that tells it from other cases."""
        return f"{self.work}, {self.mode}, {size(self.shape)} {self.dtype}"

    def for_cpu(self) -> Case:
        """Without what holds on a GPU alone, and with less to compile: that takes long here."""
        targets = {EAGER: self.cpu_target} if self.cpu_target else {}
        compiled = self.compiled and self.family == "logits"
        return replace(self, targets=targets, passes=0.0, yardstick="", compiled=compiled)


def size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def parse_shape(text: str) -> tuple[int, ...]:
    """'8192x128256' as (8192, 128256)."""
    sizes = text.lower().replace("×", "x").split("x")
    if len(sizes) not in (2, 3) or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape must be ROWSxVOCAB or ROWSxWIDTHxVOCAB, got {text!r}.")
    return tuple(map(int, sizes))


def normal(case: Case, device: str) -> Tensor:
    """Logits of variance 4."""
    return torch.randn(case.shape, dtype=DTYPES[case.dtype], device=device).mul_(2)
