"""Logits that are never materialised: a head, visited a few rows at a time.

`LinearLogits(hidden, weight, bias)` stands for hidden @ weight.T + bias, and a loss over it is the
same loss over the logits of a chunk of rows after another. There are two ways to go:

- A mean or sum: loss and gradients in one visit of each chunk, at forward, for an upstream gradient
  of 1. Three GEMMs: logits, d_hidden, d_weight. Backward scales what it finds.
- Anything a row: forward keeps the results alone, and backward makes the logits of a chunk again.
  Four GEMMs.

Nothing here knows a loss: `over_rows` makes any function of logits take a LinearLogits.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from . import _checks
from ._dispatch import backend
from ._node import is_repaid, lend
from .head import ACCUMULATE, Chunks, HeadGradients

PER_ROW = ("target", "ids", "temperature", "row_weight", "labels", "mask", "targets", "teacher",
           "probs")  # fmt: skip


class LinearLogits:
    """hidden (..., D) @ weight (V, D).T + bias (V,), as logits (..., V) of any loss here.

    workspace bounds the bytes of logits alive at once (a teacher's come on top); None is 1 GiB on a
    GPU, 64 MiB on a CPU. A smaller one saves memory, and costs time.

    accumulate says how the gradient of a bf16 weight is summed over chunks. "auto" rounds after
    each of two chunks; more are summed in the gradient's own memory, exact to 14 bits of the
    largest of 128 neighbours, on Hopper and data-center Blackwell, and elsewhere as "fp32" does: in
    fp32, which takes twice the gradient's memory on top. "weight" rounds after every chunk. fp16 is
    always summed in fp32.

    main_grad, fp32 and of the weight's shape: a backward adds the weight's gradient to it, whoever
    asked, and weight.grad is left alone. A mean or sum is added once, rounded to the weight's dtype
    unless accumulate is "fp32"; results a row are added chunk by chunk.

    Rows that a loss ignores are dropped before the GEMMs. To know how many there are, the host
    waits for the GPU once, while the GPU goes on; drop_ignored=False never waits, as a CUDA graph
    must not, and they cost as much as the others.

    >>> loss = cross_entropy(LinearLogits(hidden, head.weight), target)
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        workspace: int | None = None,
        accumulate: str = "auto",
        main_grad: Tensor | None = None,
        drop_ignored: bool = True,
    ):
        if isinstance(hidden, Tensor) and torch.is_autocast_enabled(hidden.device.type):
            to = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(to), weight.to(to)
            bias = None if bias is None else bias.to(to)
        _checks.linear(hidden, weight, bias, workspace)
        _checks.one_of("accumulate", accumulate, ACCUMULATE)
        _checks.main_grad(main_grad, weight)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.workspace, self.accumulate, self.drop_ignored = workspace, accumulate, drop_ignored
        self.main_grad = main_grad

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self.parts)

    def dim(self) -> int:
        return self.hidden.dim()

    def materialize(self) -> Tensor:
        """The logits themselves, (..., V)."""
        return torch.nn.functional.linear(self.hidden, self.weight, self.bias)

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def over_rows(live: Callable[..., Tensor | None] | None = None, mass: Callable | None = None):
    """Make a function of logits (..., V) take a LinearLogits as well.

    Of its other arguments, `live` says which rows count, (...), None for all; `mass` what a mean
    divides by, where that is not their number.
    """

    def decorate(f: Callable) -> Callable:
        signature = inspect.signature(f)

        @functools.wraps(f)
        def either(logits, *args, **kwargs):
            if not isinstance(logits, LinearLogits):
                return f(logits, *args, **kwargs)
            given = signature.bind(logits, *args, **kwargs)
            given.apply_defaults()
            visit = _uncompiled() if torch.compiler.is_compiling() else _visit
            return visit(f, logits, dict(list(given.arguments.items())[1:]), live, mass)

        return either

    return decorate


def _uncompiled() -> Callable:
    """The visit as a compiler must leave it: made late, for it brings the compiler along."""
    return torch.compiler.disable(_visit)


