"""`make bench` on a CPU and at toy sizes: that it runs, that it
catches a wrong answer, and that its verdicts follow from the numbers."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from benchmarks.bench import cases, contenders, formulas, plots, results, runner
from benchmarks.bench import clocks as _clocks
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


def test_bench_writes_a_report_plots_and_json(tmp_path, capsys):
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
    both = ["--from-json", str(parts[1]), "--from-json", str(parts[0])]
    assert main([*both, "--out", str(tmp_path / "again")]) == 0
    made = {path.name: path for path in (tmp_path / "again").iterdir()}
    report_name = f"bench-{document['date'][:10]}"
    plots = {"speed.png", "memory.png", "speed-heads.png", "memory-heads.png"}
    assert made.keys() == plots | {f"{report_name}.json", f"{report_name}.md"}
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


def test_a_target_of_one_part_speaks_of_times_in_another():
    plain, half = cases.STREAM[0].at(*LARGE), cases.VARIANTS[0].at(*LARGE)
    first = [results.blank(half, "logitless", ms=0.25)]
    results.judge([half, plain], first, 4.0)
    assert first[0].reached is None
    both = [*first, results.blank(plain, "logitless", ms=0.5)]
    results.judge([half, plain], both, 4.0)
    assert (both[0].reached, both[0].limit_ms) == (True, pytest.approx(0.55 * 0.5))


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


def test_ours_is_held_to_a_tenth_of_what_rivals_may_be_off():
    def off(x, t):
        return F.cross_entropy(x, t) * (1 + 3e-4)

    found = entries(logitless=off, rival=off)
    assert (found["logitless"].status, found["rival"].status) == ("wrong", "ok")


def test_an_id_that_is_not_the_largest_is_wrong():
    def score(x, t):
        *right, argmax = formulas.score(x, t)
        return *right, (argmax + 1) % x.shape[-1]

    case = dataclasses.replace(CASE, op="score", mode=Mode.FORWARD)
    found = entries(case, right=formulas.score, wrong=score)
    assert (found["right"].status, found["wrong"].status) == ("ok", "wrong")


def test_overwriting_the_logits_is_noted_and_wrong_when_it_is_us():
    def overwriting(x, t):
        loss = F.cross_entropy(x.detach(), t)
        x.data.zero_()
        return loss

    forward = dataclasses.replace(CASE, mode=Mode.FORWARD)
    found = entries(forward, logitless=overwriting, rival=overwriting)
    assert (found["rival"].status, found["rival"].note) == ("ok", results.OVERWRITES)
    assert (found["logitless"].status, found["logitless"].note) == ("wrong", results.OVERWRITES)


def shrunk(case: Case) -> Case:
    """A case of a GPU as a CPU can run it: small, and without a GPU's clocks."""
    shape = {"heads": "40×16×601", "teachers": "12×601", "logits": "300×601"}[case.family]
    shape = "2×10×64" if case.op == "gathered_kl" else shape
    mode = Mode.BACKWARD if case.mode == Mode.WALL else case.mode
    options = {name: 2**14 if name == "workspace" else x for name, x in case.options.items()}
    return dataclasses.replace(case, shape=shape, dtype="fp32", mode=mode, options=options)


@pytest.mark.parametrize("family", ["logits", "teachers", "heads"])
def test_every_case_of_a_gpu_agrees_with_fp64_at_a_small_size(family):
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


@pytest.fixture
def gpu_clocks(monkeypatch):
    """The clocks of a GPU as functions that call the work once and tell their name."""
    told = []

    def clock(name, call):
        def tell(*arguments, **options):
            call(*arguments)
            told.append(name)
            return float(len(told))

        monkeypatch.setattr(_clocks, name, tell)

    clock("device_time", lambda prepare, run, budget: run(prepare()))
    clock("graph_time", lambda run, x, budget: run(x))

    def host_times(runs):
        told.extend(["host_times"] * len(runs))
        assert all(run(leaves) is None and leaves[0].grad is not None for run, leaves in runs)
        return [float(len(told))] * len(runs)

    monkeypatch.setattr(_clocks, "host_times", host_times)
    monkeypatch.setattr(_clocks, "synchronises", lambda run, leaves: False)
    made = contenders.inputs
    monkeypatch.setattr(contenders, "inputs", lambda case, device: made(case, "cpu"))
    return told


