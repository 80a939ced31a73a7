"""How the logits of a head are cut, and where their gradient is written."""

import pytest
import torch

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Work, choose, kept_blocks, layout, spare_rows
from logitless.kernels import config

H200 = [(8192, 4096, 128256), (8192, 2048, 151936), (16384, 2304, 256000)]
MIB = 1 << 20


def work(rows, width, vocab, **how):
    given = {"itemsize": 2, "wide": False, "merges": True, "gemms": 1, "sums": True, "keeps": True}
    return Work(rows, vocab, width, **(given | how))


@pytest.mark.parametrize("shape", H200)
def test_which_way_is_chosen(shape):
    """Whole rows by default and where many fit; columns of all rows in 64 MiB."""
    rows = shape[0]
    for workspace in (None, 1024 * MIB, 512 * MIB):
        assert choose(work(*shape), workspace, "cuda").columns is None
    small = choose(work(*shape), 64 * MIB, "cuda")
    assert small.rows == rows
    assert small.rows * small.columns * 2 <= 64 * MIB
    assert small.kept
    assert choose(work(*shape), 64 * MIB, "cpu").columns is None
    assert choose(work(*shape, merges=False), 64 * MIB, "cuda").columns is None
    forward = choose(work(*shape, gemms=0, sums=False, keeps=False), 32 * MIB, "cuda")
    assert forward.columns is not None


@pytest.mark.parametrize("shape", H200)
def test_sums_in_the_weights_dtype(shape):
    """They cost half: of 128 MiB whole rows are cut then, and columns with sums in fp32."""
    rows, width, vocab = shape
    cuts = []
    for accumulate in ("auto", "weight"):
        h, w = (torch.empty(n, width, device="meta", dtype=torch.bfloat16) for n in (rows, vocab))
        head = ll.LinearLogits(h, w, workspace=128 * MIB, accumulate=accumulate)
        cuts.append(choose(head.head.work(True, gemms=1, sums=True, keeps=True), 128 * MIB, "cuda"))
    by_columns, by_rows = cuts
    assert by_columns.columns is not None
    assert by_rows.columns is None


@pytest.mark.parametrize(
    ("width", "vocab", "on_chip"),
    [(64, 10_000_000, True), (128, 1 << 20, True), (256, 32768, True), (256, 1 << 18, False),
     (512, 32768, False)],
)  # fmt: skip
def test_narrow_heads_stay_on_the_chip(width, vocab, on_chip, monkeypatch):
    """16-bit heads on a GPU, for losses of merged statistics and few ids, in any workspace."""
    monkeypatch.setattr(choose_cut, "ON_CHIP_VOCAB", {128: 1 << 31, 256: 1 << 16})
    choose = choose_cut.choose.__wrapped__  # without the cache
    narrow = work(8192, width, vocab, narrow=True)
    for workspace in (None, 64 * MIB):
        assert choose(narrow, workspace, "cuda").on_chip == on_chip
        assert not choose(narrow, workspace, "cpu").on_chip
    for other in ({"merges": False}, {"narrow": False}, {"itemsize": 4}, {"ids": 512}):
        assert not choose(narrow._replace(**other), None, "cuda").on_chip


def test_a_long_batch_is_cut_both_ways():
    cut = choose(work(131072, 4096, 128256), 64 * MIB, "cuda")
    assert cut.columns is not None
    assert cut.rows < 131072
    assert cut.rows * cut.columns * 2 <= 64 * MIB


@pytest.mark.parametrize(("rows", "width"), [(21, 8), (8, 8), (5, 16), (100, 3)])
def test_what_waits_is_never_overwritten(rows, width):
    """A block's logits end before the rows of the gradient that are written until it is used."""
    vocab, columns = 103, 8
    kept = kept_blocks(rows, vocab, width, columns)
    assert len(set(kept.values())) == len(kept)
    for block, place in kept.items():
        assert (place + 1) * rows * columns <= block * columns * width
    assert len(kept) <= 12
    assert bool(kept) == (rows <= 12 * width)


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (1, 50), (2, 2), (3, 3), (64, 70), (500, 501)])
def test_the_gradient_never_overtakes_the_logits(rows, most):
    """Both in one memory: what a step writes was read in a step before."""
    size, parts = layout(rows, most, True)
    assert size <= most + spare_rows(most)
    for count in {rows, max(rows - 3, 1)}:
        done = 0
        for part in parts:
            here = max(min(part.rows.stop, count) - part.rows.start, 0)
            assert part.at + 2 * (part.rows.stop - part.rows.start) == size
            for step in (step for step in part.steps if step.start < here):
                assert part.rows.start + step.start == done
                done = part.rows.start + min(step.stop, here)
                assert done <= part.at + 2 * step.start  # where a row in fp32 takes two
        assert done == count


@pytest.mark.parametrize(
    ("vocab", "itemsize", "gib"), [(128256, 2, 1), (1 << 19, 2, 1), (1 << 20, 2, 2), (10**7, 2, 2)]
)
def test_the_default_workspace_of_large_vocabularies(vocab, itemsize, gib):
    """The workspace holds 1,024 rows, if twice the usual workspace does."""
    assert choose_cut.default_workspace(vocab * itemsize, "cuda") == gib << 30
    assert choose_cut.default_workspace(vocab * itemsize, "cpu") == choose_cut.WORKSPACE["cpu"]
    assert choose(work(8192, 512, vocab), None, "cuda").rows * vocab * itemsize <= gib << 30


@pytest.mark.parametrize(
    ("rows", "splits"), [(2048, 33), (8192, 4), (128, 128), (16, 128), (65536, 1)]
)
def test_splits_of_narrow_heads_fill_the_gpu(rows, splits):
    cut = config.Config(64, 4, block_n=128, stages=4)
    assert config.narrow_splits.__wrapped__(cut, rows, 1 << 20, 64, 132).splits == splits
    few = config.narrow_splits.__wrapped__(cut, rows, 1 << 20, 64, 132, 4 * rows * 64)
    assert few.splits == 1
