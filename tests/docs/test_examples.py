"""The examples run, at smaller settings than a user's. tests/docs/test_scaling.py runs one more."""

import importlib
import re
import sys
from functools import cache

import pytest

from examples import demo
from tests.support.forked import printed_by
from tests.support.paths import ROOT


@cache
def text() -> str:
    return demo.read_sources(limit=300_000)


@pytest.fixture
def printed(monkeypatch, capsys):
    """The text that an example prints, with these arguments and constants of its module."""
    monkeypatch.setitem(sys.modules, "demo", demo)  # a script finds it beside itself

    def run(name: str, arguments: str, needs: str = "", **constants) -> str:
        for package in needs.split():
            pytest.importorskip(package, reason=f"needs {package}: requirements/tests.txt")
        example = importlib.import_module(f"examples.{name}")
        if hasattr(example, "read_sources"):
            constants["read_sources"] = lambda limit: text()[:limit]
        for constant, value in constants.items():
            monkeypatch.setattr(example, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
        example.main()
        return capsys.readouterr().out

    return run


def test_distill_ends_with_three_losses(printed):
    small = demo.Scale(batch=2, context=8, width=32, layers=1, lr=1e-2)
    output = printed("distill", "--steps 3", TEACHER=small, STUDENT=small)
    found = re.findall(r"^ *(\w[\w ]*?)  +(\d+\.\d+)$", output, re.M)
    assert [name for name, _ in found] == ["teacher", "student", "student with the teacher"]
    assert all(0 < float(loss) < 20 for _, loss in found)


def test_trainer_ends_with_two_losses(printed):
    needs = "transformers accelerate peft"
    output = printed("trainer", "--steps 12", needs, VOCABULARY=128, LENGTH=8)
    found = re.findall(
        r"^ *(\w[\w ]*?)  first loss (\d+\.\d+)  last loss (\d+\.\d+)$", output, re.M
    )
    assert [name for name, *_ in found] == ["all weights", "LoRA"]
    assert all(0 < float(last) < float(first) < 20 for _, first, last in found)


def test_store_makes_a_pair_and_distils_it(printed):
    output = printed("store", "--steps 10", "transformers accelerate")
    assert "54 documents captured" in output
    assert "\nright\n" in output
    before, after = map(float, re.search(r"(\d\.\d+) before, (\d\.\d+) after", output).groups())
    assert after < before - 0.3


def test_contrastive_trains_the_same_towers(printed):
    output = printed("contrastive", "--pairs 512 --steps 12")
    found = re.findall(
        r"^ *(\w+) .* (\S+) MB in the loss +last loss (\S+) +recall at 10 (\S+)$", output, re.M
    )
    (first, _, loss, recall), (second, _, our_loss, our_recall) = found
    assert (first, second) == ("plain", "logitless")
    assert abs(float(loss) - float(our_loss)) < 1e-3
    assert abs(float(recall) - float(our_recall)) < 0.01
    assert float(our_recall) > 0.1


def test_grpo_raises_the_reward(printed):
    output = printed("grpo", "--steps 12", "transformers", LENGTH=3)
    found = [float(reward) for reward in re.findall(r"^step .* reward (\d\.\d+)", output, re.M)]
    assert len(found) > 2
    assert found[-1] > 1.2 * found[0]


def test_fsdp2_trains_in_two_processes():
    pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")
    output = printed_by(ROOT / "examples/fsdp2.py", "--steps", "5", ranks=2)
    found = [float(loss) for loss in re.findall(r"^step .* loss (\d\.\d+)$", output, re.M)]
    assert len(found) == 5
    assert found[-1] < found[0] - 0.3


def test_on_policy_raises_the_teachers_log_probability(printed):
    needs, fewer = "transformers accelerate", {"VOCAB": 512, "NEW": 8}
    output = printed("on_policy", "--steps 5", needs, **fewer)
    assert "materialised logits: 0 " in output
    found = re.findall(r"^ *(\w[\w ,]*?)  +(-\d+\.\d+)$", output, re.M)
    results = {name: float(value) for name, value in found}
    before, trainer, loop, _ = results.values()
    assert [*results] == [
        "student before", "student after, DistillTrainer", "student after, own loop", "teacher"
    ]  # fmt: skip
    assert min(trainer, loop) > before + 0.1


def test_draft_head_is_accepted_more_often(printed):
    small = demo.Scale(batch=8, context=16, width=64, layers=1, lr=1e-2)
    fewer = {"VOCAB": 512, "DRAFTED": 128, "TARGET": small}
    output = printed("draft_head", "--steps 50 --held-out 24", **fewer)
    rates = {
        (when, kind): [float(rate) for rate in numbers.split()]
        for when, kind, numbers in re.findall(
            r"^ *(before|after)  (1 - TVD|counted)  ([\d. ]+)$", output, re.M
        )
    }
    assert len(rates) == 4
    assert [len(found) for found in rates.values()] == [3, 4, 3, 4]
    for before, after in zip(rates["before", "1 - TVD"], rates["after", "1 - TVD"], strict=True):
        assert after > before + 0.1
    # The same rate, once computed along held-out text, and once counted after a sampled token.
    assert abs(rates["after", "counted"][0] - rates["after", "1 - TVD"][0]) < 0.1


def test_recommender_prints_metrics_and_memory(printed):
    output = printed("recommender", "--steps 40 --items 4000 --negatives 256")
    found = re.findall(r"^\| ([\w ]+) \| (0\.\d+) \| (0\.\d+) \| (\d+) \|", output, re.M)
    assert [name for name, *_ in found] == ["untrained", "full softmax", "256 negatives"]
    ndcg, recall = zip(*((float(a), float(b)) for _, a, b, _ in found), strict=True)
    assert max(ndcg[0], recall[0]) < 0.1
    assert min(ndcg[1:]) > 0.3
    assert min(recall[1:]) > 0.4
    assert all(a <= b for a, b in zip(ndcg, recall, strict=True))
