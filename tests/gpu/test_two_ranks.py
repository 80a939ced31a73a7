"""A vocabulary over two processes that share one GPU, by gloo on its tensors and the kernels.

Without a GPU, on the CPU; tests/parallel/test_rank_processes.py has more cases there.
"""

import pytest

from tests.support.rank_processes import passed, run
from tests.support.shard_cases import SHORT, on_the_device
from tests.support.sizes import sized

NAMES = sized(SHORT, ("cross_entropy", "score"))


@pytest.fixture(scope="module")
def outcomes():
    return run(2, "tests.support.shard_cases", f"on_the_device({NAMES})")


@pytest.mark.parametrize("name", on_the_device(NAMES))
def test_as_one_process(name, outcomes):
    passed(name, outcomes)
