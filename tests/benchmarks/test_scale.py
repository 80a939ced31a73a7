"""benchmarks/scale.py: what a rank costs."""

import pytest

from benchmarks import scale


def test_a_plot(tmp_path, capsys):
    out = tmp_path / "plot.png"
    scale.main(["--tp", "12", "--plot", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2 + 5  # 1, 2, 4, 8 and 12 ranks
    assert "Computed, not measured: the cost of forward and backward on each of" in printed.err
    assert " 8,192 tokens, vocabulary 128,256, " in printed.err


def test_what_it_refuses():
    with pytest.raises(SystemExit, match=r"--tp must be at least 1, got 0\."):
        scale.main(["--tp", "0"])


def test_the_parts_of_a_rank():
    """By hand: 1,000 rows of 100 columns of 10."""
    gpu = scale.Gpu(flops=1.0, copy=1.0, link=1.0, network=1.0, node=8, latency=0.5)
    alone, shared = (scale.cost(1000, 100, 10, tp, gpu) for tp in (1, 4))
    assert alone.products == 3 * 2 * 1000 * 10 * 100
    assert alone.loss == 3 * 1000 * 100 * 2
    assert alone.gather == alone.reduce == 0
    assert shared.products == alone.products / 4
    assert shared.gather == 0.5 + 3 * 1000 * 3 * 4
    assert shared.reduce == 0.5 + 2 * 3 / 4 * 1000 * 10 * 2
