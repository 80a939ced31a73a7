"""What the README shows is run, and what it claims of a file is in that file."""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        if "logits" in names:
            names["logits"] = torch.randn(8, 1000, requires_grad=True)
        exec(block, names)
        over_a_head = "LinearLogits" in block or "policy" in block
        leaf = names["head"].weight if over_a_head else names["logits"]
        assert leaf.grad.isfinite().all()
        assert leaf.grad.abs().sum() > 0
        leaf.grad = None


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_its_table_is_the_committed_result():
    results = ROOT / "benchmarks/results/h200/bench-logits-2026-11-15.json"
    document = json.loads(results.read_text())
    modes = {
        "forward": "forward",
        "forward + backward": "forward + backward",
        "the same in place": "forward + backward, in place",
    }
    ours = {
        (row["mode"], row["rows"], row["vocab"]): row["ms"]
        for row in document["rows"]
        if row["contender"] == "logitless"
        and row["op"] == "cross_entropy"
        and row["dtype"] == "bf16"
        and row["variant"] == "plain"
    }
    lines = re.findall(
        r"^\| (.+), ([\d,]+) × ([\d,]+) \|.* ([\d.]+) \| [\d.]+ \|$", README, re.MULTILINE
    )
    assert len(lines) == 12
    for label, rows, vocab, ms in lines:
        key = (modes[label], int(rows.replace(",", "")), int(vocab.replace(",", "")))
        assert f"{ours[key]:.2f}" == ms


def test_importing_brings_nothing_else():
    """Neither Triton nor anything optional, and under 0.2 s of the processor's time after torch."""
    code = (
        "import torch, time, sys; before = set(sys.modules); t = time.process_time();"
        "import logitless; spent = time.process_time() - t;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(spent); print(sorted(new & {'triton', 'rich', 'matplotlib', 'transformers'}))"
    )
    times = []
    for _ in range(3):  # the best of three: what else the machine does is not our import
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        spent, brought = done.stdout.splitlines()
        assert brought == "[]"
        times.append(float(spent))
    assert min(times) < 0.2
