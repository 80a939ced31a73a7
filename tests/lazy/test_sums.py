"""The sum of the lazy logits of two heads stays lazy. One head can be a LoRA adapter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from logitless.heads import gemms
from logitless.lazy.logits import LazyLogits

N, D, V, R = 6, 16, 23, 3


class Lora(nn.Module):
    """logits = x @ W.T + b + scale · x @ A.T @ B.T, as PEFT computes them."""

    def __init__(self, scale=1.5, bias=True, ranks=(R,), dtype=torch.float64, own=None):
        super().__init__()
        own = own or dtype
        self.base, self.scale = nn.Linear(D, V, bias=bias, dtype=dtype), scale
        self.a = nn.ModuleList([nn.Linear(D, r, bias=False, dtype=own) for r in ranks])
        self.b = nn.ModuleList([nn.Linear(r, V, bias=bias, dtype=own) for r in ranks])

    def forward(self, x):
        z = self.base(x)
        dtype = z.dtype
        for a, b in zip(self.a, self.b, strict=True):
            z = z + b(a(x.to(a.weight.dtype))) * self.scale
        return z.to(dtype)


class Subtracted(Lora):
    def forward(self, x):
        return self.base(x) - self.b[0](self.a[0](x)) / 3


class Reversed(Lora):
    def forward(self, x):
        return torch.add(self.b[0](self.a[0](x)), self.base(x))


class FullRank(nn.Module):
    """Two heads of the same width over different hidden states."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Linear(D, V, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.one(x) + self.two(x.sin())


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body, self.head = nn.Linear(D, D, dtype=next(head.parameters()).dtype), head

    def forward(self, x):
        return self.head(self.body(x).tanh())


def pair(make, freeze=()):
    """Returns a plain model and a fused copy. `freeze` names the parameters to freeze."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Model(make())
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(tuple(freeze)))
        models.append(model)
    return models[0], ll.fuse(models[1], head="head", workspace=2 * V * 8)


X = torch.randn(2, N // 2, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
T = torch.tensor([[3, -100, 5], [22, 0, 7]])


def differentiated(model, loss):
    value = loss(model(X.to(next(model.parameters()).dtype)))
    value.sum().backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


def assert_equal(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


LOSSES = {
    "cross_entropy": lambda z: F.cross_entropy(z.flatten(0, 1), T.flatten()),
    "shifted": lambda z: F.cross_entropy(z[:, :-1].flatten(0, 1), T[:, 1:].flatten()),
    "by rows": lambda z: F.cross_entropy(z.flatten(0, 1), T.flatten(), reduction="none") ** 2,
    "of logitless": lambda z: ll.cross_entropy(z, T, z_loss=1e-2, label_smoothing=0.1),
    "entropy": lambda z: ll.entropy(z[:, 1:] * 2),
    "softmax": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "fewer classes": lambda z: F.cross_entropy(
        z[..., :20].flatten(0, 1), T.clamp(max=19).flatten()
    ),
    "joined": lambda z: F.cross_entropy(torch.cat([z[0], z[1]]), T.flatten()),
    "negated": lambda z: F.cross_entropy((-z).flatten(0, 1) / 0.7, T.flatten()),
    "masked": lambda z: F.cross_entropy(
        z.masked_fill(torch.arange(V) == 2, -1e3).flatten(0, 1), T.flatten()
    ),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses(loss):
    plain, fused = pair(Lora)
    assert_equal(differentiated(fused, loss), differentiated(plain, loss))
    assert not ll.report(fused)
    assert ll.is_fused(fused), ll.is_fused(fused)


HEADS = {
    "power of two": lambda: Lora(2.0),
    "no bias": lambda: Lora(bias=False),
    "two adapters": lambda: Lora(ranks=(2, 2)),
    "subtracted": Subtracted,
    "reversed": Reversed,
    "full rank": FullRank,
}
FROZEN = {"": (), "lora": ("head.base",), "alone": ("body", "head.base"), "base": ("head.b.",)}


@pytest.mark.parametrize("freeze", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_heads_and_what_is_frozen(make, freeze):
    plain, fused = pair(make, freeze)
    loss = LOSSES["cross_entropy"]
    assert_equal(differentiated(fused, loss), differentiated(plain, loss))
    assert not ll.report(fused)


def test_too_many_adapters_are_materialised():
    """Several adapters are copied into one matrix. If it is too wide, the sum is materialised."""
    plain, fused = pair(lambda: Lora(ranks=(8, 8)))
    loss = LOSSES["cross_entropy"]
    with pytest.warns(UserWarning, match="fuse has no effect here|logits of a fused head") as seen:
        got = differentiated(fused, loss)
    assert len(seen) == 2
    assert_equal(got, differentiated(plain, loss))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_in_fp32_over_a_16_bit_head(dtype):
    """The error against fp64 is at most twice the plain model's. The logits are 16-bit."""

    def make():
        return Lora(0.5, dtype=dtype, own=torch.float32)

    plain, fused = pair(make)
    exact = Model(Lora(0.5)).double()
    exact.load_state_dict(plain.state_dict())
    results = [differentiated(model, LOSSES["cross_entropy"]) for model in (exact, plain, fused)]
    assert fused(X.to(dtype)).dtype == dtype
    assert not ll.report(fused)
    for truth, near, got in zip(*results, strict=True):
        assert got.dtype == near.dtype
        floor = torch.finfo(dtype).eps * truth.abs().max()
        assert (got - truth).abs().max() <= 2 * (near - truth).abs().max() + floor


