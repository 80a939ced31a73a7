"""The steps of programs over lazy logits (lazy_programs.py), as Python texts of a tensor `t`.

Each text is drawn from the shape of a plain tensor, and is the same for plain and lazy logits.
"""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll


def index(r: random.Random, shape) -> str:
    parts = []
    for size in shape[: r.randint(1, len(shape))]:
        choice = r.randint(0, 6)
        low = r.randint(0, max(size - 1, 0))
        parts.append(
            [
                ":", f"{low}:", f":{low + 1}", str(low - r.choice((0, size))), "None",
                f"[{low}, {size - 1}]", f"torch.arange({size}) >= {low}",
            ][choice]
        )  # fmt: skip
    if r.random() < 0.2 and "None" not in parts:
        parts = ["...", parts[-1]]
    return ", ".join(parts)


def views(r: random.Random, shape) -> list[str]:
    dims, d = len(shape), r.randrange(len(shape))
    e = r.randrange(dims)
    order = list(range(dims))
    r.shuffle(order)
    size = shape[d]
    return [
        f"t[{index(r, shape)}]", f"t[{index(r, shape)}]", f"t.view(-1, {shape[-1]})",
        "t.reshape(-1)", f"t.transpose({d}, {e})", f"t.permute({order})", "t.contiguous()",
        "t.flatten(0, -2)" if dims > 1 else "t.flatten()", f"t.unsqueeze({d})", "t.squeeze()",
        f"t.narrow({d}, 0, {max(size - 1, 0)})", f"t.split({max(size // 2, 1)}, {d})[0]",
        f"t.chunk(2, {d})[-1]", f"t.unbind({d})[0]", "t.detach()", "t.clone()", "t.data",
        f"t.index_select({d}, torch.tensor([0, {size - 1}]))", "t.expand(2, *t.shape)",
        f"t.movedim({d}, {e})", f"t.select({d}, 0)", "t.view_as(t)", "t.double()", "t.cpu()",
        "t.mT" if dims > 1 else "t.T",
    ]  # fmt: skip


def values(r: random.Random, shape) -> list[str]:
    n, c = shape[-1], r.choice(("0.5", "-2.0", "3", "torch.tensor(1.5)"))
    return [
        f"t * {c}", f"{c} * t", f"t / {c}", "-t", "torch.tanh(t)", "t.log_softmax(-1)",
        "F.softmax(t, dim=-1)", "t.exp().clamp(max=50)", "t.sin()",
        f"t + torch.linspace(0, 1, {n})",
        f"torch.linspace(0, 1, {n}).view(1, -1) + t", "t - 0.5", "t * t.detach()",
        f"t.masked_fill(torch.arange({n}) < {n // 2}, {r.choice(('2.0', '-3.0'))})",
        "torch.cat([t, t])", "torch.cat([t, t[:1]])", "torch.where(t > 0, t, 0.1)",
        "torch.cat([t.detach(), t], -1)", "ll_materialize(t)", "torch.stack([t, t])",
        "t.clamp(max=1.0)", "3 * torch.tanh(t / 3)", "t.relu()", "t.float().double()",
        *expressions(r, shape),
    ]  # fmt: skip


def expressions(r: random.Random, shape) -> list[str]:
    """Functions of each value, of whole rows, and of several tensors."""
    mask = f"(probs({list(shape[:-1])} + [1]) > 0.5)"
    other = r.choice(("t.detach()", "t.softmax(-1)", "t.log_softmax(-1)", "t.flip(0)", "t * 2"))
    return [
        f"t * {mask}", f"t.masked_fill({mask}, 0.3)", "t.masked_fill(probs(t.shape) > 0.2, -1.0)",
        f"torch.where({mask}, t, {other})", f"torch.where(t > 0, {other}, t)", f"t * {other}",
        f"t - {other}", f"torch.maximum(t, {other})", f"torch.logaddexp({other}, t)",
        f"torch.addcmul(t, t.tanh(), {other})", "torch.lerp(t, probs(t.shape), 0.3)",
        "t - t.max(-1, keepdim=True)[0]", "t - t.logsumexp(-1, keepdim=True)", "t / (1 + t.abs())",
        "1 - t", "1 / (1 + t.square())", "2 ** t.clamp(max=3)", "t.sigmoid()", "F.softplus(t)",
        "F.logsigmoid(t)", "t.square()", "torch.special.entr(t.softmax(-1))", "t.exp() - 1",
        "torch.xlogy(t.softmax(-1), t.softmax(-1))", "t.nan_to_num()", "(t.abs() + 0.1).sqrt()",
        "F.kl_div(t.log_softmax(-1), probs(t.shape), reduction='none')",
        "F.kl_div(t.log_softmax(-1), t.detach().exp(), reduction='none')",
        "F.mse_loss(t, probs(t.shape), reduction='none')", "(t + probs(t.shape)).log_softmax(-1)",
        "t.double() * (t > 0)", "-t.softmax(-1) * t.log_softmax(-1)", "t.cos().softmax(-1)",
    ]  # fmt: skip