def _visit(f: Callable, source: LinearLogits, given: dict, live, mass):
    """f(source, **given), chunk by chunk."""
    lead = source.shape[:-1]
    _checks.one_of("reduction", given.get("reduction", "none"), _checks.REDUCTIONS)
    by_row = {}
    for name in PER_ROW:
        value = given.get(name)
        number = isinstance(value, Tensor) and name == "temperature" and value.dim() == 0
        if hasattr(value, "shape") and not number:
            _checks.has_rows(name, value, source)
            by_row[name] = _flat(given.pop(name), lead)
    counts = None if live is None else live(**by_row, **given)
    drops = source.drop_ignored and not _is_capturing(source)
    chosen = counts if drops else None
    row_weight = by_row.pop("row_weight", None)
    weighted = row_weight is not None or given.pop("row_weight", source) is None

    def run(z, rows, weights):
        chunk = {name: _take(t, rows) for name, t in by_row.items()}
        if weighted:
            chunk["row_weight"] = weights
        return f(z, **given, **chunk)

    if given.get("reduction", "none") == "none":
        results = _Each.apply(*source.parts, row_weight, plan := _Plan(source, run, chosen))
        shaped = [t if t is None else t.reshape(*lead, *t.shape[1:]) for t in results]
        return pytree.tree_unflatten(shaped, plan.spec)

    share = None
    if given["reduction"] == "mean":
        full = {"device": source.device, "dtype": _full(source.dtype)}
        if mass is not None:
            whole = mass(counts, **by_row, **given).to(**full)
        elif counts is not None:
            whole = counts.sum().to(**full)
        else:
            whole = torch.full((), lead.numel(), **full)
        share = torch.where(whole == 0, 1.0, 1.0 / whole)
    wants = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*source.parts, row_weight)
    )
    given["reduction"] = "sum"
    if "inplace" in given:
        given["inplace"] = wants
    # fp16 cannot hold the gradient of a mean: it gets its share at the end.
    late = share if source.dtype == torch.float16 else None

    def total(z, rows, weights):
        if share is not None and late is None:
            weights = share.expand(len(z)) if weights is None else weights.to(share) * share
        return run(z, rows, weights)

    return _Total.apply(*source.parts, row_weight, _Plan(source, total, chosen, late), wants)


def _full(dtype: torch.dtype) -> torch.dtype:
    """Of a loss over logits of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_capturing(source: LinearLogits) -> bool:
    return source.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _flat(t, lead: torch.Size):
    """(..., anything) as (N, anything)."""
    if isinstance(t, Tensor):
        return t.reshape(lead.numel(), *t.shape[len(lead) :])
    if isinstance(t, LinearLogits):
        return LinearLogits(t.hidden.reshape(-1, t.hidden.shape[-1]), t.weight, t.bias)
    return t.reshape(lead.numel())


def _take(t, rows):
    """Some rows of a number, or more, a row; of a teacher's head, their logits."""
    if isinstance(t, LinearLogits):
        with torch.no_grad():
            return torch.nn.functional.linear(t.hidden[rows], t.weight, t.bias)
    return t[rows]


class _Plan:
    """How a head is visited: in what chunks, and what is done with the logits of each."""

    def __init__(
        self, source: LinearLogits, run: Callable, counts: Tensor | None, late: Tensor | None = None
    ):
        self.run, self.late, self.spec = run, late, None
        self.lead = source.shape[:-1]
        self.chunks = Chunks(source.weight, self.lead.numel(), counts, source.workspace)
        self.accumulate, self.main_grad = source.accumulate, source.main_grad

    @property
    def waits(self) -> bool:
        """Whether gradients stay unrounded until backward says what multiplies them."""
        return self.late is not None or self.main_grad is not None

    def gradients(self, hidden, weight, bias, needs, into=None) -> HeadGradients:
        return HeadGradients(self.chunks, hidden, weight, bias, needs, self.accumulate, into)


def _like(gradients: list, parts: tuple) -> list:
    """Each in the shape and dtype of what it is the gradient of."""
    pairs = zip(gradients, parts, strict=True)
    return [None if t is None else t.view(part.shape).to(part.dtype) for t, part in pairs]


def _exactly(device: torch.device) -> torch.autocast:
    """Dtypes as they are given, whatever autocast is on."""
    return torch.autocast(device.type, enabled=False)


