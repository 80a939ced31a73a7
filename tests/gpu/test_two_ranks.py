"""A vocabulary over two processes that share one GPU, by gloo on its tensors and the kernels.

Without a GPU, on the CPU; test_shard_ranks.py has more cases there.
"""

import processes
import pytest
import test_shard_ranks as ranks
from sizes import sized

NAMES = sized(ranks.SHORT, ("cross_entropy", "score"))


@pytest.fixture(scope="module")
def outcomes():
    return processes.run(2, "test_shard_ranks", f"on_the_device({NAMES})")


@pytest.mark.parametrize("name", ranks.on_the_device(NAMES))
def test_as_one_process(name, outcomes):
    processes.passed(name, outcomes)
