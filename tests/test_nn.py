"""Modules are their functions, and refuse a bad option when they are built."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support import heads, inputs
from tests.support.inputs import V
from tests.support.refusals import refusal, refuses

SPARSE = {"divergence": "tvd", "support": "tail"}


BAD_MODULES = {
    "reduction": (lambda v: ll.nn.CrossEntropyLoss(reduction=v), "avg"),
    "reduction of a head's": (lambda v: ll.nn.LinearCrossEntropyLoss(reduction=v), "avg"),
    "reduction of jsd": (lambda v: ll.nn.JSDLoss(reduction=v), None),
    "reduction of tvd": (lambda v: ll.nn.TVDLoss(reduction=v), "avg"),
    "label_smoothing": (lambda v: ll.nn.CrossEntropyLoss(label_smoothing=v), 2),
    "z_loss": (lambda v: ll.nn.CrossEntropyLoss(z_loss=v), -1),
    "ignore_index": (lambda v: ll.nn.Score(ignore_index=v), None),
    "temperature": (lambda v: ll.nn.LogSumExp(temperature=v), 0),
    "softcap": (lambda v: ll.nn.Entropy(softcap=v), -1),
    "direction": (lambda v: ll.nn.KLDivLoss(direction=v), "back"),
    "divergence": (lambda v: ll.nn.TopKDistillLoss(divergence=v, support="tail"), "kl"),
    "support": (lambda v: ll.nn.TopKDistillLoss(divergence="tvd", support=v), "top"),
    "beta": (lambda v: ll.nn.JSDLoss(beta=v), 2),
    "ce_weight": (lambda v: ll.nn.TopKDistillLoss(**SPARSE, ce_weight=v), float("nan")),
    "accumulate": (lambda v: ll.nn.FusedHead(2, 3, accumulate=v), "bf16"),
}


@pytest.mark.parametrize("name", BAD_MODULES)
def test_a_module_refuses_a_bad_option_when_it_is_made(name):
    make, value = BAD_MODULES[name]
    words = refusal(lambda: make(value))
    assert words.startswith(f"{name.split()[0]} must ")
    assert words.endswith(f"got {value!r}.")


def test_a_module_refuses_class_weights_as_its_function_does():
    with refuses(TypeError, "weight must be a Tensor of class weights, got list."):
        ll.nn.CrossEntropyLoss([1.0] * 5)


def test_cross_entropy_is_pytorchs_on_defaults(impl, device):
    x, target = inputs.make(rows=(9,), device=device)
    module = ll.nn.CrossEntropyLoss(
        torch.linspace(0.1, 1, V), ignore_index=3, reduction="sum", label_smoothing=0.1
    ).to(device)
    torch_module = torch.nn.CrossEntropyLoss(
        torch.linspace(0.1, 1, V), ignore_index=3, reduction="sum", label_smoothing=0.1
    ).to(device)
    torch.testing.assert_close(module(x, target), torch_module(x, target))


def test_heads(device):
    hidden, weight, bias, target = heads.make(torch.float32, device)
    want = F.cross_entropy(F.linear(hidden, weight, bias), target, label_smoothing=0.1)
    module = ll.nn.LinearCrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(module(hidden, weight, target, bias), want)
    head = ll.nn.FusedHead(heads.D, heads.V, workspace=3 * heads.V * 4, device=device)
    head.load_state_dict({"weight": weight, "bias": bias})
    loss = ll.cross_entropy(head(hidden), target, label_smoothing=0.1)
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert head.weight.grad.abs().sum() > 0
