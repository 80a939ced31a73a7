"""LinearLogits.explain tells what a loss over a head does, and `logitless explain` prints it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.cli import main
from logitless.heads import choose_cut
from logitless.heads.blocks import BlockChunks
from logitless.heads.choose_cut import Cut
from logitless.heads.chunks import Chunks

N, D, V = 48, 16, 320
CUTS = {
    "rows": Cut(20),
    "columns": Cut(N, 128),
    "columns, kept": Cut(N, 128, True),
    "rows and columns": Cut(24, 128),
}


def make(dtype=torch.float32, frozen=False, **how):
    hidden, weight = torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    return ll.LinearLogits(hidden.requires_grad_(), weight.requires_grad_(not frozen), **how)


def gemms_of(call) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / (2 * N * D * V)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_it_tells_what_happens(cut, reduction, monkeypatch):
    source, target, seen = make(), torch.randint(0, V, (N,)), []
    for kind in (Chunks, BlockChunks):
        begin = kind.begin

        def record(self, dtype, begin=begin):
            backend = begin(self, dtype)
            seen.append(self)
            return backend

        monkeypatch.setattr(kind, "begin", record)
    with choose_cut.override(lambda work: cut):
        told = source.explain(reduction)
        done = gemms_of(
            lambda: ll.cross_entropy(source, target, reduction=reduction).sum().backward()
        )
    chunks = seen[0]
    assert told.workspace == chunks.memory.nbytes
    assert (told.chunks, told.blocks) == (len(chunks.slices), len(chunks.blocks))
    assert told.gemms == pytest.approx(done)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", [{"frozen": True}, {"workspace": N * V * 4 + (V << 6)}], ids=str)
def test_frozen_heads_and_kept_logits(how, reduction, monkeypatch):
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 0))
    source, target = make(**how), torch.randint(0, V, (N,))
    call = lambda: ll.cross_entropy(source, target, reduction=reduction).sum().backward()  # noqa: E731
    told = source.explain(reduction)
    assert (
        told.gemms == pytest.approx(gemms_of(call)) == told.floor == (2 if "frozen" in how else 3)
    )


def test_a_small_head(monkeypatch):
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 1 << 20))
    source, target = make(), torch.randint(0, V, (N,))
    told = source.explain("none")
    assert told.way == "materialised"
    assert told.workspace == N * V * 4
    call = lambda: ll.cross_entropy(source, target, reduction="none").sum().backward()  # noqa: E731
    assert told.gemms == pytest.approx(gemms_of(call))


def test_what_it_says_of_a_gpu():
    hidden, weight = (torch.empty(n, 4096, device="meta").bfloat16() for n in (8192, 128257))
    told = ll.LinearLogits(hidden, weight).explain()
    assert (told.way, told.chunks, told.gemms, told.rest) == ("rows", 2, 3, 1)
    assert told.workspace <= 1 << 30
    assert 0.9 < told.share < 1
    told = ll.LinearLogits(hidden, weight, workspace=64 << 20).explain()
    assert told.way == "columns"
    assert told.workspace <= 64 << 20
    assert 3 < told.gemms < 4
    wide = ll.LinearLogits(hidden, weight, logits_dtype=torch.float32).explain(gradient=False)
    assert wide.gemms == 1
    assert 1 << 30 < wide.workspace <= 3 << 29


def test_bad_options():
    with pytest.raises(ValueError, match="reduction must be one of"):
        make().explain("mode")


def test_the_command(capsys):
    assert main(["explain", "--vocab", "128257", "--workspace", "64"]) == 0
    out = capsys.readouterr().out
    assert "8,192 rows × width 4,096 × vocabulary 128,257, bfloat16, reduction 'mean'" in out
    assert "blocks of 4,096 columns of all rows" in out
    assert "64.0 MiB" in out
    assert "1 column of the odd vocabulary" in out
    with pytest.raises(SystemExit, match=r"--rows must be at least 1, got 0\."):
        main(["explain", "--rows", "0"])
