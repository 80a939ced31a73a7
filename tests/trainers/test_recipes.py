"""The recipe with TRL's trainers runs."""

import pytest

from tests.support.pages import python_of, run

PAGE = "docs/recipes/trl.md"


@pytest.mark.filterwarnings("default")
def test_trl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, names),) = run(PAGE)
    assert len(python_of(PAGE)) == 1
    for name, least in (("sft", 5.0), ("dpo", 0.5), ("grpo", -1.0)):
        (loss,) = [e["train_loss"] for e in names[name].state.log_history if "train_loss" in e]
        assert least < loss < 7
