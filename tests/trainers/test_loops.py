"""Fused models in Transformers, PEFT, Accelerate and Lightning train like plain models, lazily."""

import pytest

import logitless as ll
from tests.support.loop_cases import CASES
from tests.support.trainer_runs import LAZY, WORKSPACE, apart, run

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library}, {case.name}")
def test_fused(case, tmp_path, outcome):
    evaluates = case.library == "Transformers"
    want = run(case.make(tmp_path, lambda model: model, case.options), evaluates)
    assert want.widest > LAZY
    assert any(entry.get("grad_norm", 0) > 0 for entry in want.logs)
    made = case.make(tmp_path, lambda model: ll.fuse(model, workspace=WORKSPACE), case.options)
    got = run(made, evaluates)
    difference = apart(got, want, case.tolerance)
    lazy = got.widest <= LAZY and not got.materialised
    yes = {True: "yes", False: "no"}
    outcome((case.library, case.name, "`fuse`", yes[difference == ""], yes[lazy]))
    assert difference == ""
    assert lazy, (got.widest, got.materialised)
    assert ll.is_fused(made.model), ll.is_fused(made.model)
