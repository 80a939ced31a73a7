"""Every backend has the functions of the Backend protocol, with the same parameters."""

import inspect

import pytest

from logitless import eager, kernels
from logitless.core.backend import Backend
from logitless.heads.blocks import BlockBackend
from logitless.parallel.rank_merge import ColumnBackend

FUNCTIONS = {
    name: list(inspect.signature(function).parameters.values())[1:]
    for name, function in vars(Backend).items()
    if inspect.isfunction(function) and not name.startswith("_")
}
BACKENDS = {
    "eager": eager,
    "kernels": kernels,
    "columns over eager": ColumnBackend(eager, 0, 4, 8, lambda t: t),
    "columns over kernels": ColumnBackend(kernels, 0, 4, 8, lambda t: t),
    "blocks": BlockBackend(eager),
}
# Blocks of a head serve losses that need only merged statistics (RowLoss.merges).
WHOLE_ROWS = {
    "above", "outside", "with_repeats", "gather", "gather_gradient", "pair_read", "pair_gradient",
    "topk", "sampled",
}  # fmt: skip
TABLE = {"row_dots", "row_dots_gradients"}  # read no logits, and no source of logits calls them
MERGED_ALREADY = {"partial", "merge", "finish"}
OVER_RANKS = {"above", "outside", "with_repeats"} | TABLE
LACKS = {"blocks": WHOLE_ROWS | MERGED_ALREADY | TABLE, "columns over eager": OVER_RANKS,
         "columns over kernels": OVER_RANKS}  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
def test_functions(name):
    """The parameters of the protocol, in its order; what is optional there is optional here."""
    backend, nothing = BACKENDS[name], inspect.Parameter.empty
    missing = {function for function in FUNCTIONS if not hasattr(backend, function)}
    assert missing == LACKS.get(name, set())
    assert backend.one_pass is None or callable(backend.plan_mean)
    for function in FUNCTIONS.keys() - missing:
        theirs = FUNCTIONS[function]
        ours = list(inspect.signature(getattr(backend, function)).parameters.values())
        assert len(ours) >= len([p for p in theirs if p.default is nothing]), function
        for wanted, got in zip(theirs, ours, strict=False):
            assert wanted.default is nothing or got.default is not nothing, (function, got.name)
        assert all(p.default is not nothing for p in ours[len(theirs) :]), function
