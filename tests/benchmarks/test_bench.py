"""`make bench` on a CPU and at toy sizes: that it runs, that it
catches a wrong answer, and that its verdicts follow from the numbers."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from benchmarks.bench import cases, contenders, plots, results, runner
from benchmarks.bench.__main__ import main
from benchmarks.bench.cases import Case, Mode
from benchmarks.bench.contenders import NAMES
from tests.support.paths import ROOT

CASE = Case("logits", "cross_entropy", Mode.BACKWARD, shape="6×101", dtype="fp32")
BRIEF = 1.0  # milliseconds
LARGE = ("8192×128256", "bf16")


def entries(case=CASE, **functions):
    """Results by name for contenders that are one function each."""
    loaded = {name: lambda case, f=f: f for name, f in functions.items()}
    return {r.contender: r for r in runner.run_case(case, loaded, "cpu", BRIEF)}


def test_bench_writes_a_report_plots_and_json(tmp_path, capsys, monkeypatch):
    shapes = ["--shape", "6x601", "--shape", "6x16x601"]
    how = ["--quick", "--against", "eager", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["--family", "logits", "--family", "heads", *shapes, *how]) == 0
    assert "cross_entropy" in capsys.readouterr().out
    (stored,) = tmp_path.glob("bench-logits-heads-*.json")
    document = json.loads(stored.read_text())
    rows = document["rows"]
    assert {row["contender"] for row in rows} == {"logitless", "eager"}
    assert {row["family"] for row in rows} == {"logits", "heads"}
    assert {row["mode"] for row in rows} == {Mode.FORWARD, Mode.BACKWARD, Mode.INPLACE}
    assert all(row["status"] == "ok" and row["ms"] > 0 for row in rows), rows
    assert all(row["floor_ms"] is None for row in rows)  # a CPU has no ceiling here
    assert {row["eager_x"] for row in rows if row["contender"] == "eager"} == {1.0}
    assert document["versions"]["torch"] == torch.__version__

    parts = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, in_it in zip(parts, (True, False), strict=True):
        part = [row for row in rows if (row["family"] == "heads") == in_it]
        path.write_text(json.dumps(document | {"rows": part}))
    monkeypatch.setattr(plots, "draw", lambda bars, title, line, path: path.touch())
    both = ["--from-json", str(parts[1]), "--from-json", str(parts[0])]
    assert main([*both, "--out", str(tmp_path / "again")]) == 0
    made = {path.name: path for path in (tmp_path / "again").iterdir()}
    report_name = f"bench-{document['date'][:10]}"
    drawn = {"speed.png", "memory.png", "speed-heads.png", "memory-heads.png"}
    assert made.keys() == drawn | {f"{report_name}.json", f"{report_name}.md"}
    assert json.loads(made[f"{report_name}.json"].read_text()) == document
    written = (tmp_path / f"{stored.stem}.md").read_text()
    assert made[f"{report_name}.md"].read_text() == written
    assert "| cross_entropy | 6×601 | fp32 | logitless |" in written
    assert "| cross_entropy, 64 MiB | 6×16×601 | fp32 | logitless |" in written


@pytest.mark.parametrize(
    "arguments",
    [["--shape", "8192"], ["--op", "nothing"], ["--from-json", "nowhere"]],
)
def test_bench_names_a_senseless_argument(arguments, capsys):
    assert main(["--device", "cpu", "--quick", *arguments]) == 2
    assert "bench:" in capsys.readouterr().err


def test_a_run_in_two_parts_is_one_result(tmp_path, capsys):
    how = ["--family", "teachers", "--op", "capture_topk", "--shape", "6x601", "--quick"]
    how += ["--against", "eager", "--device", "cpu", "--out", str(tmp_path), "--commit", "this"]
    assert main([*how, "--minutes", "0"]) == 0
    (stored,) = tmp_path.glob("*.json")
    part = json.loads(stored.read_text())
    assert part["left"] == 2
    failed = {**part["rows"][0], "variant": "K=8", "status": "failed", "ms": None}
    stored.write_text(json.dumps(part | {"rows": [*part["rows"], failed]}))  # to be run again
    assert "2 cases are left for --resume" in stored.with_suffix(".md").read_text()
    assert main([*how, "--resume", str(stored)]) == 0
    whole = json.loads(stored.read_text())
    assert whole["left"] == 0
    assert whole["date"] == part["date"]
    assert [row["ms"] for row in whole["rows"][:2]] == [row["ms"] for row in part["rows"]]
    ours = [row["variant"] for row in whole["rows"] if row["contender"] == "logitless"]
    assert ours == ["K=64", "K=8", "K=256"]
    capsys.readouterr()
    assert main([*how, "--resume", str(stored), "--commit", "another"]) == 2
    assert "commit must be this in every part, got another." in capsys.readouterr().err


def test_a_result_of_another_version_is_refused(tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"rows": [{"op": "cross_entropy", "reps": 3}]}')
    assert main(["--from-json", str(tmp_path / "old.json")]) == 2
    assert "of this version" in capsys.readouterr().err


def frozen_weight(h, W, target):
    return F.cross_entropy(F.linear(h, W.detach()) + 0 * W.sum(), target)


def test_a_wrong_or_failing_contender_is_reported_and_not_timed():
    def liar(x, t):
        return F.cross_entropy(x, t) * 1.01

    def wrong_gradient(x, t):
        return F.cross_entropy(x, t).detach() + (x * 0).sum()

    def not_a_number(x, t):
        return F.cross_entropy(x, t) * float("nan")

    def failing(x, t):
        raise RuntimeError("no kernel\nfor this")

    wrong = {"liar": liar, "wrong_gradient": wrong_gradient, "not_a_number": not_a_number}
    found = entries(right=F.cross_entropy, failing=failing, **wrong)
    assert found["right"].status == "ok"
    assert found["right"].ms > 0
    for name in wrong:
        assert found[name].status == "wrong"
        assert found[name].ms is None
        assert found[name].note
    assert found["not_a_number"].note == "error nan, allowed 1e-03"
    assert (found["failing"].status, found["failing"].ms) == ("failed", None)
    assert found["failing"].note == "RuntimeError: no kernel for this"
    case = dataclasses.replace(CASE, family="heads", shape="6×8×101")
    (result,) = entries(case, rival=frozen_weight).values()
    assert (result.status, result.value_error < 1e-5) == ("wrong", True)


def test_ours_is_held_to_more_than_rivals():
    """To a tenth of what a rival may be off, and it may not overwrite the logits in a forward."""

    def off(x, t):
        return F.cross_entropy(x, t) * (1 + 3e-4)

    def overwriting(x, t):
        loss = F.cross_entropy(x.detach(), t)
        x.data.zero_()
        return loss

    forward = dataclasses.replace(CASE, mode=Mode.FORWARD)
    for case, f, note in ((CASE, off, ""), (forward, overwriting, results.OVERWRITES)):
        found = entries(case, logitless=f, rival=f)
        assert (found["logitless"].status, found["rival"].status) == ("wrong", "ok")
        assert found["rival"].note == note


def shrunk(case: Case) -> Case:
    """A case of a GPU as a CPU can run it: small, and without a GPU's clocks."""
    shape = {"heads": "40×16×601", "teachers": "12×601", "logits": "300×601"}[case.family]
    shape = "2×10×64" if case.op == "gathered_kl" else shape
    mode = Mode.BACKWARD if case.mode == Mode.WALL else case.mode
    options = {name: 2**14 if name == "workspace" else x for name, x in case.options.items()}
    return dataclasses.replace(case, shape=shape, dtype="fp32", mode=mode, options=options)


