"""fuse(model, head=[...]): a model with several heads trains as the plain model does."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from logitless.integrations.trl import _guard_of
from logitless.lazy import recipe, report
from logitless.lazy.logits import LazyLogits
from tests.support.laws import error

B, T, D, TEXT, AUDIO = 2, 5, 6, 23, 11
NAMES = ["lm_head", "medusa.0", "medusa.1", "others.audio"]


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(report, "_warned", set())
    ll.report()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return x + F.silu(self.linear(x))


class Model(nn.Module):
    """A head, two heads of the same vocabulary as in Medusa, and one of another vocabulary."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(TEXT, D)
        self.lm_head = nn.Linear(D, TEXT)
        self.medusa = nn.ModuleList(nn.Sequential(Residual(), nn.Linear(D, TEXT)) for _ in "ab")
        self.others = nn.ModuleDict({"audio": nn.Linear(D, AUDIO, bias=False)})
        if tied:
            self.lm_head.weight = self.embed.weight
            for head in self.medusa:
                head[1].weight = self.embed.weight

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, only=None):
        hidden = self.embed(ids).tanh()
        heads = {name: self.get_submodule(name) for name in NAMES}
        return [head(hidden) for name, head in heads.items() if only is None or name in only]


@pytest.fixture
def ids(device):
    return torch.randint(0, TEXT, (B, T), device=device)


def model(device, **how):
    return Model(**how).to(device, torch.float64)


def loss_of(logits, ids):
    """Head k predicts the token after k + 1 others, and has its own weight in the loss."""
    losses = []
    for k, z in enumerate(logits):
        target = ids[:, k + 1 :] % z.shape[-1]
        z = z[:, : T - k - 1]
        losses.append(F.cross_entropy(z.flatten(0, 1), target.flatten()) / (k + 1))
    return torch.stack(losses).sum()


def trained(m, ids, **how):
    m.zero_grad()
    logits = m(ids, **how)
    loss = loss_of(logits, ids)
    loss.backward()
    grads = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    return logits, {"loss": loss.detach(), **grads}


