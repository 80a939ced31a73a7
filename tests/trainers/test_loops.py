"""Fused models in Transformers, PEFT, Accelerate and Lightning train like plain models, lazily."""

import pytest

import logitless as ll
from tests.support.loop_cases import CASES
from tests.support.trainer_runs import WORKSPACE, run

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library}, {case.name}")
def test_fused(case, tmp_path, compare):
    evaluates = case.library == "Transformers"
    want = run(case.make(tmp_path, lambda model: model, case.options), evaluates)
    made = case.make(tmp_path, lambda model: ll.fuse(model, workspace=WORKSPACE), case.options)
    got = run(made, evaluates)
    compare(case.library, case.name, "`ll.fuse(model)`", got, want, case.tolerance)
    assert ll.is_fused(made.model), ll.is_fused(made.model)