def reductions(r: random.Random, shape) -> list[str]:
    n, d = shape[-1], r.choice(("-1", "-1", "-1", "0"))
    keep = r.choice(("", ", keepdim=True"))
    ids = f"ids({list(shape[:-1])}, {n})"
    labels = f"ids([{rows(shape)}], {n}).view(-1)"
    flat = f"t.reshape(-1, {n})"
    probs = "probs(t.shape)"
    return [
        f"t.sum({d}{keep})", f"t.mean({d}{keep})", "t.sum()", "t.mean()", f"t.logsumexp({d}{keep})",
        f"t.max({d}{keep})[0]", f"t.min({d})[0]", f"t.amax({d})", "t.max()", "t.min()",
        f"t.topk({min(2, n)}, -1)[0]", f"t.argmax({d}).double()",
        "torch.isfinite(t).all().double()",
        f"t.gather(-1, {ids}[..., None])", f"torch.take_along_dim(t, {ids}[..., None], -1)",
        f"t.softmax(-1).gather(-1, {ids}[..., None])", "t.softmax(-1).amax(-1)",
        f"F.cross_entropy({flat}, {labels})",
        f"F.cross_entropy({flat}, {labels}, reduction='none')",
        f"F.nll_loss({flat}.log_softmax(-1), {labels}, reduction='sum')",
        f"F.cross_entropy({flat}, probs([{rows(shape)}, {n}]))",
        f"F.kl_div(t.log_softmax(-1), {probs}, reduction='sum')",
        f"F.kl_div(t.log_softmax(-1), {probs}.log(), reduction='batchmean', log_target=True)",
        f"ll.cross_entropy(t, {ids})", "ll.entropy(t)", f"ll.score(t, {ids}).logprob",
        f"ll.kl_div(t, {probs}.log(), direction='forward', reduction='none')",
        "-(t.softmax(-1) * t.log_softmax(-1)).sum(-1)", "(t.exp() * t).mean()",
        "-(t.log_softmax(-1).exp() * t.log_softmax(-1)).sum()",
        f"(F.kl_div(t.log_softmax(-1), {probs}, reduction='none').sum(-1) * {ids}).sum()",
        f"F.kl_div({probs}.log(), t.log_softmax(-1), reduction='none', log_target=True)[:1].sum()",
        f"F.mse_loss(t, {probs})", f"F.binary_cross_entropy_with_logits(t, {probs})",
        f"((t - {probs}).square() * {probs}).sum(-1)", "(t > t.mean(-1, keepdim=True)).sum(-1)",
        f"F.cross_entropy({flat}.sin(), {labels})", f"t.sin().gather(-1, {ids}[..., None])",
        f"F.nll_loss({flat}.sin().log_softmax(-1), {labels}, reduction='none')",
        "t.cos().logsumexp(-1)", "t.sin().argmax(-1).double()", "(t * t.detach()).topk(1, -1)[0]",
        "t.std(-1)", "t.norm()", "t[..., 0]", "t.isnan().any(-1).double()",
    ]  # fmt: skip


def rows(shape) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def writes(r: random.Random, shape) -> list[str]:
    i = index(r, shape)
    return [
        f"write(t).__setitem__(({i},), -3.0)", f"write(t)[{i}].zero_()", "write(t).mul_(2)",
        "write(t).add_(1)", "write(t).view(-1)[0] += 1", "write(t).data.fill_(2.0)",
        "write(t).detach().numpy().fill(1.0)", "torch.mul(t.detach(), 2, out=write(t.detach()))",
        "write(t).clamp_(max=0.1)", "write(t).copy_(torch.ones(t.shape))",
        "torch._foreach_add_([write(t)], 1.0)", "write(t).transpose(0, -1).mul_(3)",
        "write(t).masked_fill_(torch.ones(t.shape) > 0, 0.5)", "write(t).data.__setitem__(0, 1.0)",
        "torch.from_dlpack(write(t.detach())).fill_(3.0)", "write(t).unsqueeze_(0)",
    ]  # fmt: skip


def hooks(r: random.Random, shape) -> list[str]:
    return ["hooked(t, 2.0)", "hooked(t, -0.5)", "hooked(t, None)"]


HOOKED: list[Tensor] = []  # views with a hook, of one program over plain logits


def hooked(t: Tensor, factor: float | None) -> Tensor:
    """t, whose gradient a hook multiplies, or only reads."""

    def hook(g: Tensor) -> Tensor | None:
        return None if factor is None else g * factor + g.sum() * 0

    # `grad_fn` renews the node of a view whose memory was written to, without which PyTorch's
    # register_hook crashes.
    if t.requires_grad and (t.grad_fn is not None or t.is_leaf):
        t.register_hook(hook)  # pyright: ignore
        if t._is_view():
            HOOKED.append(t)
    return t


def forgets_a_hook(t: Tensor) -> bool:
    """Whether PyTorch forgets the hook of a view if plain `t` is written to."""
    memory = t.untyped_storage().data_ptr()
    return any(view.untyped_storage().data_ptr() == memory for view in HOOKED)


def ids(shape, n: int) -> Tensor:
    return torch.arange(rows([*shape, 1])).mul(7).add(3).remainder(max(n, 1)).view(shape)


def probs(shape) -> Tensor:
    size = rows([*shape, 1])
    return torch.linspace(0.3, 4, size).sin().view(shape).double().softmax(-1)


NAMES: dict[str, Any] = {
    "torch": torch, "F": F, "ll": ll, "ids": ids, "probs": probs, "write": lambda t: t,
    "hooked": hooked,
    "ll_materialize": lambda t: t.materialize() if hasattr(t, "materialize") else t.clone(),
}  # fmt: skip


def run(text: str, t: Tensor) -> Any:
    return eval(text, {**NAMES, "t": t})  # the texts are those above
