"""A case as plain data, and the tensors that follow from it."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.sizes import DEVICE

SCRIPT = """\
# PYTHONPATH=. python this.py, in the root of the repository
from tests.differential.case import Case
from tests.differential.check import check

check({case!r})
"""


@dataclass(frozen=True)
class Case:
    function: str  # a name in functions.FUNCTIONS
    source: str = "tensor"  # a name in sources.SOURCES
    impl: str = "eager"
    seed: int = 0
    lead: tuple[int, ...] = (3,)
    vocab: int = 5
    dtype: str = "float32"
    values: str = "plain"  # a name in sources.VALUES
    arguments: dict[str, str] = field(default_factory=dict)  # the kind of each that is given
    bad: str | None = None  # the argument, if any, whose kind is a bad one

    def script(self) -> str:
        """A program that runs this case alone."""
        return SCRIPT.format(case=self)

    def make(self, what: str) -> "Maker":
        return Maker(self, what)


class Maker:
    """Makes the tensors of one argument: the same from the same case, whatever else is in it."""

    def __init__(self, case: Case, what: str):
        self.case, self.lead, self.vocab = case, case.lead, case.vocab
        self.dtype = getattr(torch, case.dtype)
        self.generator = torch.Generator().manual_seed(case.seed ^ zlib.crc32(what.encode()))

    @property
    def slots(self) -> int:
        """K of ids (..., K), the same for all arguments of the case."""
        return 1 + self.case.seed % 4

    def kind(self, argument: str) -> str | None:
        return self.case.arguments.get(argument)

    def rand(self, shape, low: float = 0.0, high: float = 1.0, dtype=torch.float32) -> Tensor:
        t = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return t.to(DEVICE, dtype)

    def rows(self, low: float = 0.0, high: float = 1.0, dtype=torch.float32) -> Tensor:
        return self.rand(self.lead, low, high, dtype)

    def normal(self, *shape: int, dtype=None) -> Tensor:
        """Quarters in [-2, 2]: exact in every dtype, and so are products and short sums."""
        t = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return ((t * 4).round() / 4).clamp(-2, 2).to(DEVICE, dtype or self.dtype)

    def integers(self, shape, high: int, dtype=torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(DEVICE, dtype)

    def some(self, shape, share: float = 0.4) -> Tensor:
        """Which ones, as bools."""
        return self.rand(shape) < share

    def full(self, shape, value: Any, dtype=None) -> Tensor:
        return torch.full(shape, value, device=DEVICE, dtype=dtype)