def test_autocast():
    plain, fused = pair(lambda: Lora(0.5, dtype=torch.float32))
    results = []
    for model in (plain, fused):
        with torch.autocast("cpu", torch.bfloat16):
            z = model(X.float())
            assert z.dtype == torch.bfloat16
            loss = F.cross_entropy(z.flatten(0, 1), T.flatten())
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert not ll.report(fused)
    assert_equal(*results, rtol=0.05, atol=0.01)


def test_a_frozen_layer_costs_one_large_gemm(monkeypatch):
    """The only GEMM with a size of D computes the logits, because W and x need no gradient."""
    _, fused = pair(Lora, FROZEN["alone"])
    sizes, plain = [], gemms.plain_gemm

    def counted(a, b, *rest):
        sizes.append((a.shape[1], b.shape[1]))
        return plain(a, b, *rest)

    z = fused(X)
    monkeypatch.setattr(gemms, "plain_gemm", counted)
    F.cross_entropy(z.flatten(0, 1), T.flatten()).backward()
    wide = [size for size in sizes if D in size]
    assert wide
    assert all(size == (D, V) for size in wide)


def test_values():
    """The materialised sum has the values and the gradients of the plain sum."""
    plain, fused = pair(lambda: Lora(2.0))
    z = fused(X)
    assert type(z) is LazyLogits
    torch.testing.assert_close(z.materialize(), plain(X))
    assert_equal(
        differentiated(fused, lambda z: z.materialize().square()),
        differentiated(plain, lambda z: z.square()),
    )


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_hooks_see_the_gradient_of_the_sum():
    grads = []
    for model in pair(Lora):
        z = model(X)
        z.register_hook(lambda g: grads.append(g.clone()) or 2 * g)
        F.cross_entropy(z.flatten(0, 1), T.flatten()).backward()
        grads.append([p.grad for p in model.parameters()])
    (of_plain, plain, of_fused, fused) = grads
    torch.testing.assert_close(of_fused, of_plain)
    assert_equal(fused, plain)


@pytest.mark.parametrize("write", ["step", "data", "base"])
def test_a_changed_adapter_is_noticed(write):
    _, fused = pair(Lora)
    z = fused(X)
    weight = fused.head.base.weight if write == "base" else fused.head.b[0].weight
    with torch.no_grad():
        if write == "step":
            weight.add_(1)
        else:
            weight.data.view(-1).copy_(torch.zeros(weight.numel()))
    with pytest.raises(RuntimeError, match="must not be modified in place"):
        F.cross_entropy(z.flatten(0, 1), T.flatten())


def test_a_second_backward():
    plain, fused = pair(Lora)
    grads = []
    for model in (plain, fused):
        loss = F.cross_entropy(model(X).flatten(0, 1), T.flatten())
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_equal(*grads)


def test_one_without_a_gradient_is_not_part_of_the_head():
    """A teacher's logits, subtracted from a student's, are an input of the formula of the sum."""
    _, student = pair(FullRank)
    with torch.no_grad(), ll.lazy_logits():
        teacher = student.head.two(X)
        other = ll.LinearLogits(X, student.head.one.weight.detach()).lazy()
    z = student(X) - (teacher if type(teacher) is LazyLogits else other)
    assert z.recipe.inputs


def test_inference():
    plain, fused = pair(Lora)
    with torch.no_grad():
        want = plain(X)
        assert torch.equal(fused(X), want)  # small logits are plain
        with ll.lazy_logits():
            z = fused(X)
        assert type(z) is LazyLogits
        torch.testing.assert_close(ll.entropy(z), ll.entropy(want))
        torch.testing.assert_close(
            ll.capture_topk(z, 3).logprobs, ll.capture_topk(want, 3).logprobs
        )
    assert not ll.report(fused)