@pytest.mark.parametrize("family", ["logits", "teachers", "heads"])
def test_every_case_of_a_gpu_agrees_with_fp64_at_a_small_size(family, monkeypatch):
    monkeypatch.setattr(runner.memory, "extra_memory", lambda *_: 0)  # takes the longest
    loaded, _ = contenders.load(["logitless", "eager"], "cpu")
    small = map(shrunk, cases.choose("cuda", families=[family]))
    different = {f"{case.op} {case.mode} {case.options}": case for case in small}
    assert len(different) > 7
    for case in different.values():
        for r in runner.run_case(case, loaded, "cpu", BRIEF):
            assert r.status == "ok", (case.name, r)
            assert r.ms > 0
            assert r.value_error < 2e-5, (case.name, r)
            assert (r.grad_error is None) == (case.mode in (Mode.FORWARD, Mode.REPLAY))
            assert r.grad_error is None or r.grad_error < 2e-5, (case.name, r)


def judged(case, **times):
    """Our result in the first of some cases with these times, at a copy bandwidth of 4 TB/s."""
    ran = case if isinstance(case, list) else [(case, times)]
    found = [results.blank(c, name, ms=ms) for c, t in ran for name, ms in t.items()]
    results.judge([c for c, _ in ran], found, 4.0)
    return next(r for r in found if r.contender == "logitless")


def test_verdicts_follow_from_bytes_and_bandwidth():
    # 8192 × 128256 bf16 at 4 TB/s: one reading takes 0.525 ms, and three 1.576.
    forward, _, _, both, _ = (case.at(*LARGE) for case in cases.STREAM)
    found = judged(forward, logitless=0.54, eager=2.0)
    assert (found.reached, found.target) == (True, "≤ 1.06 × B/C")
    assert found.floor_ms == pytest.approx(0.5253, rel=1e-3)
    assert found.eager_x == pytest.approx(0.27)
    found = judged(both, logitless=1.70)
    assert found.reached is False
    assert found.tbps == pytest.approx(3 * 2.1013 / 1.70, rel=1e-3)
    assert results.outcome([found])[1].endswith("1.700 ms (our target was 1.671 ms)")
    few = cases.FEW[0].at("128×128256", "bf16")
    assert judged(few, logitless=0.0166).limit_ms == pytest.approx(0.006 + 1.3 * 0.008208, rel=1e-3)


STORED = sorted((ROOT / "benchmarks/results/h200").glob("bench-*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_group_of_bars_has_pytorch(path):
    rows = [r for r in results.read(path)["rows"] if r.ms and r.contender in NAMES]
    together = Counter(r.name for r in rows)
    shown = [r for r in rows if plots.is_shown(r, together[r.name])]
    for bars in (plots.speeds(shown), plots.memory(shown)):
        assert bars
        groups = {(bar.panel, bar.group) for bar in bars}
        assert {(bar.panel, bar.group) for bar in bars if bar.name == "eager"} == groups
    assert {bar.value for bar in plots.speeds(shown) if bar.name == "eager"} == {1.0}
