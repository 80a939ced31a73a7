"""A vocabulary over two ranks by the kernels. The ranks are threads, which share the GPU.

tests/parallel/test_shard.py has every call and more ranks, at the same size.
"""

import pytest

from tests.support.calls import CALLS, N, V, normal
from tests.support.meanings import MEANINGS
from tests.support.shard_cases import SHORT
from tests.support.shards import close, on_shards, plainly


@pytest.mark.parametrize("name", SHORT)
def test_as_one_process(name):
    x = normal(N, V, seed=1) * 2
    got, d_got, _ = on_shards(CALLS[name], x, (20, 17))
    want, torchs = (plainly(MEANINGS[name], t) for t in (x.double(), x))
    for a, b, c in zip((*got, d_got), (*want[0], want[1]), (*torchs[0], torchs[1]), strict=True):
        close(a, b, c)
