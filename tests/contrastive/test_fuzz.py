"""Random calls of contrastive losses, over sizes, dtypes, options and backends."""

import hypothesis
import torch
from hypothesis import strategies as st

import logitless as ll
from logitless.kernels import config
from tests.support.contrastive import assert_right, embeddings
from tests.support.sizes import DEVICE

DTYPES = {"eager": (torch.float64, torch.float32, torch.bfloat16),
          "triton": (torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip


@hypothesis.settings(
    max_examples=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
@hypothesis.given(st.data())
def test_random_calls(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    torch.manual_seed(data.draw(st.integers(0, 1000)))
    name, impl = draw("contrastive", "sigmoid_contrastive"), draw("eager", "triton")
    dtype = draw(*DTYPES[impl])
    n = data.draw(st.integers(1, 40))
    symmetric = name == "contrastive" and draw(True, False)
    m = n if symmetric else n + data.draw(st.integers(0, 20))
    how = {"reduction": draw("mean", "sum", "none")}
    if name == "contrastive":
        how["symmetric"] = symmetric
    if not symmetric and draw(True, False):
        how["positives"] = torch.randint(
            0, m, (n,), device=DEVICE, dtype=draw(torch.int32, torch.int64)
        )
        if name == "contrastive" and draw(True, False):
            how["positives"][: n // 2] = -100
    if name == "contrastive" and draw(True, False):
        how["mask"] = torch.rand(n, m, device=DEVICE) < 0.3
    if name == "contrastive" and draw(True, False):
        how["labels"] = tuple(torch.randint(0, 6, (size,), device=DEVICE) for size in (n, m))
    full = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = {"scale": torch.tensor(draw(0.0, 1.0, 4.0, -3.0), device=DEVICE, dtype=full)}
    if name == "sigmoid_contrastive":
        numbers["bias"] = torch.tensor(draw(0.0, -4.0), device=DEVICE, dtype=full)
    tiles = {"block_v": draw(16, 32, 64), "block_n": draw(8, 16), "span": draw(16, 48)}
    a, b = embeddings(n, m, dtype, DEVICE, width=draw(3, 8, 24))
    with ll.impl(impl), config.override(**tiles, num_warps=draw(4, 8)):
        assert_right(
            name, a, b, numbers=tuple(numbers), workspace=draw(None, 1000, 6000), **how, **numbers
        )
