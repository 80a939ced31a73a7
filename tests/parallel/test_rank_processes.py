"""A vocabulary over 2, 3 and 4 processes gives what one process gives: by gloo, on one machine.

test_shard.py has more cases, over ranks that are threads.
"""

import pytest

from tests.support.rank_processes import WORLD, passed, run
from tests.support.shard_cases import cases


@pytest.fixture(scope="module")
def outcomes():
    return run(WORLD, "tests.support.shard_cases", "cases()")


@pytest.mark.parametrize("name", cases())
def test_as_one_process(name, outcomes):
    passed(name, outcomes)
