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
from typing import Any

import torch

OURS, EAGER, COMPILED = "logitless", "eager", "compile"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = "plain"  # the variant that others are compared with
Shape = tuple[int, ...]


class Mode:
    """What is run, and by which clock: device time where nothing is said."""

    FORWARD, BACKWARD = "forward", "forward + backward"
    INPLACE = "forward + backward, in place"
    REPLAY, REPLAY_BOTH = "forward, graph replay", "forward + backward, graph replay"
    WALL = "forward + backward, wall time"


@dataclass(frozen=True)
class Case:
    """One line of the benchmark, run by every contender that can.

    Our time must be at most `targets[of]` times that of each `of`: "floor"; "start + floor", the
    same after 6 µs for starting the kernels; "cross_entropy", our own plain one of the same shape;
    contenders, of which the fastest counts; or "cpu", PyTorch where that is the device.
    """

    family: str
    op: str
    mode: str
    variant: str = PLAIN
    given: dict[str, Any] = field(default_factory=dict)  # to the inputs, and to the op as options
    targets: dict[str | tuple[str, ...], float] = field(default_factory=dict)
    passes: float = 0.0  # over the logits, for the floor in bytes
    yardstick: str = ""  # instead of bytes: a name in runner.YARDSTICKS
    spare_mib: float | None = None  # what may be allocated beyond the gradients
    alone: bool = False  # without rivals
    compiled: bool = True  # whether torch.compile, slow to start, takes part
    study: bool = False  # about exactness or memory rather than time
    shape: Shape = ()  # (rows, vocab), or (rows, width, vocab) of a head
    dtype: str = ""

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

    def at(self, shape: Shape, dtype: str) -> Case:
        """Rows that don't all start at a multiple of 16 bytes may take longer."""
        aligned = self.family == "heads" or shape[-1] * DTYPES[dtype].itemsize % 16 == 0
        least = {} if aligned or "floor" not in self.targets else {"floor": 1.15}
        targets = self.targets | {of: max(x, self.targets[of]) for of, x in least.items()}
        return replace(self, shape=shape, dtype=dtype, targets=targets)

    def on_cpu(self) -> Case:
        """One clock, no floor, and less to compile: that takes long here."""
        mode = Mode.BACKWARD if self.mode in (Mode.WALL, Mode.REPLAY_BOTH) else self.mode
        targets = {EAGER: self.targets["cpu"]} if "cpu" in self.targets else {}
        compiled = self.compiled and (self.family, mode) == ("logits", Mode.BACKWARD)
        how = {"mode": mode, "targets": targets, "compiled": compiled}
        return replace(self, passes=0.0, yardstick="", **how)


def size(shape: Shape) -> str:
    return "×".join(map(str, shape))
