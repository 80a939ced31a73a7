"""PyTorch's own test inputs for its own functions give the same numbers here."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import logitless as ll

pytest.importorskip("expecttest")  # PyTorch's own tests need it


def samples_of(name, device):
    """PyTorch's sample inputs for an operator, in fp32, with gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's test code, not ours
        from torch.testing._internal.common_methods_invocations import op_db

        (info,) = (op for op in op_db if op.name == name)
        return list(info.sample_inputs(device, torch.float32, requires_grad=True))


def assert_same(ours, theirs, x):
    """Value and gradient, for a random upstream gradient, of fp32 results."""
    got, want = ours(x), theirs(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    upstream = torch.randn(want.shape).to(want)
    (d_got,), (d_want,) = (torch.autograd.grad(out, x, upstream) for out in (got, want))
    torch.testing.assert_close(d_got, d_want, rtol=1e-5, atol=1e-6, equal_nan=True)


def head(x):
    """Logits as a head makes them: hidden states times the identity, a few rows at a time."""
    V = x.shape[-1]
    return ll.LinearLogits(x, torch.eye(V, device=x.device, dtype=x.dtype), workspace=3 * 32 * V)


def lazy(x):
    module = ll.nn.FusedHead(x.shape[-1], x.shape[-1], bias=False, device=x.device)
    with torch.no_grad():
        module.weight.copy_(torch.eye(x.shape[-1]))
    return module(x)


def as_kept(t, keep):
    return t.unsqueeze(-1) if keep else t


sources = pytest.mark.parametrize(
    "source", [lambda x: x, head, lazy], ids=["tensor", "head", "lazy"]
)


def class_last(x):
    """(N, C, ...) to (N, ..., C)."""
    return x if x.dim() == 1 else x.movedim(1, -1)


@sources
@pytest.mark.few(2)
def test_cross_entropy(source, impl, device):
    """Every sample with class ids: weights, ignore_index, reductions, smoothing, images.

    One choice differs, and is ours: of no rows that count, PyTorch's mean is 0 / 0 and ours 0.
    """
    tried = 0
    for sample in samples_of("nn.functional.cross_entropy", device):
        x, (target,), options = sample.input, sample.args, dict(sample.kwargs)
        if target.is_floating_point() or x.shape[-1 if x.dim() == 1 else 1] == 0:
            continue
        ignore = options.get("ignore_index", -100)
        if options.get("reduction", "mean") == "mean":
            weight = options.get("weight")
            live = target[target != ignore]
            mass = len(live) if weight is None else weight[live].sum()
            if mass == 0:
                assert ll.cross_entropy(source(class_last(x)), target, **options) == 0
                continue
        tried += 1
        assert_same(
            lambda x, t=target, how=options: ll.cross_entropy(source(class_last(x)), t, **how),
            lambda x, t=target, how=options: F.cross_entropy(x, t, **how),
            x,
        )
    assert tried > 8


@sources
@pytest.mark.few(2)
def test_logsumexp(source, impl, device):
    """Every sample, whatever dimension it is for, tried on its last."""
    tried = set()
    for sample in samples_of("logsumexp", device):
        x = sample.input
        if x.dim() == 0 or x.shape[-1] == 0:
            continue
        keep = len(sample.args) > 1 and sample.args[1]
        tried.add(keep)
        assert_same(
            lambda x, keep=keep: as_kept(ll.logsumexp(source(x)), keep),
            lambda x, keep=keep: torch.logsumexp(x, -1, keepdim=keep),
            x,
        )
    assert tried == {False, True}
