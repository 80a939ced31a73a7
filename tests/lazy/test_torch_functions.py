"""PyTorch's functions of lazy logits: those that keep them lazy, and those that do not."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.lazy.logits import LazyLogits
from tests.support.lazy_models import (
    T,
    V,
    assert_same,
    assert_stays_lazy,
    columns,
    distilled,
    model,
    other,
)

ABSORBED = {
    "F.cross_entropy": lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1)),
    "sum": lambda z, t: F.cross_entropy(z.reshape(-1, V), t.reshape(-1), reduction="sum") / 7,
    "none": lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten(), reduction="none").mean(),
    "smoothed": lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1), label_smoothing=0.1),
    "weighted": lambda z, t: F.cross_entropy(
        z.view(-1, V), t.view(-1), weight=torch.linspace(1, 2, V).to(z)
    ),
    "shifted": lambda z, t: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, V), t[..., 1:].contiguous().view(-1)
    ),
    "one sequence": lambda z, t: F.cross_entropy(z[1], t[1]),
    "rows by mask": lambda z, t: F.cross_entropy(z[t > 3], t[t > 3]),
    "rows by index": lambda z, t: F.cross_entropy(z[0, [1, 3, 3]], t[1, :3]),
    "softcap": lambda z, t: F.cross_entropy((torch.tanh(z / 3) * 3).view(-1, V), t.view(-1)),
    "scaled": lambda z, t: F.cross_entropy((0.5 * z * 3 / 7).view(-1, V), t.view(-1)),
    "columns": lambda z, t: F.cross_entropy(
        z[..., :9].reshape(-1, 9), t.clamp(min=0, max=8).view(-1)
    ),
    "all columns": lambda z, t: F.nll_loss(z.log_softmax(-1)[0, 1:, : V + 3][:, 0:V], t[0, 1:]),
    "nll_loss": lambda z, t: F.nll_loss(F.log_softmax(z, -1).view(-1, V), t.view(-1)),
    "gather": lambda z, t: -z.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).mean(),
    "picked": lambda z, t: z.gather(-1, t.clamp(min=0)[..., None]).square().mean(),
    "logsumexp": lambda z, t: z.logsumexp(-1).square().mean(),
    "total": lambda z, t: z.sum(-1, keepdim=True).square().mean(),
    "label smoother": lambda z, t: (
        (-F.log_softmax(z, -1)).sum(-1, keepdim=True).mean()
        + (-F.log_softmax(z, -1)).gather(-1, t.clamp(min=0)[..., None]).sum()
    ),
    "unbound": lambda z, t: sum(F.cross_entropy(s, u) for s, u in zip(z, t, strict=True)),
    "squeezed": lambda z, t: F.cross_entropy(z[:1].squeeze(0).unsqueeze(0)[0], t[0]),
    "transposed": lambda z, t: F.cross_entropy(
        z.transpose(0, 1).contiguous().view(-1, V), t.transpose(0, -1).reshape(-1)
    ),
    "permuted": lambda z, t: F.cross_entropy(
        z.permute(1, 0, -1).reshape(-1, V), t.permute(1, 0).reshape(-1)
    ),
    "selected": lambda z, t: F.cross_entropy(
        z.index_select(1, torch.tensor([3, 0, 3], device=t.device))[0], t[1, :3]
    ),
    "split": lambda z, t: sum(
        F.cross_entropy(a.reshape(-1, V), b.reshape(-1), reduction="sum")
        for size in (2, [1, 4])
        for a, b in zip(z.split(size, 1), t.split(size, 1), strict=True)
    ),
    "chunk": lambda z, t: sum(
        F.cross_entropy(a.reshape(-1, V), b.reshape(-1), reduction="sum")
        for a, b in zip(z.chunk(2, 1), t.chunk(2, 1), strict=True)
    ),
    "one row": lambda z, t: (
        F.cross_entropy(z[:1, :1].squeeze(), t[0, 0]) + F.cross_entropy(z[:1].squeeze((0, 1)), t[0])
    ),
    "a constant on the host": lambda z, t: F.cross_entropy(
        (z / torch.tensor(0.7) * torch.tensor(2)).view(-1, V), t.view(-1)
    ),
    "twice": lambda z, t: F.cross_entropy(z[0], t[0]) + z.logsumexp(-1).square().mean(),
    "ours": lambda z, t: ll.cross_entropy(z, t, z_loss=0.1) + ll.score(z, t).entropy.mean(),
    "ours by row": lambda z, t: ll.cross_entropy(z, t, reduction="none").square().sum(),
    "classes second": lambda z, t: (
        F.cross_entropy(z.transpose(1, 2), t)
        + F.cross_entropy(z.movedim(-1, 1).contiguous() / 2, t, label_smoothing=0.1)
        + F.cross_entropy(z.permute(1, 2, 0), t.mT, reduction="none").square().sum()
        + F.nll_loss(z.mT.log_softmax(1), t)
        + F.cross_entropy(z.mT.mT.flatten(0, 1), t.flatten())
    ),
    "classes second of four": lambda z, t: F.cross_entropy(
        torch.movedim(z.unsqueeze(2), (3, 0), (1, -1)).swapaxes(0, -1), t.unsqueeze(1)
    ),
    "ours of scaled ones": lambda z, t: (
        ll.cross_entropy(z * 0.5, t, softcap=3.0) + ll.score(z / 3, t, temperature=2.0).lse.sum()
    ),
    "ours of capped ones": lambda z, t: (
        ll.cross_entropy(torch.tanh(z / 3) * 3, t, z_loss=0.1)
        + ll.entropy(torch.tanh(z * 0.2) * 7).square().sum()
    ),
    "a teacher beside scaled ones": lambda z, t: (
        ll.kl_div(
            torch.tanh(z) * 2,
            (torch.tanh(z / 5) * 2).detach()[[1, 0]],
            direction="reverse",
            temperature=3.0,
        )
        + ll.jsd(
            z * 0.3, 2 * z.detach()[[1, 0]], temperature=2.0, reduction="none", softcap=3.0
        ).sum()
        + ll.kl_div(z / 3, z.detach()[[1, 0]], direction="forward", temperature=t.abs() + 0.5)
        + distilled(z * 0.3)
        + ll.soft_cross_entropy(z * 0.3, torch.full(z.shape, 1 / V).to(z))
    ),
    # CLIENTS, the table of operations that were materialised
    "bias": lambda z, t: F.cross_entropy((z + columns(z)).view(-1, V), t.view(-1)),
    "biases": lambda z, t: F.cross_entropy(
        (columns(z)[None] + z / 2 - 3 * columns(z).view(1, 1, V)).view(-1, V), t.view(-1)
    ),
    "a number more": lambda z, t: (z + 1.5).logsumexp(-1).square().sum(),
    "mean": lambda z, t: (
        z.mean() + z.mean(-1).square().sum() + z.mean((0, 2)).square().sum() + z.sum().square()
    ),
    "sums": lambda z, t: (
        z.sum((1, 2), keepdim=True).square().sum() + z.log_softmax(-1).mean() + z.sum(axis=-1).sum()
    ),
    "take_along_dim": lambda z, t: torch.take_along_dim(
        z.log_softmax(-1), t.clamp(min=0)[..., None], -1
    ).sum(),
    "F.kl_div": lambda z, t: (
        F.kl_div(z.log_softmax(-1), other(z).softmax(-1), reduction="batchmean")
        + F.kl_div(F.log_softmax(z / 2, -1), other(z), reduction="sum", log_target=True)
        + F.kl_div(other(z).log_softmax(-1), z.log_softmax(-1), reduction="sum", log_target=True)
    ),
    "F.kl_div of two lazy ones": lambda z, t: (
        F.kl_div(
            F.log_softmax(z / 2, -1),
            F.log_softmax(z.detach()[[1, 0]] / 3, -1),
            reduction="batchmean",
            log_target=True,
        )
        + F.kl_div(
            z.detach()[[1, 0]].log_softmax(-1), z.log_softmax(-1), reduction="sum", log_target=True
        )
    ),
    "soft labels": lambda z, t: (
        F.cross_entropy(z.view(-1, V), other(z).softmax(-1).view(-1, V), label_smoothing=0.1)
        + F.cross_entropy(z.mT, 2 * other(z).softmax(-1).mT, weight=1 + columns(z))
        + F.cross_entropy((z * 3).view(-1, V), other(z).softmax(-1).view(-1, V), reduction="none")
        .square()
        .sum()
    ),
    "max": lambda z, t: z.max(-1).values.square().sum() + z.max(dim=-1, keepdim=True)[0].sum(),
    "min": lambda z, t: (
        z.min(-1)[0].square().sum() + torch.amin(z, -1).sum() + z.amax(-1, keepdim=True).sum()
    ),
    "topk": lambda z, t: z.topk(3, -1).values.square().sum() + torch.topk(z, 2)[0].sum(),
    "softmax, gathered": lambda z, t: (
        z.softmax(-1).gather(-1, t.clamp(min=0)[..., None]).square().sum()
        + F.softmax(z / 2, dim=-1).max(-1)[0].sum()
        + (3 * z.softmax(-1)).topk(2, -1)[0].sum(-1).square().sum()
        + z.log_softmax(-1).exp().amax(-1).sum()
        + z.softmax(-1).view(-1, V).mean()
    ),
    "masked columns": lambda z, t: (
        F.cross_entropy(
            z.masked_fill(columns(z) > 0.8, -torch.inf).view(-1, V), t.clamp(max=7).view(-1)
        )
        + z.masked_fill(columns(z)[None] > 0.8, 2.0).logsumexp(-1).sum()
        + (z / 2).masked_fill(columns(z) > 0.8, 2.0).sum(-1).square().sum()
    ),
    "cat": lambda z, t: F.cross_entropy(
        torch.cat([z, z[:1] * 1.0]).view(-1, V), torch.cat([t, t[:1]]).view(-1)
    ),
    "negative scale": lambda z, t: (
        F.cross_entropy((-z).view(-1, V), t.view(-1)) + (-torch.tanh(z / 2) * 3).logsumexp(-1).sum()
    ),
    "row_loss": lambda z, t: ll.row_loss(
        lambda s, a: -s.logprob * a, z, t, rows=(t.to(z.dtype),), ignore_index=-100
    ),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ABSORBED)
def test_absorbed(name, bias, x, t):
    """The same loss and gradients, and the values are never computed."""
    assert_stays_lazy(x, lambda z: ABSORBED[name](z, t), bias)


MADE = {
    "max and min": lambda z, t: z.max() * 2 + (-z).min().square(),
    "on the host": lambda z, t: F.cross_entropy(z.cpu().view(-1, V), t.cpu().view(-1)),
    "with other arguments": lambda z, t: z.float(memory_format=torch.preserve_format).exp().sum(),
    "split columns": lambda z, t: z.split(4, -1)[1].sum(),
    "sorted": lambda z, t: z.sin().sort(-1)[0][..., 1].sum(),
    "cumulated": lambda z, t: z.exp().cumsum(-1).square().mean(),
    "a mask of values": lambda z, t: z.masked_fill(other(z) > 0, 0.0).flip(-1).square().sum(),
    "a bias per row": lambda z, t: ll.cross_entropy((z + other(z)).view(-1, V), t.view(-1)),
    "F.kl_div by value": lambda z, t: (
        F.kl_div(z.log_softmax(-1), other(z).softmax(-1), reduction="none").flip(-1).exp().sum()
    ),
    "joined with a plain one": lambda z, t: torch.cat([z, other(z)]).square().sum(),
    "sum over rows": lambda z, t: z.sum(0).square().sum(),
    "classes second, as a sum": lambda z, t: z.transpose(1, 2).logsumexp(1).sum(),
    "classes last of three": lambda z, t: F.cross_entropy(z, t[:, :1].expand(-1, V) % T),
    "a column": lambda z, t: z[..., 3].sum(),
    "one more term": lambda z, t: (
        F.cross_entropy(z.view(-1, V), t.view(-1)) + z.exp().cumsum(-1).mean()
    ),
    "two more terms": lambda z, t: (
        z.exp().flip(-1).mean() + z.sin().flip(-1).mean() + F.cross_entropy(z[0], t[0])
    ),
    "of a view": lambda z, t: F.cross_entropy(z[0], t[0]) + z[1].exp().flip(-1).mean(),
    "of a softcap": lambda z, t: (torch.tanh(z / 3) * 3).square().flip(-1).mean(),
    "of log p": lambda z, t: (z.log_softmax(-1).exp() * z.log_softmax(-1)).roll(1).exp().sum(),
    "a learned scale per row": lambda z, t: (
        (z * torch.ones(T, 1, requires_grad=True).to(z)).square().sum()
    ),
    "rows of one batch with rows of another": lambda z, t: (z[:1] * z[1:]).sum(),
    "a repeated mask": lambda z, t: (z * columns(z).expand(T, V)).sum(),
    "materialize": lambda z, t: getattr(z, "materialize", lambda: z)().square().sum(),
    "ours of one capped twice": lambda z, t: ll.cross_entropy(torch.tanh(z), t, softcap=2.0),
    "ours of log p": lambda z, t: ll.cross_entropy(z.log_softmax(-1), t),
    "a label beside scaled ones": lambda z, t: distilled(z * 0.3, labels=t, ce_weight=0.5),
    "a teacher that is a tensor beside scaled ones": lambda z, t: ll.kl_div(
        z * 0.3, torch.linspace(-1, 1, z.numel()).to(z).view(z.shape), direction="forward"
    ),
    "a teacher of log p": lambda z, t: ll.kl_div(
        z, (1.5 * z.detach().flip(0)).log_softmax(-1), direction="forward"
    ),
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("name", MADE)
def test_whatever_is_not_absorbed_is_right_too(name, x, t):
    assert_same(x, lambda z: MADE[name](z, t))


def test_the_dtype_of_a_log_softmax(x):
    z = model(True, x.device, dtype=torch.bfloat16)(x.bfloat16())
    for found in (
        torch.log_softmax(z, -1, torch.float32),
        z.log_softmax(-1, torch.float32),
        F.log_softmax(z, -1, dtype=torch.float32),
    ):
        assert type(found) is LazyLogits
        assert found.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_other_forms_of_a_call(x, t):
    """Absorbed or not, they do what PyTorch does."""
    z, plain = model(True, x.device)(x), model(False, x.device)(x)

    def same(a, b):
        torch.testing.assert_close(a.materialize() if type(a) is LazyLogits else a, b)

    same(z.sum(axis=-1), plain.sum(axis=-1))
    same(z.argmax(axis=-1), plain.argmax(axis=-1))
    same(z.mul(other=2.0), plain.mul(other=2.0))
    same(z[:1].squeeze(), plain[:1].squeeze())
    same(z[(z > 0).cpu().numpy()], plain[(plain > 0).cpu().numpy()])
    same(torch.isfinite(z).all(), torch.isfinite(plain).all())
    same(z.isnan().any(-1), plain.isnan().any(-1))
    same(torch.cat(tensors=[z, z], dim=1), torch.cat(tensors=[plain, plain], dim=1))
    for found, want in ((z.max(-1), plain.max(-1)), (z.topk(2), plain.topk(2))):
        assert type(found) is type(want)
        same(found.indices, want.indices)
    same((z.log_softmax(-1) * 0).argmax(-1), (plain.log_softmax(-1) * 0).argmax(-1))
    tiny = (F.cross_entropy((logits * 1e-13)[1], t[1]) for logits in (z, plain))
    same(*tiny)
    none = torch.zeros(V, device=x.device, dtype=x.dtype)
    assert F.cross_entropy(z[1], t[1], weight=none).isnan()
    assert F.cross_entropy(z[1], torch.full_like(t[1], -100)).isnan()


EXTREMES = {
    "amax": lambda z: z.amax(-1).sum(),
    "amin of rows": lambda z: z.amin(-1).sum(),
    "max of rows": lambda z: z.max(-1)[0].sum(),
    "of a function": lambda z: (z * 1.5).exp().amin(-1).sum(),
}


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, 3, V])
@pytest.mark.parametrize("name", EXTREMES)
def test_ties_of_infinite_values_share_the_gradient(name, count, value, x):
    """As PyTorch divides the gradient among all values that are equal to the extreme value."""
    found = []
    for fused in (True, False):
        m = model(fused, x.device)
        bias = torch.zeros(V).to(x)
        bias[:count] = value
        loss = EXTREMES[name](m(x) + bias)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(m.parameters()))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.5, 1e-3, 30.0])
def test_a_bias_overflows_only_where_plain_logits_do(scale, dtype, x):
    """A scale below 1 is absorbed; the bias divided by this scale may be infinite."""
    most = torch.finfo(dtype).max
    bias = torch.tensor([0.0, most, -most, most / 2, 1, 2, 3, -1, 1e-3, 0, 0], device=x.device)
    z, plain = (model(fused, x.device, dtype=dtype)(x.to(dtype)) for fused in (True, False))
    for change in (
        lambda z: z * scale + bias.to(z), lambda z: bias.to(z) + z * scale,
        lambda z: z * scale - bias.to(z), lambda z: z * scale + most / 2,
        lambda z: (z * scale).masked_fill(torch.arange(V, device=z.device) < 3, -most),
    ):  # fmt: skip
        got, want = change(z), change(plain)
        assert type(got) is LazyLogits
        for function in (lambda z: z.amax(-1), lambda z: z.amin(-1), lambda z: z.mT.mT):
            found, exact = function(got), function(want)
            found = found.materialize() if type(found) is LazyLogits else found
            assert torch.equal(found.isfinite(), exact.isfinite())
            torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
    labels = torch.full((10,), 4, device=x.device)
    found, exact = (
        F.cross_entropy((z * scale + bias.to(z).clamp(max=3)).view(-1, V), labels)
        for z in (z, plain)
    )
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
