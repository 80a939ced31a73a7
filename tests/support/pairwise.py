"""Few test cases instead of all combinations. Each pair of values of two parameters has a case."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def pairwise(**factors: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """A parametrisation by cases that cover all pairs. The keys of a mapping name its values.

    The cases are the same in every run. Each new case contains the first missing pair. The other
    values of the case are those that cover the most missing pairs.
    """
    named = {
        name: dict(values) if isinstance(values, Mapping) else {str(v): v for v in values}
        for name, values in factors.items()
    }
    keys = [list(values) for values in named.values()]
    cases = [
        pytest.param(
            *(values[keys[i][case[i]]] for i, values in enumerate(named.values())),
            id="-".join(keys[i][case[i]] for i in range(len(keys))),
        )
        for case in covering([len(k) for k in keys])
    ]
    return pytest.mark.parametrize(tuple(named), cases)


def covering(sizes: list[int]) -> list[tuple[int, ...]]:
    """Tuples of numbers below `sizes` that contain all pairs of numbers at all pairs of places."""
    assert len(sizes) > 1, sizes
    places = range(len(sizes))
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(places, 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    cases = []
    while missing:
        i, a, j, b = min(missing)
        case = {i: a, j: b}
        for place in places:
            if place not in case:
                # Among equally good values, the value with the fewest cases so far is chosen.
                case[place] = max(
                    range(sizes[place]),
                    key=lambda v: (
                        len(missing & set(_pairs({**case, place: v}))),
                        -sum(done[place] == v for done in cases),
                    ),
                )
        missing -= set(_pairs(case))
        cases.append(tuple(case[place] for place in places))
    return cases


def _pairs(case: dict[int, int]) -> list[tuple[int, int, int, int]]:
    return [(i, case[i], j, case[j]) for i, j in itertools.combinations(sorted(case), 2)]
