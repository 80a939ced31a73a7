"""What sampled_softmax and its module refuse, and the messages."""

import pytest
import torch

import logitless as ll
from tests.support.sampled import D, K, N, V, case

BAD = {
    "hidden must be a plain Tensor": {"hidden": [1.0]},
    r"weight must have shape \(V, 5\)": {"weight": torch.zeros(V, D + 1)},
    r"negatives must have shape \(K,\) or \(7, K\)": {"negatives": torch.zeros(N + 1, 3).long()},
    r"negatives must hold at least one id, got shape \(0,\)": {"negatives": torch.zeros(0).long()},
    r"log_q must have shape \(30,\)": {"log_q": torch.zeros(K + 1)},
    "log_q must not require grad": {"log_q": torch.zeros(K, requires_grad=True)},
    r"target_log_q must have shape \(7,\)": {"target_log_q": torch.zeros(1)},
    r"temperature must be one number for all rows, got a Tensor\.$": {"temperature": torch.ones(N)},
    "multiply the hidden states by the scale": {"temperature": torch.ones((), requires_grad=True)},
    r"target must be in \[0, 20\) or ignore_index \(-100\), got 20 at row 0": {
        "target": torch.tensor([V] + [0] * (N - 1))
    },
    r"negatives must be in \[0, 20\), got -1 at slot 1": {"negatives": torch.tensor([0, -1])},
    r"negatives must be in \[0, 20\), got 99 at row \(2, 1\)": {
        "negatives": torch.tensor([[0, 0]] * 2 + [[0, 99]] + [[0, 0]] * (N - 3))
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    tensors, how = case("cpu", torch.float32)
    given = tensors | how | {"log_q": None, "target_log_q": None} | BAD[message]
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        ll.sampled_softmax(**given)


def test_not_inside_func():
    tensors, how = case("cpu", torch.float32)
    hidden, rest = tensors.pop("hidden"), tensors | how
    message = r"sampled_softmax must be differentiated by torch\.autograd"
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda h: ll.sampled_softmax(h, **rest))(hidden)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_autocast_refuses_fp64_beside_other_dtypes(name):
    tensors, how = case("cpu", torch.float32)
    tensors[name] = tensors[name].double()
    message = rf"{name} must be torch\.float32 like hidden, got torch\.float64"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=message):
        ll.sampled_softmax(**tensors, **how)


def test_bad_options_of_the_module():
    with pytest.raises(ValueError, match="reduction must be one of"):
        ll.nn.SampledSoftmaxLoss(reduction="avg")
    with pytest.raises(TypeError, match="temperature must be one number"):
        ll.nn.SampledSoftmaxLoss(temperature=torch.ones(3))
    assert "remove_hits=False" in repr(ll.nn.SampledSoftmaxLoss(remove_hits=False))
