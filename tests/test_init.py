"""The public names of the package."""

import pydoc
import re
import sys

import pytest
import torch

import logitless as ll

LOGITS = {"device", "dim", "dtype", "materialize", "requires_grad", "shape"}
MEMBERS = {  # names that help() of each public class shows and that do not begin with an underscore
    ll.LinearLogits: LOGITS | {"hidden", "weight", "bias", "low_rank", "lazy", "explain"},
    ll.VocabShard: LOGITS | {"start", "width"},
    ll.SparseTargets: {
        "cat", "device", "k", "load", "mask", "pin_memory", "reshape", "save",
        "shape", "stack", "tail", "to",
    },
}  # fmt: skip


def test_dir_lists_the_public_names_alone():
    """Completion offers store and hf, and no helpers."""
    names = {name for name in dir(ll) if not name.startswith("__")}
    assert names == {*ll.__all__, "hf"}


@pytest.mark.parametrize("module", [ll.nn, ll.store])
def test_dir_of_a_module(module):
    assert {name for name in dir(module) if not name.startswith("__")} == {*module.__all__}


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_help_lists_what_users_call(kind):
    """`evaluate`, `as_teacher` and `in_columns` are not for users."""
    assert shown_by_help(kind) == MEMBERS[kind]


@pytest.mark.parametrize("name", ll.nn.__all__)
def test_help_of_a_module_adds_nothing(name):
    own = shown_by_help(getattr(ll.nn, name))
    assert own - shown_by_help(torch.nn.Linear) - {"reset_parameters", "group"} == set()


def shown_by_help(kind: type) -> set[str]:
    """The names of methods and attributes in the text of help()."""
    text = pydoc.plain(pydoc.render_doc(kind))
    names = re.findall(
        r"^ \|  (\w+)(?:\(.*|:.*| = .*)?$", text.split(" |  Methods defined here:")[-1], re.M
    )
    return {name for name in names if not name.startswith("_")}


def test_hf_without_transformers_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("logitless.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "logitless.hf", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("hf", "integrations"):
        monkeypatch.delitem(vars(ll), name, raising=False)
    with pytest.raises(ImportError, match=r"'logitless\[teacher\]'"):
        _ = ll.hf
