"""How cases are drawn, by whatever picks one of several; and made smaller when one fails."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from .case import Case
from .functions import BAD_LOGITS, FUNCTIONS
from .sources import VALUES, logits_of

LEADS = [(3,), (1,), (), (0,), (2, 3), (5,), (2, 0), (2, 1, 2), (4, 2), (9,)]
VOCABS = [5, 1, 2, 3, 8, 17, 33, 64, 75]
DTYPES = ["float32", "bfloat16", "float16", "float64"]
FOR_TRITON = 12  # one case in so many runs under the interpreter, thirty times as slow
BAD = 4  # one case in so many has a bad argument


def draw(name: str, pick: Callable[[Sequence], Any], number: Callable[[], int]) -> Case:
    """A case of one function; `pick` takes one of several, `number` is any."""
    function = FUNCTIONS[name]
    triton = "triton" in function.impls and pick(range(FOR_TRITON)) == FOR_TRITON - 1
    arguments, bad = {}, None
    for argument, kinds in function.arguments.items():
        if kinds.needed or pick((False, True)):
            arguments[argument] = pick(list(kinds.good))
    spoilt = [a for a, kinds in function.arguments.items() if kinds.bad]
    if spoilt and pick(range(BAD)) == BAD - 1:
        bad = pick(spoilt if name == "SparseTargets" else [*spoilt, "logits"])
        arguments[bad] = pick(list(bad_kinds(name, bad)))
    case = Case(
        name,
        impl="triton" if triton else "eager",
        seed=number(),
        lead=pick([d for d in (LEADS[:5] if triton else LEADS) if len(d) >= function.dims]),
        vocab=pick(VOCABS[:7] if triton else VOCABS),
        dtype=pick(DTYPES[:3] if triton else DTYPES),
        values="plain" if pick((True, False)) else pick(list(VALUES)),
        arguments=arguments,
        bad=bad,
    )
    return replace(case, source=pick(sources(case)))


def bad_kinds(name: str, argument: str) -> dict:
    return BAD_LOGITS if argument == "logits" else FUNCTIONS[name].arguments[argument].bad


def sources(case: Case) -> list[str]:
    """Those that the function takes and that can have the case's values."""
    takes = FUNCTIONS[case.function].sources
    return [source for source in logits_of(case) if takes is None or source in takes]


@st.composite
def cases(draws, name: str):
    """For hypothesis."""
    return draw(
        name,
        lambda several: draws(st.sampled_from(several)),
        lambda: draws(st.integers(0, 2**31 - 1)),
    )


def at_random(name: str, seed: int) -> Iterator[Case]:
    """Without end; the same from the same seed."""
    some = random.Random(f"{name} {seed}")
    while True:
        yield draw(name, some.choice, lambda: some.randrange(2**31))


def smaller(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The same with whatever can be left away while it fails."""
    plain, kept = Case(case.function), list(case.arguments)
    needed = {a for a, kinds in FUNCTIONS[case.function].arguments.items() if kinds.needed}
    tries = [
        *({name: getattr(plain, name)} for name in ("impl", "source", "values", "dtype")),
        *({"lead": lead} for lead in ((1,), (3,))),
        *({"vocab": vocab} for vocab in (2, 5)),
        *({"without": name} for name in kept if name != case.bad and name not in needed),
        *({"seed": seed} for seed in (0, 1)),
    ]
    for change in tries:
        change = dict(change)
        without = change.pop("without", None)
        if without is not None:
            change["arguments"] = {k: v for k, v in case.arguments.items() if k != without}
        less = replace(case, **change)
        if less != case and less.source in sources(less) and fails(less):
            case = less
    return case
