"""JSD and TVD of long rows, whose parts are read by programs that wait for each other."""

import pytest
import torch

from logitless.kernels import config
from tests.support.dense_teachers import OPTIONS, make, naive, ours
from tests.support.inputs import on
from tests.support.laws import assert_as_good_as_torch
from tests.support.pairwise import pairwise


def by_parts(x, t, reading, kind, beta, span):
    """The kernels that share a row, whose programs wait for each other, on any device.

    The interpreter runs one program after another. So that none waits in vain, a first run finds a
    word published by everyone, if only that it saw nothing; the second finds what the first left.
    """
    from logitless.kernels import jsd_tvd_fwd
    from logitless.kernels.layout import rows_of
    from logitless.kernels.program_exchange import EMPTY

    (x, rows), (t, t_rows) = rows_of(x), rows_of(t)
    parts = config.ceil_div(rows.vocab, span)
    cut = config.Config(block_v=32, num_warps=1, span=span)
    options = (reading.softcap, beta, reading.ignore_index)
    first, second = jsd_tvd_fwd._shared_plan(
        rows, t_rows, parts, (reading.temperature,), options, kind, cut
    )
    value, state, sums = (
        torch.full((rows.count, *shape), torch.nan, device=x.device)
        for shape in ((), (5,), (parts, jsd_tvd_fwd.SUMS_OF_SPLIT.value))
    )
    words = torch.full((rows.count, 2, parts), EMPTY.value, device=x.device)
    for _ in range(2):
        first(x, t, reading.label, state, sums, words)
    second(sums, reading.label, value, state)
    return value, state


@pairwise(
    rows={"75 bf16": (75, torch.bfloat16), "96 fp32": (96, torch.float32)},
    span=[32, 48, 128],
    softcap=[None, 4.0],
    masked=[False, True],
    kind=["jsd", "tvd", "skewed_forward"],
)
def test_parts_of_a_row_add_up(rows, span, softcap, masked, kind, device):
    """To the same as one program finds, with parts that are ragged, empty, of -inf, or masked."""
    from logitless import kernels
    from logitless.contract import Pair, Reading

    vocab, dtype = rows
    x, t = make((kind, 0.3), rows=(7,), vocab=vocab, dtype=dtype, device=device)
    x[1, :50], t[2, :50], x[3, 40:], t[3, 40:] = [-torch.inf] * 4
    x[4, 60], t[5] = torch.nan, -torch.inf
    reading = Reading(x.shape[-1], temperature=1.7, softcap=softcap)
    if masked:
        label = (torch.arange(7, device=device) < 6).view(torch.int8)
        reading = reading._replace(label=label, ignore_index=0)
    want = kernels.pair_read(x, reading, Pair(t, kind, 0.3))
    got = by_parts(x, t, reading, kind, 0.3, span)
    assert want[0][:4].isfinite().all()
    assert want[0][4:6].isnan().all()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, equal_nan=True)


@pytest.mark.parametrize("loss", [("jsd", 0.3), ("tvd", None)], ids=["jsd", "tvd"])
@pytest.mark.parametrize("how", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_parts_of_a_row_wait_for_each_other(loss, how, impl, device):
    """Three to a row, on a GPU; elsewhere one program is left to do it all."""
    x, t = make(loss, device=device)
    how = on(how, device)
    with config.override(block_v=32, span=32):
        assert_as_good_as_torch(
            lambda x: ours(x, t, loss, **how, reduction="none"),
            lambda x: naive(x, t, loss, **how, reduction="none"),
            x,
            factor=4.0 if isinstance(how.get("temperature"), torch.Tensor) else 2.0,
        )
