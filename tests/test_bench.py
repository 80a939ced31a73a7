"""`logitless bench` and `logitless doctor`, on a CPU and at toy sizes: that they run, that they
catch a wrong answer, and that their verdicts follow from the numbers."""

import json

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.cli import doctor, main
from logitless.cli.bench import cases, contenders, reference, runner, timing, verdict
from logitless.cli.bench.cases import BACKWARD, FORWARD, HOST, INPLACE, Case, Target

CASE = Case(BACKWARD, "cross_entropy", 6, 101, "fp32")
BRIEF = timing.Budget(1.0, 1.0)


def entries(case=CASE, **ops):
    """Results by name for contenders that are one function each."""
    loaded = {name: {case.op: f, f"{case.op} in place": f} for name, f in ops.items()}
    return {r.contender: r for r in runner.run_case(case, loaded, "cpu", BRIEF)}


def test_bench_writes_tables_plots_and_json(tmp_path, capsys):
    arguments = ["bench", "--quick", "--shape", "6x501", "--against", "eager", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "cross_entropy" in capsys.readouterr().out
    (stored,) = tmp_path.glob("bench-*.json")
    document = json.loads(stored.read_text())
    rows = document["rows"]
    assert {row["contender"] for row in rows} == {"logitless", "eager"}
    assert {row["op"] for row in rows} == set(cases.OPS)
    assert {row["mode"] for row in rows} == {FORWARD, BACKWARD, INPLACE}
    assert all(row["status"] == "ok" and row["ms"] > 0 for row in rows)
    assert document["copy_tbps"] > 0
    assert document["versions"]["torch"] == torch.__version__

    again = tmp_path / "again"
    assert main(["bench", "--from-json", str(stored), "--out", str(again)]) == 0
    made = {path.name for path in again.iterdir()}
    assert made == {
        stored.name,
        stored.with_suffix(".md").name,
        "share-of-ceiling.png",
        "memory.png",
    }
    assert "| cross_entropy | 6×501 |" in (again / stored.with_suffix(".md").name).read_text()


@pytest.mark.parametrize(
    "arguments", [["--shape", "8192"], ["--against", "nobody"], ["--dtype", "fp16", "--quick"]]
)
def test_bench_names_a_senseless_argument(arguments, capsys):
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert "logitless bench:" in capsys.readouterr().err


def test_a_wrong_or_failing_contender_is_reported_and_not_timed():
    def liar(x, t):
        return F.cross_entropy(x, t) * 1.01

    def wrong_gradient(x, t):
        return F.cross_entropy(x, t).detach() + (x * 0).sum()

    def not_a_number(x, t):
        return F.cross_entropy(x, t) * float("nan")

    def failing(x, t):
        raise RuntimeError("no kernel\nfor this")

    found = entries(
        right=F.cross_entropy,
        liar=liar,
        wrong_gradient=wrong_gradient,
        not_a_number=not_a_number,
        failing=failing,
    )
    assert found["right"].status == "ok"
    assert found["right"].ms > 0
    for name in ("liar", "wrong_gradient", "not_a_number"):
        assert found[name].status == "wrong"
        assert found[name].ms is None
        assert found[name].note
    assert found["failing"].status == "failed"
    assert found["failing"].ms is None
    assert found["failing"].note == "RuntimeError: no kernel for this"


def test_overwriting_the_logits_is_noted_and_wrong_when_it_is_us():
    def overwriting(x, t):
        loss = F.cross_entropy(x.detach(), t)
        x.data.zero_()
        return loss

    forward = CASE._replace(mode=FORWARD)
    found = entries(forward, logitless=overwriting, rival=overwriting)
    assert found["rival"].status == "ok"
    assert found["rival"].note == runner.OVERWRITES
    assert (found["logitless"].status, found["logitless"].note) == ("wrong", runner.OVERWRITES)


@pytest.mark.parametrize("variant", [*cases.HALF, *cases.OPTIONS, "entropy"])
def test_every_variant_of_ours_agrees_with_fp64(variant):
    op = "score" if variant == "entropy" else "cross_entropy"
    case = CASE._replace(op=op, variant=variant, rows=520)
    (result,) = runner.run_case(case, {"logitless": contenders.logitless()}, "cpu", BRIEF)
    assert result.status == "ok", result.note
    assert result.value_error < 1e-5
    assert result.grad_error < 1e-5


def test_reference_is_pytorch_in_fp64():
    x, target = torch.randn(5, 17, dtype=torch.float64), torch.tensor([3, -100, 0, 16, 9])
    options = {"weight": torch.rand(17), "label_smoothing": 0.2}
    total = reference.per_row("cross_entropy", x, target, options).sum()
    wanted = F.cross_entropy(x, target, options["weight"].double(), label_smoothing=0.2)
    torch.testing.assert_close(
        total / reference.denominator("cross_entropy", target, options), wanted
    )


def test_cuda_table_has_every_target_of_the_plan():
    table = cases.default_cases("cuda")
    shapes = len(cases.GPU_SHAPES)
    assert sum(c.group.startswith(FORWARD) and c.mode == FORWARD for c in table) == 3 * shapes
    assert sum(c.group == BACKWARD for c in table) == shapes
    assert sum(c.group == INPLACE for c in table) == shapes
    assert sum(c.mode == cases.FEW for c in table) == 8
    assert sum(c.group == "options" for c in table) == 6
    assert sum(c.mode == HOST for c in table) == 1
    assert all(c.target is not None for c in table)


def test_verdicts_follow_from_bytes_and_bandwidth():
    # 8192 × 128256 bf16 at 4 TB/s: one reading takes 0.525 ms, and three 1.576.
    forward = Case(FORWARD, "cross_entropy", *cases.LARGE, Target(1.06, "floor"))
    both = Case(BACKWARD, "cross_entropy", *cases.LARGE, Target(1.06, "floor"))
    half = forward._replace(target=Target(0.55, "plain"), variant="runs")
    host = Case(HOST, "cross_entropy", 64, 1024, "bf16", Target(2.5, "eager"))
    ran = [
        (
            forward,
            [runner.blank(forward, "logitless", ms=0.54), runner.blank(forward, "eager", ms=2.0)],
        ),
        (both, [runner.blank(both, "logitless", ms=1.70, extra_mib=2004.5)]),
        (half, [runner.blank(half, "logitless", ms=0.30)]),
        (host, [runner.blank(host, n, ms=t) for n, t in (("logitless", 0.1), ("eager", 0.05))]),
    ]
    ours = [r for r in verdict.judge(ran, copy_tbps=4.0) if r.contender == "logitless"]
    assert [r.reached for r in ours] == [True, False, False, True]
    assert ours[0].floor_x == pytest.approx(0.54 / 0.5253, rel=1e-3)
    assert ours[1].tbps == pytest.approx(3 * 2.1013 / 1.70, rel=1e-3)
    assert ours[1].memory_reached is True
    assert ours[1].extra_x == pytest.approx(1.0, abs=2e-3)
    assert ours[2].limit_ms == pytest.approx(0.55 * 0.54)


def test_doctor_passes_here_and_fails_when_an_op_is_off(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter takes a while
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "cpu tensors" in out
    assert "of" in out
    for check in doctor.CHECKS:
        assert check.name in out

    right = ll.logsumexp
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[:1])
    monkeypatch.setattr(ll, "logsumexp", lambda x: right(x) + 1e-3)
    assert main(["doctor"]) == 1
    assert "WRONG" in capsys.readouterr().out
