"""benchmarks/compare.py: a library against itself, and its verdicts."""

import importlib
import sys

import pytest

from tests.support.forked import FORKED
from tests.support.paths import ROOT

COMPARE = ROOT / "benchmarks/compare.py"


@pytest.fixture
def compare(monkeypatch):
    """benchmarks/compare.py, whose processes find it too."""
    monkeypatch.syspath_prepend(str(COMPARE.parent))
    return importlib.import_module("compare")


def test_compare_runs_a_library_against_itself(compare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare.multiprocessing, "get_context", lambda method: FORKED)
    root = str(COMPARE.parents[1])
    how = ["--quick", "--device", "cpu", "--op", "gathered_kl", "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", [str(COMPARE), root, root, "--out", str(tmp_path), *how])
    status = compare.main()
    written = (tmp_path / "compare.md").read_text()
    assert written in capsys.readouterr().out
    line = next(line for line in written.splitlines() if "gathered_kl" in line)
    case, *times = line.strip("| ").split(" | ")
    assert case == "gathered_kl, forward + backward, 2×64×64 fp32"
    assert all(float(ms) > 0 for ms in times[:4])
    assert status == ("slower" in line)  # by noise: nothing is said of that here


def test_compare_calls_slower_what_is_beyond_the_noise(compare):
    timed = {"ms": 1.0, "extra_mib": 1.0, "status": "ok", "note": ""}

    def verdict_of(old, new, again, typical=0.0):
        results = [timed | {"ms": ms} for ms in (old, new, again)]
        return compare.row("case", results, typical)[-1]

    assert verdict_of(1.0, 1.03, 1.0) == "slower"
    assert verdict_of(1.0, 1.03, 1.02) == ""
    assert verdict_of(1.0, 1.03, 1.0, typical=0.02) == ""
    assert verdict_of(1.0, 0.97, 1.0) == "faster"
    fails = timed | {"ms": None, "status": "failed", "note": "out of memory"}
    assert compare.row("case", [timed, fails, timed], 0.0)[-1] == "FAILS: out of memory"
    assert compare.row("case", [fails, timed, fails], 0.0)[-1] == "out of memory"