def assert_trains_as_plain(fused, plain, ids, lazy=NAMES, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits, got = trained(fused, ids, **how)
    names = how.get("only", NAMES)
    found = [name for name, z in zip(names, logits, strict=True) if type(z) is LazyLogits]
    assert found == [name for name in names if name in lazy]
    assert all(not z.known for z in logits if type(z) is LazyLogits)
    want = trained(plain, ids, **how)[1]
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert error(got[name], value) < 1e-12, name


GIVEN = {
    "names": lambda m: NAMES,
    "a tuple of names": lambda m: tuple(NAMES),
    "modules": lambda m: [m.lm_head, m.medusa[0], m.medusa[1], m.others["audio"]],
    "containers": lambda m: [m.lm_head, m.medusa, "others"],
    "a head twice": lambda m: ["lm_head", m.lm_head, "medusa", "medusa.1", "others.audio"],
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("given", GIVEN)
def test_all_heads_are_lazy(given, tied, ids, device):
    plain = model(device, tied=tied)
    fused = copy.deepcopy(plain)
    keys = list(fused.state_dict())
    assert ll.fuse(fused, head=GIVEN[given](fused), workspace=3 * TEXT * 8) is fused
    assert_trains_as_plain(fused, plain, ids)
    assert str(ll.is_fused(fused)) == "The heads return lazy logits."
    assert not ll.report(fused)
    assert list(fused.state_dict()) == keys
    assert all(z.recipe.head.workspace == 3 * TEXT * 8 for z in fused(ids))


def test_one_container_and_the_output_embeddings(ids, device):
    class Listed(Model):
        def get_output_embeddings(self):
            return self.medusa

    torch.manual_seed(1)
    plain = Listed().to(device, torch.float64)
    for how in ({}, {"head": "medusa"}, {"head": plain.medusa}):
        fused = copy.deepcopy(plain)
        if isinstance(how.get("head"), nn.Module):
            how = {"head": fused.medusa}
        ll.fuse(fused, **how)
        assert_trains_as_plain(fused, plain, ids, lazy=NAMES[1:3])


def test_the_other_heads_stay_plain(ids, device):
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=["lm_head", "others.audio"])
    assert_trains_as_plain(fused, plain, ids, lazy=["lm_head", "others.audio"])


def test_a_head_inside_another_head(ids, device):
    """Here the heads of Medusa end with the model's own head."""
    plain = model(device)
    for head in plain.medusa:
        head[1] = plain.lm_head
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    assert_trains_as_plain(fused, plain, ids)
    assert ll.is_fused(fused)
    ll.unfuse(fused)
    assert all(type(z) is torch.Tensor for z in fused(ids))


def test_copies(ids, device):
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        ll.unfuse(fused)
        assert_trains_as_plain(copied, plain, ids)
        ll.unfuse(copied.medusa)
        assert_trains_as_plain(copied, plain, ids, lazy=["lm_head", "others.audio"])
        ll.fuse(fused, head=NAMES)


def test_without_gradients(ids, device, monkeypatch):
    plain = model(device).eval()
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    with torch.no_grad():
        want = plain(ids)
        for limit, kind in ((B * T * TEXT * 8, torch.Tensor), (0, LazyLogits)):
            monkeypatch.setattr(recipe, "SMALL", limit)
            got = fused(ids)
            assert [type(z) for z in got] == [kind] * 4
            torch.testing.assert_close([z[:, -1].clone() for z in got], [z[:, -1] for z in want])
        ll.fuse(fused, head=NAMES, lazy_inference=False)
        assert [type(z) for z in fused(ids)] == [torch.Tensor] * 4
    assert str(ll.is_fused(fused)) == "The heads return lazy logits if gradients are wanted."


def test_unfuse(ids, device):
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    ll.unfuse(fused.medusa[0])
    assert_trains_as_plain(fused, plain, ids, lazy=[n for n in NAMES if n != "medusa.0"])
    assert not ll.is_fused(fused.medusa[0])
    assert ll.is_fused(fused.medusa[1])
    ll.unfuse(fused)
    assert_trains_as_plain(fused, plain, ids, lazy=[])
    assert not ll.is_fused(fused)
    assert not fused._forward_hooks
    assert not fused._forward_pre_hooks
    left = [key for m in fused.modules() for key in m.__dict__ if "logitless" in key]
    assert left == []
    assert all("forward" not in m.__dict__ for m in fused.modules())


def test_the_last_head_that_is_unfused_removes_the_hooks(ids, device):
    fused = ll.fuse(model(device), head=["lm_head", "others"])
    ll.unfuse(fused.lm_head)
    ll.unfuse(fused.others)
    assert all(type(z) is torch.Tensor for z in fused(ids))
    assert not fused._forward_hooks
    assert not ll.is_fused(fused)


def test_other_heads_replace_them(ids, device):
    plain = model(device)
    fused = ll.fuse(ll.fuse(copy.deepcopy(plain), head=NAMES), head="medusa.1")
    assert_trains_as_plain(fused, plain, ids, lazy=["medusa.1"])
    assert str(ll.is_fused(fused)) == "The head returns lazy logits."
    assert len(fused._forward_hooks) == 1


def test_a_replaced_head_is_fused(ids, device):
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    new = nn.Linear(D, TEXT).to(device, torch.float64)
    plain.medusa[1], fused.medusa[1] = new, copy.deepcopy(new)
    assert_trains_as_plain(fused, plain, ids)


def test_a_forward_may_call_some_heads(ids, device):
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    assert_trains_as_plain(fused, plain, ids, only=["medusa.0", "others.audio"])
    said = "The heads return lazy logits. The last training forward did not call"
    assert str(ll.is_fused(fused)) == f"{said} 'lm_head', 'medusa.1'."
    assert ll.is_fused(fused)
    assert_trains_as_plain(fused, plain, ids)
    assert str(ll.is_fused(fused)) == "The heads return lazy logits."


def test_a_forward_that_calls_no_head_warns(ids, device):
    fused = ll.fuse(model(device), head=NAMES)
    with pytest.warns(UserWarning, match="fuse has no effect here.*any of its heads") as seen:
        fused(ids, only=[])
    assert len(seen) == 1
    assert not ll.is_fused(fused)
    assert "A training forward of Model did not call any of its heads" in str(ll.is_fused(fused))
    fused(ids, only=["medusa.1"])
    assert ll.is_fused(fused)


def test_a_plain_head_is_named(ids, device):
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    for m in (plain, fused):
        head = m.others["audio"]
        head.forward = lambda x, head=head: x @ head.weight.T
    match = "fuse has no effect on the head 'others.audio', and its logits are plain. The head 'oth"
    with pytest.warns(UserWarning, match=match) as seen:
        fused(ids)
    assert len(seen) == 1
    found = ll.is_fused(fused)
    assert not found
    assert found.reason.startswith("The head 'others.audio', torch.nn.modules.linear.Linear, does")
    assert_trains_as_plain(fused, plain, ids, lazy=NAMES[:3])
    fused.others["audio"] = nn.Identity()
    with pytest.warns(UserWarning, match="on the head 'others.audio'.*head must be a linear layer"):
        fused(ids)


def test_the_report_names_each_head(ids, device):
    fused = ll.fuse(model(device), head=NAMES)
    with pytest.warns(UserWarning, match=r"by Tensor.cumsum, at .*. The head is 'lm_head'."):
        [z.cumsum(-1) for z in fused(ids)]
    found = ll.report(fused)
    assert [(r.head, r.shape, r.count) for r in found] == [
        *((name, (B, T, TEXT), 1) for name in NAMES[:3]),
        (NAMES[3], (B, T, AUDIO), 1),
    ]
    assert str(found[3]).endswith("  others.audio")
    fused(ids)[1].materialize()
    assert [r.head for r in ll.report(fused.medusa)] == ["medusa.0"]
    ll.fuse(fused)
    fused(ids)[0].materialize()
    (record,) = ll.report(fused)
    assert record.head == ""
    assert str(record).endswith(record.line)


@pytest.mark.parametrize(
    ("head", "kind", "match"),
    [
        ([], ValueError, r"head must contain at least one module, got \[\]"),
        (nn.ModuleList(), ValueError, "head must be a module of the model, got a ModuleList that"),
        ("empty", ValueError, "head must contain at least one module, got 'empty'"),
        (
            {"lm_head": 1},
            TypeError,
            "head must be a module of the model, the name of such a module, or a list of modules"
            " and names, got {'lm_head': 1}",
        ),
        (
            ["lm_head", 3],
            TypeError,
            r"head\[1\] must be a module of the model or the module's name, got 3",
        ),
        ([None], TypeError, r"head\[0\] must be a module .*, got None"),
        ([["lm_head"]], TypeError, r"head\[0\] must be a module .*, got \['lm_head'\]"),
        (["lm_head", "nowhere"], AttributeError, "nowhere"),
        (
            ["lm_head", nn.Linear(D, TEXT)],
            ValueError,
            "head must be a module of the model, got a Linear that is not in the model",
        ),
        (
            ["lm_head", "embed"],
            TypeError,
            "head must be a linear layer or a wrapper of one, got torch.nn.modules.sparse.Emb",
        ),
    ],
)
def test_refused(head, kind, match):
    m = Model()
    m.empty = nn.ModuleList()
    ll.fuse(m)
    with pytest.raises(kind, match=match):
        ll.fuse(m, head=head)
    assert type(m(torch.zeros(1, 2, dtype=torch.int64))[0]) is LazyLogits  # the earlier call acts


def test_trl_reads_the_output_embeddings():
    for names in (NAMES, NAMES[::-1]):
        fused = ll.fuse(Model(), head=names)
        guard = _guard_of(fused)
        assert guard is not None
        assert guard.name == "lm_head"
    ll.unfuse(fused.lm_head)
    assert _guard_of(fused) is None  # TRL reads no weight of the heads that are still fused
    assert _guard_of(ll.unfuse(fused)) is None


def test_compiled(ids, device):
    torch._dynamo.reset()
    plain = model(device)
    fused = ll.fuse(copy.deepcopy(plain), head=NAMES)
    compiled = torch.compile(fused, backend="eager")
    logits, got = trained(compiled, ids)
    assert [type(z) for z in logits] == [LazyLogits] * 4
    assert ll.is_fused(fused)
    want = trained(plain, ids)[1]
    for name, value in want.items():
        assert error(got[name if name == "loss" else f"_orig_mod.{name}"], value) < 1e-12, name
