"""`logitless doctor`: what it prints, and what it says when a result is wrong."""

import json
import re

import pytest
import torch

import logitless as ll
from logitless.cli import doctor, main, selfcheck

FIRST = (selfcheck.CHECKS[0], selfcheck.CHECKS[3])


@pytest.fixture
def without_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which takes a while


@pytest.mark.usefixtures("without_interpreter")
def test_it_passes_here_with_dtype_and_bound_beside_each_error(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for expected in (torch.__version__, "cpu tensors", "LOGITLESS_WAITING"):
        assert expected in out
    for check in selfcheck.CHECKS:
        (line,) = re.findall(rf"^  cpu +{re.escape(check.name)} {{2,}}(.*)$", out, re.M)
        error = r"\d(?:e[-+]\d+) of \de-\d+ (?:bfloat16|float\d+)"
        assert re.fullmatch(rf"{error} +(?:{error}|none) +ok", line)
    assert "What to do" not in out


@pytest.mark.usefixtures("without_interpreter")
def test_json_has_the_facts_and_results_of_the_text(capsys, monkeypatch):
    right = ll.cross_entropy
    monkeypatch.setattr(doctor, "CHECKS", FIRST)
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for part in ("machine", "environment", "paths"):
        for name, fact in found[part].items():
            assert re.search(rf"^  {re.escape(name)} +{re.escape(fact)}$", text, re.M), name
    for check in found["checks"]:
        line = r" +".join(re.escape(word) for word in check.values())
        assert re.search(rf"^  {line}$", text, re.M), check
    assert [check["check"] for check in found["checks"]] == [c.name for c in FIRST]

    monkeypatch.setattr(ll, "cross_entropy", lambda x, ids: right(x, ids) * float("nan"))
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["checks"]
    assert first["result"].startswith("WRONG at bfloat16")
    assert second["result"] == "ok"


@pytest.mark.usefixtures("without_interpreter")
def test_it_says_what_is_wrong_and_what_to_do(capsys, monkeypatch):
    right = ll.cross_entropy
    monkeypatch.setattr(doctor, "CHECKS", FIRST[:1])
    monkeypatch.setattr(ll, "cross_entropy", lambda x, ids: right(x, ids) + 1e-3)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WRONG at bfloat16" in out
    assert "LOGITLESS_IMPL=eager" in out

    def breaks(x, ids):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(ll, "cross_entropy", breaks)
    assert main(["doctor"]) == 1
    assert "FAILED at bfloat16 3×1: no such thing" in capsys.readouterr().out
