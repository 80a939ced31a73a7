"""Tests that the cases of pairwise.py contain every pair of values."""

import itertools

import pytest

from tests.support.pairwise import covering


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [3, 2, 2], [10, 3, 3], [7, 4, 3, 2, 2]])
def test_every_pair_occurs(sizes):
    cases = covering(sizes)
    for i, j in itertools.combinations(range(len(sizes)), 2):
        pairs = {(case[i], case[j]) for case in cases}
        assert pairs == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert len(cases) <= len(list(itertools.product(*map(range, sizes))))
