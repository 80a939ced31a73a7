"""A vocabulary over 2, 3 and 4 processes gives what one process gives: by gloo, on one machine.

test_shard.py has more cases, over ranks that are threads.
"""

from tests.support.rank_processes import WORLD, failures, run
from tests.support.shard_cases import cases


def test_as_one_process():
    outcomes = run(WORLD, cases)
    assert not failures(outcomes), "\n".join(failures(outcomes))
