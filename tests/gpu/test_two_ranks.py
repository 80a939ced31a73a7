"""A vocabulary over two processes that share one GPU, by gloo on its tensors and the kernels.

Without a GPU, on the CPU; tests/parallel/test_rank_processes.py has more cases there.
"""

from tests.support.rank_processes import failures, run
from tests.support.shard_cases import SHORT
from tests.support.sizes import sized

NAMES = sized(SHORT, ("cross_entropy", "score"))


def test_as_one_process():
    outcomes = run(2, "tests.support.shard_cases", f"on_the_device({NAMES})")
    assert not failures(outcomes), "\n".join(failures(outcomes))
