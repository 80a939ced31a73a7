"""Draw cases until time is up or one fails."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .case import Case
from .check import check
from .strategies import at_random, smaller


@dataclass
class Tally:
    """Of the cases of one function: drawn, of them different, under the interpreter, bad."""

    drawn: Counter = field(default_factory=Counter)
    different: dict[str, set] = field(default_factory=dict)
    triton: Counter = field(default_factory=Counter)
    heads: Counter = field(default_factory=Counter)
    bad: Counter = field(default_factory=Counter)

    def add(self, case: Case) -> None:
        name = case.function
        self.drawn[name] += 1
        self.different.setdefault(name, set()).add(hash(repr(case)))
        self.triton[name] += case.impl == "triton"
        self.heads[name] += not case.source.startswith("tensor")
        self.bad[name] += case.bad is not None

    def table(self) -> str:
        columns = ("drawn", "different", "heads", "triton", "bad")
        lines = [f"{'':28}" + "".join(f"{column:>11}" for column in columns)]
        for name in self.drawn:
            lines.append(self._line(name, [name]))
        return "\n".join([*lines, self._line("all", list(self.drawn))])

    def _line(self, title: str, names: Sequence[str]) -> str:
        numbers = (
            sum(self.drawn[n] for n in names),
            sum(len(self.different[n]) for n in names),
            *(sum(c[n] for n in names) for c in (self.heads, self.triton, self.bad)),
        )
        return f"{title:28}" + "".join(f"{number:11,}" for number in numbers)


@dataclass
class Failure:
    case: Case  # made as small as it fails
    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}\n\n{self.case.script()}"


def search(name: str, seed: int, count: int, tally: Tally, until: float) -> Failure | None:
    """So many cases of one function, if time allows, or up to the first that fails."""
    for case in itertools.islice(at_random(name, seed), count):
        if time.monotonic() > until:
            break
        tally.add(case)
        if error_of(case) is not None:
            case = smaller(case, lambda less: error_of(less) is not None)
            return Failure(case, error_of(case))
    return None


def error_of(case: Case) -> Exception | None:
    try:
        check(case)
    except Exception as error:
        return error
    return None
