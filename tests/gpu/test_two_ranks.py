"""A vocabulary over two processes that share one GPU, by gloo on its tensors and the kernels.

Without a GPU, on the CPU; test_shard_ranks.py has more cases there.
"""

import pytest
import test_shard_ranks as ranks
from sizes import sized

NAMES = sized(ranks.SHORT, ("cross_entropy", "score"))


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(2, f"on_the_device({NAMES})")


@pytest.mark.parametrize("name", ranks.on_the_device(NAMES))
def test_as_one_process(name, outcomes):
    for rank, found in enumerate(outcomes):
        far = found[name]
        assert not isinstance(far, str), f"rank {rank}: {far}"
        assert far < 2e-5, f"rank {rank}"
