"""`logitless doctor`: every public function, every kernel, and what it says when one is wrong."""

import inspect
import json
import re
from unittest import mock

import pytest
import torch

import logitless as ll
from logitless.cli import doctor, main, selfcheck
from tests.support import sanitizer
from tests.support.launches import every_kernel, launched
from tests.support.sizes import ON_GPU

NOT_COMPUTED = {"impl", "is_fused", "report", "unfuse"}  # compute no logits
WAIT_FOR_OTHERS = {"_jsd_tvd_split_fwd_kernel", "_jsd_tvd_merge_kernel"}


def test_every_public_function_has_a_check():
    public = {name for name in ll.__all__ if inspect.isfunction(getattr(ll, name))} - NOT_COMPUTED
    assert public - {check.name.split(",")[0] for check in selfcheck.CHECKS} == set()
    assert len(public) > 15


def test_every_kernel_is_run_by_a_check(capsys):
    """By the interpreter all but those whose programs wait for each other; `make sanitize` too."""
    assert len(every_kernel()) > 20
    device = "cuda" if ON_GPU else "cpu"
    with (
        launched() as ran,
        mock.patch.object(doctor, "SHAPES", sanitizer.SHAPES),
        mock.patch.object(doctor, "BOUNDS", {torch.bfloat16: doctor.BOUNDS[torch.bfloat16]}),
        ll.impl("triton"),
    ):
        found = {check.name: doctor.examine(check, device).problem for check in selfcheck.CHECKS}
    assert {name: problem for name, problem in found.items() if problem} == {}
    assert every_kernel() - ran - (set() if ON_GPU else WAIT_FOR_OTHERS) == set()


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
    right = ll.logsumexp
    monkeypatch.setattr(doctor, "CHECKS", selfcheck.CHECKS[:2])
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
    assert [check["check"] for check in found["checks"]] == [c.name for c in selfcheck.CHECKS[:2]]

    monkeypatch.setattr(ll, "logsumexp", lambda x: right(x) * float("nan"))
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["checks"]
    assert first["result"].startswith("WRONG at bfloat16")
    assert second["result"] == "ok"


@pytest.mark.usefixtures("without_interpreter")
def test_it_says_what_is_wrong_and_what_to_do(capsys, monkeypatch):
    right = ll.logsumexp
    monkeypatch.setattr(doctor, "CHECKS", selfcheck.CHECKS[:1])
    monkeypatch.setattr(ll, "logsumexp", lambda x: right(x) + 1e-3)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WRONG at bfloat16" in out
    assert "LOGITLESS_IMPL=eager" in out

    def breaks(x):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(ll, "logsumexp", breaks)
    assert main(["doctor"]) == 1
    assert "FAILED at bfloat16 3×1: no such thing" in capsys.readouterr().out
