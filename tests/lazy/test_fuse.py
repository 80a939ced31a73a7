"""fuse(model): any model with a linear head, and what it refuses."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from logitless.lazy import report
from logitless.lazy.logits import LazyLogits
from tests.support.fusable_models import D, Model, V


@pytest.fixture
def ids(device):
    return torch.randint(0, V, (2, 5), device=device)


def grads(model, ids):
    model.zero_grad()
    loss = F.cross_entropy(model(ids).view(-1, V), ids.view(-1))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_fused_and_right(model, ids):
    assert type(model(ids)) is LazyLogits
    plain = copy.deepcopy(model)
    assert type(plain(ids)) is LazyLogits
    want = grads(ll.unfuse(plain), ids)
    assert type(plain(ids)) is torch.Tensor
    torch.testing.assert_close(grads(model, ids), want)


@pytest.mark.parametrize("head", [None, "lm_head", "module"])
def test_the_head_is_found_named_or_given(head, ids, device):
    model = Model().to(device)
    given = model.lm_head if head == "module" else head
    assert ll.fuse(model, head=given) is model
    assert_fused_and_right(model, ids)


def test_switched_off_by_the_environment(ids, device, monkeypatch):
    model = ll.fuse(Model().to(device))
    monkeypatch.setenv("LOGITLESS_FUSE", "0")
    assert ll.fuse(model) is model  # also undoes the first call
    assert type(model(ids)) is torch.Tensor
    assert ll.is_fused(model).reason == "LOGITLESS_FUSE=0 switches fuse off."
    with pytest.raises(TypeError, match="workspace must be"):
        ll.fuse(model, workspace="large")
    monkeypatch.setenv("LOGITLESS_FUSE", "off")
    with pytest.raises(ValueError, match="LOGITLESS_FUSE must be 0 or 1, got 'off'"):
        ll.fuse(model)
    monkeypatch.setenv("LOGITLESS_FUSE", "1")
    assert ll.is_fused(ll.fuse(model))


def test_twice_is_once_with_other_options(ids, device):
    model = ll.fuse(ll.fuse(Model().to(device)), workspace=3 * V * 4)
    assert_fused_and_right(model, ids)
    assert model(ids).recipe.head.workspace == 3 * V * 4
    assert len(model._forward_pre_hooks) == 1
    ll.unfuse(model)
    assert not model._forward_pre_hooks
    assert "forward" not in model.lm_head.__dict__


def test_tied_weights_and_a_new_head(ids, device):
    model = Model().to(device)
    model.lm_head.weight = model.embed.weight
    ll.fuse(model)
    assert_fused_and_right(model, ids)
    model.lm_head = nn.Linear(D, V, device=device)  # as resize_token_embeddings does
    assert_fused_and_right(model, ids)


class Sharded(nn.Module):
    """A linear layer inside a module whose names are those of FSDP1."""

    def __init__(self):
        super().__init__()
        self._fsdp_wrapped_module = nn.Linear(D, V)

    def forward(self, x):
        return self._fsdp_wrapped_module(x)


@pytest.mark.parametrize(
    ("make", "how", "kind", "match"),
    [
        (lambda: Model(nn.Conv1d(D, V, 1)), {}, TypeError, "got torch.nn.modules.conv.Conv1d"),
        (
            lambda: Model(nn.ParameterList([torch.ones(V, D)])),
            {},
            TypeError,
            "head must be a linear layer or a wrapper of one, got torch.nn.modules.container.Par",
        ),
        (lambda: nn.Sequential(nn.Linear(D, V)), {}, ValueError, "head must be given for Sequen"),
        (Model, {"head": "nowhere"}, AttributeError, "nowhere"),
        (
            Model,
            {"head": nn.Linear(D, V)},
            ValueError,
            "head must be a module of the model, got a Linear that is not in",
        ),
        (Model, {"hidden": 3}, TypeError, "fuse must be called with only the arguments"),
        (Model, {"worksp": 3}, TypeError, "Did you mean 'workspace'"),
        (Model, {"main_grad": 3}, TypeError, "options must not include main_grad"),
        (Model, {"low_rank": None}, TypeError, "options must not include low_rank"),
        (Model, {"head": 3}, TypeError, "head must be a module of the model, the name of"),
        (Model, {"workspace": -1}, ValueError, "workspace must be positive, got -1"),
        (Model, {"workspace": "x"}, TypeError, "workspace must be an int, in bytes, got 'x'"),
        (Model, {"accumulate": "foo"}, ValueError, "accumulate must be one of"),
        (Model, {"logits_dtype": torch.int8}, ValueError, "logits_dtype must be one of"),
        (Model, {"logits_dtype": "fp32"}, ValueError, "logits_dtype must be one of"),
        (Model, {"drop_ignored": 3}, TypeError, "drop_ignored must be True or False, got 3"),
        (
            lambda: Model(Sharded()),
            {},
            TypeError,
            "head must not be inside a FullyShardedDataParallel of its own",
        ),
    ],
)
def test_refused(make, how, kind, match):
    with pytest.raises(kind, match=match):
        ll.fuse(make(), **how)


def test_a_replica_uses_its_own_weight(ids, device):
    """As DataParallel makes them: the dictionary is copied, bound method and all."""
    model = ll.fuse(Model().to(device))
    replica = model._replicate_for_data_parallel()
    replica.lm_head = model.lm_head._replicate_for_data_parallel()
    replica._modules = {**model._modules, "lm_head": replica.lm_head}
    replica.lm_head.weight = model.lm_head.weight.detach().clone().requires_grad_()
    replica.lm_head.bias = None
    F.cross_entropy(replica(ids).view(-1, V), ids.view(-1)).backward()
    assert replica.lm_head.weight.grad.abs().sum() > 0
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_logits_dtype_is_kept_without_gradients(without, ids, device):
    model = ll.fuse(Model().to(device), logits_dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        want = model(ids)
        with without():
            got = model(ids)
    assert (got.dtype, want.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(got.clone(), want.materialize().detach())


def func_grad(model, ids):
    def loss(params):
        return torch.func.functional_call(model, params, (ids,)).square().mean()

    torch.func.grad(loss)(dict(model.named_parameters()))


TORCH_FUNC = "transforms of torch.func.* Values and gradients are right"
PLAIN = {  # a program that gets plain logits, and the reason
    "grad": (func_grad, TORCH_FUNC),
    "vmap": (lambda model, ids: torch.vmap(model)(ids), TORCH_FUNC),
    "jit.trace": (
        lambda model, ids: torch.jit.trace(model, (ids,), check_trace=False),
        "torch.jit.trace records the head",
    ),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")  # of torch.jit.trace
@pytest.mark.parametrize("name", PLAIN)
def test_plain_logits_say_why(name, ids, device, monkeypatch):
    """One warning and is_fused give the same reason, until a forward returns lazy logits again."""
    monkeypatch.setattr(report, "_warned", set())
    program, reason = PLAIN[name]
    model = ll.fuse(Model().to(device))
    with pytest.warns(UserWarning, match=reason) as seen:
        program(model, ids)
    program(model, ids)  # does not warn again
    assert len([w for w in seen if "logits" in str(w.message)]) == 1
    found = ll.is_fused(model)
    assert not found
    assert re.search(reason, found.reason)
    assert type(model(ids)) is LazyLogits
    assert ll.is_fused(model)
