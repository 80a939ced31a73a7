"""Losses against a dense teacher: rows whose parts several programs read, and what is compiled."""

import importlib.util
import inspect

import pytest
import torch

from logitless import kernels
from logitless.contract import PAIR_STATE, PAIR_SUMS, Pair, Reading
from logitless.kernels import config
from logitless.kernels.layout import rows_of
from logitless.kernels.pairs import backward as pair_bwd
from logitless.kernels.pairs import forward as pair_fwd
from logitless.kernels.pairs import losses as pair_losses
from logitless.kernels.program_exchange import EMPTY
from tests.support.dense_teachers import OPTIONS, make, naive, ours
from tests.support.forked import together
from tests.support.inputs import on
from tests.support.laws import assert_as_good_as_torch
from tests.support.pairwise import pairwise


def by_parts(x, t, reading, kind, beta, span):
    """The kernels that share a row, whose programs wait for each other, on any device.

    The interpreter runs one program after another. So that none waits in vain, a first run finds a
    word published by everyone, if only that it saw nothing; the second finds what the first left.
    """
    (x, rows), (t, t_rows) = rows_of(x), rows_of(t)
    parts = config.ceil_div(rows.vocab, span)
    cut = config.Config(block_v=32, num_warps=1, span=span)
    number, ignored = (reading.temperature,), reading.ignore_index
    first = pair_fwd._plan(
        rows, t_rows, parts, number, reading.vocab, reading.softcap, beta, ignored, kind, False, cut
    )
    finish = pair_fwd._finish_plan(rows.count, parts, number, beta, ignored, kind)
    value, state, sums = (
        torch.full((rows.count, *shape), torch.nan, device=x.device)
        for shape in ((), (PAIR_STATE,), (parts, PAIR_SUMS))
    )
    words = torch.full((rows.count, 2, parts), EMPTY.value, device=x.device)
    for _ in range(2):
        first(x, t, None, reading.label, value, state, sums, words)
    finish(value, state, sums, reading.label)
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


def hashes(kind):
    """What Triton's cache on disk knows of the three kernels of a divergence."""
    from tests.support.aot import recording  # hides GPUs

    for plan in (pair_fwd._plan, pair_fwd._finish_plan, pair_bwd._plan):
        plan.cache_clear()
    x, reading, pair = torch.zeros(2, 64), Reading(64), Pair(torch.zeros(2, 64), kind, 0.5)
    whole = torch.zeros(2, PAIR_STATE)
    with recording() as launches:
        kernels.pair_read(x, reading, pair)
        kernels.pair_finish(whole, whole[:, :3], reading, pair)
        kernels.pair_gradient(x, reading, pair, whole, torch.ones(()))
    return [source.hash() for source, *_ in launches]


def changes_are_seen(_, path):
    before = {kind: hashes(kind) for kind in ("tvd", "jsd")}
    text = inspect.getsource(pair_losses)
    for old, new, changed in (
        ("    return q.e - p.e * scale", "    return p.e - q.e * scale", [True, False, True]),
        ("    value = 0.5 * sums.a", "    value = 1.5 * sums.a", [True, True, False]),
    ):
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location("logitless.kernels.pairs.edited", path)
        edited = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(edited)
        for module in (pair_fwd, pair_bwd):
            module.LOSSES = edited.LOSSES
        found = [a != b for a, b in zip(hashes("tvd"), before["tvd"], strict=True)]
        assert found == changed, old
        assert hashes("jsd") == before["jsd"]


def test_the_cache_on_disk_sees_every_formula(tmp_path):
    """A formula in a struct of constants would not be: an old kernel would run after an upgrade."""
    together(1, changes_are_seen, tmp_path / "edited.py")
