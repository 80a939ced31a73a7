"""What autograd may ask of a loss: once through, twice refused, in place after, and functorch."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import logitless as ll


def make(rows=4, vocab=50, device="cpu"):
    return torch.randn(rows, vocab, device=device), torch.randint(0, vocab, (rows,), device=device)


def test_a_second_differentiation_raises(impl, device):
    """Not silently the gradient without its second part."""
    x, target = make(device=device)
    leaf = x.requires_grad_()
    loss = ll.cross_entropy(leaf, target)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        (loss + grad.square().sum()).backward()


def test_in_place_refuses_create_graph(impl, device):
    x, target = make(device=device)
    logits = x.requires_grad_() * 1
    loss = ll.cross_entropy(logits, target, inplace=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("function", ["logsumexp", "entropy", "token_logprobs", "cross_entropy"])
def test_results_may_be_written_to(function, device):
    """`logprobs *= mask` is common code."""
    x, target = make(device=device)
    leaf = x.requires_grad_()
    arguments = {"token_logprobs": (target,), "cross_entropy": (target,)}.get(function, ())
    options = {"reduction": "none"} if function == "cross_entropy" else {}
    want = getattr(ll, function)(leaf, *arguments, **options) * 2
    with ll.impl("eager"):
        got = getattr(ll, function)(leaf, *arguments, **options).clone().detach()
        out = getattr(ll, function)(leaf, *arguments, **options)
        if function != "entropy":  # which backward needs, and PyTorch says so
            out.mul_(2)
            out.sum().backward()
            assert torch.equal(out, got * 2)
    torch.testing.assert_close(got * 2, want.detach())


def test_functional_gradients(impl, device):
    x, target = make(device=device)
    got = torch.func.grad(lambda x: ll.cross_entropy(x, target))(x)
    want = torch.func.grad(lambda x: F.cross_entropy(x, target))(x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("K", [1, 3])
def test_a_row_of_minus_inf_has_no_gradient_for_its_ids(K, impl, device):
    x, _ = make(device=device)
    x[1] = -torch.inf
    leaf = x.requires_grad_()
    ids = torch.tensor([[0, 5, 0]] * 4, device=device)[:, :K]
    ll.token_logprobs(leaf, ids)[[0, 2, 3]].sum().backward()
    assert torch.equal(leaf.grad[1], torch.zeros(50, device=device))
    leaf.grad = None
    ll.token_logprobs(leaf, ids).sum().backward()
    assert torch.equal(leaf.grad[1], torch.zeros(50, device=device))
    assert leaf.grad.isfinite().all()


def test_an_ignored_row_reads_no_class_weight(impl, device):
    x, target = make(device=device)
    target[0], target[1:] = -100, 3
    weight = torch.ones(50, device=device)
    weight[0] = torch.inf
    loss = ll.cross_entropy(x, target, weight=weight, reduction="none")
    torch.testing.assert_close(loss, F.cross_entropy(x, target, weight=weight, reduction="none"))


def test_an_ignore_index_beyond_int32_is_no_class(impl, device):
    x, target = make(device=device)
    want = F.cross_entropy(x, torch.zeros_like(target))
    got = ll.cross_entropy(x, torch.zeros_like(target).int(), ignore_index=2**32)
    torch.testing.assert_close(got, want)


def test_overlapping_logits_cannot_be_overwritten(device):
    base = torch.randn(20, device=device).requires_grad_() * 1
    logits = base.unfold(0, 7, 1)
    target = torch.zeros(14, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="must not share memory"):
        ll.cross_entropy(logits, target, inplace=True)


def test_no_rows_share_no_memory(device):
    """Whatever their strides."""
    logits = torch.empty_strided((2, 0, 1), (0, 1, 0), device=device).requires_grad_()
    target = torch.empty((2, 0), dtype=torch.int64, device=device)
    assert ll.cross_entropy(logits, target, inplace=True) == 0


def test_in_place_under_a_watching_mode(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(4, 50, device=device, requires_grad=True) * 1
        loss = ll.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=device), inplace=True)
        assert loss.shape == ()


def test_wide_rows_in_place_under_the_interpreter(device):
    """Programs that run one after another cannot wait for each other."""
    x = torch.randn(1, 9000, device=device)
    target = torch.tensor([17], device=device)
    leaf = x.clone().requires_grad_()
    with ll.impl("triton"):
        ll.cross_entropy(leaf * 1, target, inplace=True).backward()
    want = x.clone().requires_grad_()
    F.cross_entropy(want, target).backward()
    torch.testing.assert_close(leaf.grad, want.grad)


TARGETS = ll.SparseTargets(torch.tensor([[0, 5, 9]] * 4), torch.tensor([[-1.0, -2.0, -3.0]] * 4))
EVERY_LOSS = {
    "cross_entropy": lambda x, t: ll.cross_entropy(x, t),
    "smoothed": lambda x, t: ll.cross_entropy(x, t, label_smoothing=0.1),
    "entropy": lambda x, t: ll.entropy(x).sum(),
    "token_logprobs": lambda x, t: ll.token_logprobs(x, t).sum(),
    "kl_div": lambda x, t: ll.kl_div(x, x.detach().flip(0), direction="reverse"),
    "jsd": lambda x, t: ll.jsd(x, x.detach().flip(0)),
    "gathered_kl": lambda x, t: ll.gathered_kl(x, torch.log_softmax(x.detach().flip(0), -1)),
    **{
        support: lambda x, t, support=support: ll.topk_distill(
            x, TARGETS.to(x.device), divergence="jsd", support=support
        )
        for support in ("truncate", "renorm", "tail")
    },
}


@pytest.mark.parametrize("loss", EVERY_LOSS.values(), ids=EVERY_LOSS.keys())
def test_under_a_checkpoint_and_in_torch_func(loss, impl, device):
    """A checkpoint gives what was saved once; torch.func wants functions of its own form."""
    x, target = make(device=device)
    leaf = x.requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf, target), leaf)
    again = torch.utils.checkpoint.checkpoint(loss, leaf, target, use_reentrant=False)
    (got,) = torch.autograd.grad(again, leaf)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach(), target), want)


@pytest.mark.parametrize("loss", ["cross_entropy", "kl_div", "topk_distill", "a head"])
def test_second_derivatives_are_refused_on_every_route(loss, impl, device):
    """Never zeros: functional.hessian, torch.func and create_graph."""
    x = torch.randn(3, 9, device=device)
    target, teacher = torch.tensor([1, 2, 3], device=device), torch.randn(3, 9, device=device)
    targets = ll.capture_topk(teacher, 2)
    w = torch.randn(7, 9, device=device)
    f = {
        "cross_entropy": lambda x: ll.cross_entropy(x, target),
        "kl_div": lambda x: ll.kl_div(x, teacher, direction="forward"),
        "topk_distill": lambda x: ll.topk_distill(
            x, targets, divergence="forward_kl", support="tail"
        ),
        "a head": lambda x: ll.cross_entropy(ll.LinearLogits(x, w), target),
    }[loss]
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.functional.hessian(f, x)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        grad.square().sum().backward()
    if loss != "a head":
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.func.grad(lambda y: torch.func.grad(f)(y).sum())(x)


@pytest.mark.parametrize("options", [
    {}, {"label_smoothing": 0.1}, {"weight": True}, {"reduction": "sum"}, {"row_weight": True},
])  # fmt: skip
@pytest.mark.parametrize("strided", [False, True])
def test_small_logits_have_their_gradient_made_in_forward(
    options, strided, impl, device, monkeypatch
):
    """The same gradient, rounded once, for any upstream; also a second time."""
    from logitless.core import evaluate

    x = torch.randn(2, 3, 2, 37, device=device).bfloat16()
    x = x.permute(2, 1, 0, 3) if strided else x  # rows of three strides
    target = torch.randint(0, 37, x.shape[:-1], device=device)
    target[0, 1, 1] = -100
    tensors = {"weight": torch.rand(37, device=device), "row_weight": torch.rand_like(x[..., 0])}
    options = {name: tensors.get(name, value) for name, value in options.items()}
    grads = []
    for at_once, logits in ((False, x), (True, x), (True, x.contiguous())):
        monkeypatch.setattr(evaluate, "on_gpu", lambda x, at_once=at_once: at_once)
        leaf = logits.detach().requires_grad_()
        loss = ll.cross_entropy(leaf, target, **options)
        (once,) = torch.autograd.grad(loss * 0.3, leaf, retain_graph=True)
        (again,) = torch.autograd.grad(loss * 0.3, leaf)
        assert torch.equal(once, again)
        grads.append(once)
    # One step of bf16: Triton's interpreter cuts it off where a GPU rounds.
    torch.testing.assert_close(*grads[:2], rtol=2**-7, atol=1e-6)
    assert torch.equal(*grads[1:])  # strides change nothing


def test_what_is_made_once_is_no_inference_tensor(device):
    """Autograd could not save it: a first call in inference mode would spoil all later ones."""
    from logitless.contract import made_once

    zero = made_once(lambda device: torch.zeros((), device=device))
    with torch.inference_mode():
        first = zero[torch.device(device)]
    assert not first.is_inference()
    assert zero[torch.device(device)] is first
