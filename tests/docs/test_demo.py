"""`make demo`, end to end and in its parts."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from examples import demo
from examples.demo import memory, report, story
from examples.demo.__main__ import main

TINY = demo.Scale(batch=2, context=8, width=32, layers=1, lr=2e-2)


@pytest.fixture(scope="module")
def ids():
    return demo.encode(demo.read_sources(limit=400_000))


@pytest.fixture
def tiny(monkeypatch):
    scale = TINY._replace(width=32, lr=1e-2)
    plan = story.Plan(512, 64, scale, scale, 12, 2, memory_rows=1024, memory_vocab=2048)
    monkeypatch.setattr(story, "PLANS", dict.fromkeys(story.PLANS, plan))
    monkeypatch.setattr(demo.small, "MAX_CHARS", 900_000)


def test_demo_ends_with_a_table_a_picture_and_a_report(tiny, tmp_path, capsys, monkeypatch):
    """The curves of the students of the store and of the live teacher are one; 64 of 512 slots
    teach most of what whole logits do. How much that is depends on the text, which is that of the
    Python it runs on."""
    run, told = story.run, []
    monkeypatch.setattr(story, "run", lambda *how: told.append(run(*how)) or told[-1])
    out, store = tmp_path / "new" / "demo.png", tmp_path / "store"
    main(["--steps", "20", "--device", "cpu", "--out", str(out), "--store", str(store)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for expected in ("held-out", "nats", "the store", "time", "memory", str(out)):
        assert expected in printed
    page = out.with_suffix(".html").read_text()
    assert "http" not in page.split("<body>")[0]  # nothing is fetched
    assert "data:image/png;base64," in page
    found = ll.store.Store(store)
    assert (len(found), found.info.k) == (12, 64)

    (outcome,) = told
    alone, whole, live, stored = ([loss for _, loss in s.curve] for s in outcome.students)
    assert max(abs(a - b) for a, b in zip(live, stored, strict=True)) < 0.01
    assert alone[-1] - stored[-1] > (alone[-1] - whole[-1]) / 2 > 0.05
    assert outcome.students[3].memory < outcome.students[1].memory / 2


def test_words_in_the_report_are_no_html(tmp_path):
    plan = story.PLANS["cpu"]
    students = [
        story.Student(name, None, [(1, 7.0), (2, 6.0 - i)], 1.0, 2**20 * 10)  # pyright: ignore
        for i, name in enumerate((story.ALONE, story.WHOLE, story.LIVE, story.STORED))
    ]
    store = {
        "documents": 3, "tokens": 99, "bytes per token": 219.0, "bytes of whole rows, fp16": 16384,
        "seconds": 1.0, "right": True, "mass of the slots": 0.9,
        "label log-probability": {-1: -9.0, 0: -4.0, 1: -9.0},
    }  # fmt: skip
    words = [("def f(", "x", [("x", 0.5), ("<script>", 0.1)])]
    told = story.Outcome("cpu", 2, 256, 5.0, students, store, words, plan)
    (tmp_path / "demo.png").touch()
    report.save_html(told, tmp_path / "demo.png", tmp_path / "demo.html")
    page = (tmp_path / "demo.html").read_text()
    assert "<script>" not in page
    for expected in ("<title>logitless demo</title>", "the store", "held-out loss", "Predictions"):
        assert expected in page


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
    text = "a a a b b c"
    words = demo.small.vocabulary(text, 3)
    assert words == ["?", " a", "b" if "b" in words else " b"]
    assert demo.encode(text, words).tolist() == [0, 1, 1, 2, 2, 0]


def test_demo_memory_of_the_loss_is_what_pytorch_allocates():
    logits, target = torch.randn(64, 32_768, requires_grad=True), torch.zeros(64).long()
    peak = memory.extra_memory("cpu", logits, lambda z: F.cross_entropy(z, target).backward())
    assert peak // logits.nbytes == 3  # log_softmax, its gradient, the gradient of the logits


def test_demo_refuses_to_train_for_no_steps():
    with pytest.raises(SystemExit, match="--steps must be at least 1, got 0"):
        main(["--steps", "0"])
