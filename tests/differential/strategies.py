"""How hypothesis draws cases, and makes one that fails smaller."""

from dataclasses import replace

from hypothesis import strategies as st

from .case import Case
from .functions import BAD_LOGITS, FUNCTIONS
from .sources import VALUES, logits_of

LEADS = [(3,), (1,), (), (0,), (2, 3), (5,), (2, 0), (2, 1, 2), (4, 2), (9,)]
VOCABS = [5, 1, 2, 3, 8, 17, 33, 64, 75]
DTYPES = ["float32", "bfloat16", "float16", "float64"]
FOR_TRITON = 12  # one case in so many runs under the interpreter, thirty times as slow
BAD = 4  # one case in so many has a bad argument


@st.composite
def cases(draw, name: str) -> Case:
    """Cases of one function."""

    def pick(several):
        return draw(st.sampled_from(several))

    function = FUNCTIONS[name]
    triton = "triton" in function.impls and pick(range(FOR_TRITON)) == FOR_TRITON - 1
    arguments, bad = {}, None
    for argument, kinds in function.arguments.items():
        if kinds.needed or pick((False, True)):
            arguments[argument] = pick(list(kinds.good))
    spoilt = [a for a, kinds in function.arguments.items() if kinds.bad]
    if spoilt and pick(range(BAD)) == BAD - 1:
        bad = pick(spoilt if name == "SparseTargets" else [*spoilt, "logits"])
        arguments[bad] = pick(list(BAD_LOGITS if bad == "logits" else function.arguments[bad].bad))
    case = Case(
        name,
        impl="triton" if triton else "eager",
        seed=draw(st.integers(0, 2**31 - 1)),
        lead=pick([d for d in (LEADS[:5] if triton else LEADS) if len(d) >= function.dims]),
        vocab=pick(VOCABS[:7] if triton else VOCABS),
        dtype=pick(DTYPES[:3] if triton else DTYPES),
        values="plain" if pick((True, False)) else pick(list(VALUES)),
        arguments=arguments,
        bad=bad,
    )
    sources = [s for s in logits_of(case) if function.sources is None or s in function.sources]
    return replace(case, source=pick(sources))