def test_a_gpu_has_a_clock_for_each_mode(gpu_clocks):
    loaded, _ = contenders.load(["logitless", "eager"], "cpu")
    wanted = {Mode.REPLAY: "graph_time", Mode.REPLAY_BOTH: "graph_time", Mode.WALL: "host_times"}
    for case in cases.choose("cuda", families=["teachers", "logits"], quick=True):
        if case.mode not in wanted and case.variant != "K=64":
            continue
        shape = "2×5×64" if case.op == "gathered_kl" else "5×601"
        small = dataclasses.replace(case, shape=shape, dtype="fp32")
        found = runner.run_case(small, loaded, "cuda", BRIEF)
        assert [r.status for r in found] == ["ok", "ok"], found
        assert gpu_clocks[-2:] == 2 * [wanted.get(case.mode, "device_time")]


def test_a_yardstick_is_timed_before_and_after_ours(gpu_clocks):
    plain = cases.PLAIN_HEAD.at("6×8×101", "fp32")
    loaded, _ = contenders.load(["logitless", "eager"], "cpu")
    gemms, ours, eager = runner.run_case(plain, loaded, "cuda", BRIEF)
    assert (gemms.contender, ours.contender, eager.contender) == ("3 GEMMs", "logitless", "eager")
    assert (gemms.ms, ours.ms, eager.ms) == ((1.0 + 3.0) / 2, 2.0, 4.0)
    assert gemms.note == "1.000 ms before ours, 3.000 after"
    loaded["logitless"] = lambda case: lambda *_: 1 / 0
    gemms, *_ = runner.run_case(plain, loaded, "cuda", BRIEF)
    assert gemms.note == "5.000 ms before eager, 7.000 after"
    ours = {"logitless": contenders.ours}
    (alone,) = runner.run_case(plain, ours, "cuda", BRIEF, checked=False)
    assert (alone.contender, alone.value_error) == ("logitless", None)


def test_reference_is_the_mean_that_pytorch_takes():
    x, target = torch.randn(5, 17, dtype=torch.float64), torch.tensor([3, -100, 0, 16, 9])
    options = {"weight": torch.rand(17), "label_smoothing": 0.2}
    total = formulas.cross_entropy(x, target, **options).sum()
    wanted = F.cross_entropy(x, target, options["weight"].double(), label_smoothing=0.2)
    torch.testing.assert_close(total / formulas.denominator(target, **options), wanted)


def test_the_options_of_the_reference_are_those_of_a_textbook():
    x, target = torch.randn(3, 17, dtype=torch.float64), torch.tensor([3, -100, 16])
    z = 5 * torch.tanh(x / 5) / 0.7
    lse = z.exp().sum(-1).log()
    wanted = lse - z.gather(-1, target.clamp(min=0)[:, None])[:, 0] + 0.1 * lse.square()
    found = formulas.cross_entropy(x, target, softcap=5.0, temperature=0.7, z_loss=0.1)
    torch.testing.assert_close(found, wanted * (target != -100))


def test_asked_shapes_are_run_by_the_clock_that_suits_them():
    def modes(device, shape):
        return {c.mode for c in cases.choose(device, families=["logits"], shapes=[shape])}

    every = {Mode.FORWARD, Mode.BACKWARD, Mode.INPLACE}
    assert modes("cuda", "16x1000") == {Mode.REPLAY}
    assert modes("cuda", "1600x1000") == modes("cpu", "16x1000") == every


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


def test_verdicts_follow_from_what_was_timed_beside():
    forward, half = cases.STREAM[0].at(*LARGE), cases.VARIANTS[0].at(*LARGE)
    found = judged([(half, {"logitless": 0.30}), (forward, {"logitless": 0.54})])
    assert (found.reached, found.limit_ms) == (False, pytest.approx(0.55 * 0.54))
    wall = cases.choose("cuda", families=["logits"])[-2]
    assert judged(wall, logitless=0.19, eager=0.1, compile=0.3, fla=0.2).reached
    assert judged(wall, logitless=0.19, eager=0.1, compile=0.18).reached is False
    place = ("8192×4096×128256", "bf16")
    plain, at_128, at_64, *_ = (
        case.at(*place) for case in cases.workspaces({128: cases.ROOMY, 64: cases.LIGER})
    )
    found = judged(at_128, **{"3 GEMMs": 38.0, "logitless": 47.0})
    assert (found.reached, found.target) == (True, "≤ 1.25 × 3 GEMMs")
    found = judged([(at_64, {"logitless": 53.0}), (plain, {"liger": 54.0})])
    assert (found.reached, found.target) == (True, "≤ liger")


def test_memory_beyond_the_gradients_is_a_target():
    both = cases.STREAM[3].at(*LARGE)
    found = results.blank(both, "logitless", ms=1.5, spare_mib=9.0)
    results.judge([both], [found], 4.0)
    assert found.reached is False
    assert results.outcome([found])[1].endswith("9.0 MiB beyond gradients")


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
