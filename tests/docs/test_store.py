"""docs/store.md: its code runs, and it names what is public."""

import re

import logitless as ll
from tests.support.paths import ROOT


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/store.md").read_text()
    training, counts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(training, names)
    assert all(p.grad.abs().sum() > 0 for p in names["model"].parameters())
    assert names["loss"].isfinite()
    exec(counts, names)
    assert names["targets"].shape == (32,)
    assert names["targets"].mask.any(-1).all()


def test_the_page_names_every_public_name():
    page = (ROOT / "docs/store.md").read_text()
    left = {"Header", "Report", "DistillLosses", "batch_targets", "tokenizer_hash"}  # docstrings
    assert [name for name in ll.store.__all__ if name not in page and name not in left] == []
