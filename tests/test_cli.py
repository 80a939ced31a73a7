"""The command line: `demo` end to end and in its parts, and what every subcommand shares."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless import cli
from logitless.cli import demo

TINY = demo.Scale(batch=2, context=8, width=32, layers=1, lr=2e-2, loss_rows=64)


@pytest.fixture(scope="module")
def ids():
    return demo.encode(demo.read_sources(limit=400_000))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo, "SCALES", dict.fromkeys(demo.SCALES, TINY))
    monkeypatch.setattr(demo, "MAX_CHARS", 400_000)


def test_demo_ends_with_a_table_and_a_plot(tiny, tmp_path, capsys):
    out = tmp_path / "new" / "plot.png"
    assert cli.main(["demo", "--steps", "3", "--device", "cpu", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for expected in ("final loss", "largest difference", "time", "64 × 32,768", str(out)):
        assert expected in printed


def in_fp64(logits, target):
    return F.cross_entropy(logits.double(), target).float()


def test_demo_learns_the_same_with_either_loss(ids):
    """The text is this Python's own library, and with some texts training amplifies rounding (3.10:
    PyTorch's curve is 3e-4 from that of a loss in fp64). So ours is held to PyTorch's distance."""
    losses = {"exact": in_fp64, "PyTorch": F.cross_entropy, "logitless": ll.cross_entropy}
    learners = [demo.Learner(name, loss, TINY, "cpu", seed=0) for name, loss in losses.items()]
    steps = list(demo.train(learners, demo.draw_batches(ids, TINY, "cpu", seed=0), 20))
    assert steps == list(range(1, 21))
    exact, theirs, ours = learners
    allowed = 2 * demo.largest_difference([exact, theirs]) + 2e-5
    assert demo.largest_difference([exact, ours]) < allowed
    for learner in learners:
        assert len(learner.curve) == 20
        assert learner.curve[-1] < learner.curve[0] - 0.5


def test_demo_batches_shift_by_one_token_and_repeat(ids):
    tokens, target = next(demo.draw_batches(ids, TINY, "cpu", seed=1))
    assert tokens.shape == target.shape == (TINY.batch, TINY.context)
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    again, _ = next(demo.draw_batches(ids, TINY, "cpu", seed=1))
    assert torch.equal(tokens, again)


def test_demo_vocabulary_keeps_the_frequent_tokens(monkeypatch):
    monkeypatch.setattr(demo, "VOCAB", 3)
    assert demo.encode("a a a b b c").tolist() == [0, 1, 1, 2, 2, 0]


def test_demo_memory_of_the_loss_is_what_pytorch_allocates():
    matrix = 64 * demo.VOCAB * 4
    # log_softmax, its gradient, the gradient of the logits
    assert demo.loss_memory(F.cross_entropy, 64, "cpu") // matrix == 3


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_demo_refuses_to_train_for_no_steps(steps):
    with pytest.raises(SystemExit, match=f"--steps must be at least 1, got {steps}"):
        cli.main(["demo", "--steps", steps])


def test_a_missing_extra_is_named_with_its_remedy():
    with pytest.raises(
        SystemExit, match=r"demo needs no_such_module: pip install 'logitless\[demo\]'"
    ):
        cli.require("demo", "sys", "no_such_module")


def test_ctrl_c_ends_a_command_quietly(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_importing_the_library_or_its_command_imports_nothing_optional():
    check = (
        "import sys, logitless; assert 'logitless.cli' not in sys.modules\n"
        "import logitless.cli.demo\n"
        "assert not {'rich', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
