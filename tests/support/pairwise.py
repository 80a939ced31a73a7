"""Few cases in place of a product: every two values of two parameters meet in one of them."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def pairwise(**factors: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """A parametrisation by cases that cover all pairs; a mapping's keys name its values.

    Always the same cases: the first pair that is missing, with values of the other parameters that
    bring the most missing pairs along.
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
    """Tuples of numbers below the sizes, among which every two of two places occur."""
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
                # Of equals, one that the cases so far have had least often.
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
