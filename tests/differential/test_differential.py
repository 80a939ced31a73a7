"""A fixed draw of cases of every function; `make fuzz` draws others, for as long as it is told."""

import inspect

import hypothesis
import pytest
import torch

import logitless as ll

from .case import Case
from .check import check
from .functions import FUNCTIONS, NOT_LOSSES
from .mutations import mutated
from .strategies import cases

EXAMPLES, FEW = 25, 7  # of each function


def test_every_public_function_is_tested():
    modules = {
        f"nn.{name}"
        for name, value in vars(ll.nn).items()
        if inspect.isclass(value) and issubclass(value, torch.nn.Module) and name[0] != "_"
    }
    assert {*ll.__all__, *modules} == FUNCTIONS.keys() | NOT_LOSSES.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cases(name, request):
    @hypothesis.settings(
        max_examples=FEW if request.config.option.few else EXAMPLES, derandomize=True,
        deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(cases(name))
    def each(case):
        hypothesis.note(case.script())  # shown of the smallest case that fails
        check(case)

    each()


@pytest.mark.parametrize(
    "case",
    [Case("capture_topk", "shards, two", seed=1, values="+inf", arguments={"k": "all"})],
)  # fmt: skip
def test_cases_that_failed_before(case):
    check(case)


def test_a_script_runs_its_case():
    bad = {"target": "int64", "row_weight": "one more"}
    script = Case("cross_entropy", "head, one row", arguments=bad, bad="row_weight").script()
    exec(script)
    bug = "row_weight_unchecked_over_a_head"
    with mutated(bug), pytest.raises(AssertionError, match="and not"):
        exec(script)
