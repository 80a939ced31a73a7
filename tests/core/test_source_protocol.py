"""Every source of logits has the members of Source, with the same parameters."""

import inspect

import pytest
import torch

import logitless as ll
from logitless.core.source import Source, source_of
from logitless.heads.linear import HeadColumns, HeadLogits
from logitless.lazy.logits import LazyColumns, LazyLogits, UnscaledLogits
from logitless.parallel.dtensor import DTensorLogits
from logitless.parallel.shard import Columns, LogitColumns, Shard

MEMBERS = {
    name: list(inspect.signature(function).parameters)
    for name, function in vars(Source).items()
    if inspect.isfunction(function) and not name.startswith("_")
}
SOURCES = [
    HeadLogits, Shard, LazyLogits, UnscaledLogits, LazyColumns, HeadColumns, Columns,
    LogitColumns, DTensorLogits,
]  # fmt: skip
ATTRIBUTES = ("shape", "dtype", "device", "requires_grad")


def every_subclass(kind: type) -> set[type]:
    return {kind, *(s for direct in kind.__subclasses__() for s in every_subclass(direct))}


def test_the_list_is_complete():
    ours = {s for s in every_subclass(Source) - {Source} if s.__module__.startswith("logitless")}
    listed = {sub for source in SOURCES for sub in every_subclass(source)}
    assert ours - listed == set()


@pytest.mark.parametrize("kind", SOURCES)
def test_parameters(kind):
    """Those of Source; a tensor has its own dim()."""
    members = [name for name in MEMBERS if name != "dim" or not hasattr(kind, "grad_fn")]
    found = {name: list(inspect.signature(getattr(kind, name)).parameters) for name in members}
    assert found == {name: MEMBERS[name] for name in members}


def test_attributes(device):
    h, w = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    head = ll.LinearLogits(h, w)
    lazy = ll.fuse(torch.nn.Sequential(torch.nn.Linear(4, 5, device=device)), head="0")(h)
    wrapped = (head, ll.VocabShard(h @ w.T), ll.VocabShard(head))
    for source in (*map(source_of, wrapped), lazy, UnscaledLogits(lazy)):
        assert tuple(source.shape) == (3, 5)
        assert all(hasattr(source, name) for name in ATTRIBUTES)
        assert source_of(source) is source
    for logits in wrapped:
        source = source_of(logits)
        assert [getattr(logits, n) for n in ATTRIBUTES] == [getattr(source, n) for n in ATTRIBUTES]
    assert source_of(h) is None