def _two_dims(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


class _Total(torch.autograd.Function):
    """Loss and gradients of a sum over rows, in one visit."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, plan, wants):
        needs = [wants and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        d_rows = wants and row_weight is not None and row_weight.requires_grad
        parts = (hidden, weight, bias, row_weight)
        with _exactly(hidden.device):
            loss, ctx.gradients = _Total.visit(*parts, plan, needs, d_rows)
        ctx.plan, ctx.needs, ctx.d_rows = plan, needs, d_rows
        ctx.save_for_backward(*parts)
        return loss

    @staticmethod
    def visit(hidden, weight, bias, row_weight, plan, needs, d_rows):
        flat, W = _two_dims(hidden), weight.detach()
        b = None if bias is None else bias.detach()
        weights = None if row_weight is None else row_weight.detach().reshape(-1)
        visits = plan.chunks.logits(flat, W, b)
        sums = plan.gradients(flat, W, b, needs) if any(needs) else None
        found = torch.zeros_like(weights) if d_rows else None
        loss = torch.zeros((), device=hidden.device, dtype=_full(hidden.dtype))
        for rows, h, z in visits:
            own = None if weights is None else weights[rows].requires_grad_(d_rows)
            lend(z).requires_grad_(sums is not None)
            with torch.set_grad_enabled(sums is not None or d_rows):
                part = plan.run(z, rows, own)
            loss += part.detach()
            if is_repaid(z) and not d_rows:
                sums.add(rows, h, z.detach())
                continue
            leaves = [t for t in (z if sums else None, own if d_rows else None) if t is not None]
            gradients = list(torch.autograd.grad(part, leaves)) if leaves else []
            if sums is not None:
                sums.add(rows, h, gradients.pop(0))
            if d_rows:
                found[rows] = gradients.pop(0)
        loss = loss if plan.late is None else loss * plan.late
        gradients = [*([None] * 3 if sums is None else sums.found()), found]
        if not plan.waits:
            gradients = _like(gradients, (hidden, weight, bias, row_weight))
        return loss, gradients

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        hidden, weight, bias, row_weight = parts = ctx.saved_tensors
        plan, gradients, ctx.gradients = ctx.plan, ctx.gradients, None
        if gradients is None:  # a second backward: the first gave its gradients away
            with _exactly(hidden.device):
                _, gradients = _Total.visit(
                    hidden, weight, bias, row_weight, plan, ctx.needs, ctx.d_rows
                )
        scale = d_loss if plan.late is None else d_loss * plan.late
        if plan.main_grad is not None and gradients[1] is not None:
            plan.main_grad.addcmul_(gradients[1], scale)
            gradients[1] = None
        for t in gradients:
            if t is not None:
                backend(t).scale_rows_(t.view(1, -1) if t.dim() < 2 else t, scale)
        return *_like(gradients, parts), None, None


class _Each(torch.autograd.Function):
    """Results a row; backward makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, plan):
        results: list = []
        weights = None if row_weight is None else row_weight.reshape(-1)

        def keep(rows, z):
            own = None if weights is None else weights[rows]
            found, plan.spec = pytree.tree_flatten(plan.run(z, rows, own))
            if not results:
                results.extend(None if t is None else _blank(t, plan.lead.numel()) for t in found)
            for result, t in zip(results, found, strict=True):
                if t is not None:
                    result[rows] = t

        with _exactly(hidden.device):
            for rows, _, z in plan.chunks.logits(_two_dims(hidden), weight, bias):
                keep(rows, z)
        if not results:  # no rows: the form of the results is that of nothing's
            keep(slice(0, 0), hidden.new_empty((0, weight.shape[0])))
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, row_weight)
        ids = [t for t in results if t is not None and not t.is_floating_point()]
        ctx.mark_non_differentiable(*ids)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        with _exactly(ctx.saved_tensors[0].device):
            return _Each.visit(ctx, upstream, *ctx.saved_tensors)

    @staticmethod
    def visit(ctx, upstream, hidden, weight, bias, row_weight):
        plan, needs = ctx.plan, ctx.needs_input_grad
        flat = _two_dims(hidden)
        sums = plan.gradients(flat, weight, bias, needs[:3], plan.main_grad)
        weights = None if row_weight is None else row_weight.reshape(-1)
        d_rows = torch.zeros_like(weights) if needs[3] else None
        for rows, h, z in plan.chunks.logits(flat, weight, bias):
            own = None if weights is None else weights[rows].requires_grad_(needs[3])
            lend(z).requires_grad_()
            with torch.enable_grad():
                found, _ = pytree.tree_flatten(plan.run(z, rows, own))
            given = [(t, g[rows]) for t, g in zip(found, upstream, strict=True) if g is not None]
            leaves = [z, own] if d_rows is not None else [z]
            d_z, *rest = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given])
            sums.add(rows, h, d_z)
            if d_rows is not None:
                d_rows[rows] = rest[0]
        d_hidden, d_weight, d_bias = sums.found()
        gradients = [d_hidden, None if plan.main_grad is not None else d_weight, d_bias, d_rows]
        return *_like(gradients, (hidden, weight, bias, row_weight)), None


def _blank(t: Tensor, rows: int) -> Tensor:
    """What an ignored row gets: zeros, and no class."""
    fill = 0.0 if t.is_floating_point() else -1
    return torch.full((rows, *t.shape[1:]), fill, device=t.device, dtype=t.dtype)
