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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from . import _checks
from ._dispatch import backend

PER_ROW = ("target", "ids", "temperature", "row_weight", "labels", "mask", "targets", "teacher",
           "probs")  # fmt: skip
WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}  # bytes of logits alive at once, by default
BLOCK_BYTES = 64 << 20  # of d_weight in work at once, where it accumulates in fp32


class LinearLogits:
    """hidden (..., D) @ weight (V, D).T + bias (V,), as logits (..., V) of any loss here.

    workspace bounds the bytes of logits alive at once; None is 1 GiB on a GPU, 64 MiB on a CPU.
    accumulate says where the weight's gradient is summed over chunks: "fp32", "weight" (in the
    weight's own dtype, rounded once a chunk), or "auto", the latter for up to two chunks.

    Rows that a loss ignores are dropped before the GEMMs. To know how many there are, the host has
    to wait for the GPU once; drop_ignored=False never waits, as a CUDA graph must not, and they
    cost as much as the others.

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
        drop_ignored: bool = True,
    ):
        if isinstance(hidden, Tensor) and torch.is_autocast_enabled(hidden.device.type):
            to = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(to), weight.to(to)
            bias = None if bias is None else bias.to(to)
        _checks.linear(hidden, weight, bias, workspace)
        _checks.one_of("accumulate", accumulate, ("auto", "fp32", "weight"))
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.workspace, self.accumulate, self.drop_ignored = workspace, accumulate, drop_ignored

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
    index = None
    if counts is not None and source.drop_ignored and not _is_capturing(source):
        index = counts.nonzero().squeeze(1)
    row_weight = by_row.pop("row_weight", None)
    weighted = row_weight is not None or given.pop("row_weight", source) is None

    def run(z, rows, weights):
        chunk = {name: _take(t, rows) for name, t in by_row.items()}
        if weighted:
            chunk["row_weight"] = weights
        return f(z, **given, **chunk)

    if given.get("reduction", "none") == "none":
        results = _Each.apply(*source.parts, row_weight, plan := _Plan(source, run, index))
        shaped = [t if t is None else t.reshape(*lead, *t.shape[1:]) for t in results]
        return pytree.tree_unflatten(shaped, plan.spec)

    share = None
    if given["reduction"] == "mean":
        if mass is not None:
            whole = mass(counts, **by_row, **given)
        else:
            whole = lead.numel() if counts is None else counts.sum()
        whole = torch.as_tensor(whole, device=source.device, dtype=_full(source.dtype))
        share = torch.where(whole == 0, 1.0, 1.0 / whole)
    wants = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*source.parts, row_weight)
    )
    given["reduction"] = "sum"
    if "inplace" in given:
        given["inplace"] = wants
    # fp16 cannot hold the gradient of a mean: it gets its share at the end.
    late = share is not None and source.dtype == torch.float16

    def total(z, rows, weights):
        if share is not None and not late:
            weights = share.expand(len(z)) if weights is None else weights * share
        return run(z, rows, weights)

    loss = _Total.apply(*source.parts, row_weight, _Plan(source, total, index), wants)
    return loss * share if late else loss


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
    """How a head is visited: chunks of its rows, and what is done with the logits of each."""

    def __init__(self, source: LinearLogits, run: Callable, index: Tensor | None):
        self.run, self.index, self.spec = run, index, None
        self.accumulate = source.accumulate
        self.lead = source.shape[:-1]
        V = source.weight.shape[0]
        limit = source.workspace or WORKSPACE.get(source.device.type, WORKSPACE["cuda"])
        rows = max(limit // (V * source.hidden.element_size()), 1)
        self.step = rows // 256 * 256 if rows >= 256 else rows  # whole tiles of a GEMM
        self.count = self.lead.numel() if index is None else len(index)

    def chunks(self) -> Iterator[slice | Tensor]:
        for start in range(0, self.count, self.step):
            rows = slice(start, min(start + self.step, self.count))
            yield rows if self.index is None else self.index[rows]

    def exact(self, weight: Tensor) -> bool:
        """Whether the weight's gradient is summed in fp32, and not in its own dtype."""
        if weight.dtype in (torch.float32, torch.float64):
            return False
        many = self.count > 2 * self.step or weight.dtype == torch.float16
        return self.accumulate == "fp32" or (self.accumulate == "auto" and many)

    def logits(self, hidden, weight, bias) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """(rows, their hidden states, their logits), one chunk after another in one workspace."""
        size = (min(self.step, max(self.count, 1)), weight.shape[0])
        space = torch.empty(size, device=hidden.device, dtype=hidden.dtype)
        for rows in self.chunks():
            h = hidden[rows]
            z = space[: len(h)]
            if bias is None:
                torch.mm(h, weight.t(), out=z)
            else:
                torch.addmm(bias, h, weight.t(), out=z)
            yield rows, h, z


class _Sums:
    """Gradients of hidden, weight and bias, each only if it is needed, chunk by chunk."""

    def __init__(self, plan, hidden, weight, bias, needs):
        self.weight, self.exact, self.first = weight, plan.exact(weight), True
        zeros = torch.zeros_like if plan.index is not None else torch.empty_like
        self.d_hidden = zeros(hidden) if needs[0] else None
        self.d_weight = None
        if needs[1]:
            dtype = torch.float32 if self.exact else weight.dtype
            self.d_weight = torch.zeros(weight.shape, device=weight.device, dtype=dtype)
        self.d_bias = None
        if needs[2]:
            full = torch.promote_types(bias.dtype, torch.float32)
            self.d_bias = torch.zeros_like(bias, dtype=full)
        self.bias = bias

    def add(self, rows, h: Tensor, dz: Tensor) -> None:
        if self.d_hidden is not None:
            if isinstance(rows, slice):
                torch.mm(dz, self.weight, out=self.d_hidden[rows])
            else:
                self.d_hidden[rows] = torch.mm(dz, self.weight)
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.d_bias.dtype)
        if self.d_weight is None:
            return
        if not self.exact:
            torch.addmm(self.d_weight, dz.t(), h, beta=0 if self.first else 1, out=self.d_weight)
        else:
            step = max(BLOCK_BYTES // (4 * h.shape[1]), 1)
            for start in range(0, dz.shape[1], step):
                part = slice(start, start + step)
                self.d_weight[part] += _full_mm(dz[:, part].t(), h)
        self.first = False

    def found(self) -> list[Tensor | None]:
        return [
            self.d_hidden,
            None if self.d_weight is None else self.d_weight.to(self.weight.dtype),
            None if self.d_bias is None else self.d_bias.to(self.bias.dtype),
        ]


def _full_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, of factors in 16 bits."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _two_dims(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


class _Total(torch.autograd.Function):
    """Loss and gradients of a sum over rows, in one visit."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, plan, wants):
        needs = [wants and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        d_rows = wants and row_weight is not None and row_weight.requires_grad
        loss, ctx.gradients = _Total.visit(hidden, weight, bias, row_weight, plan, needs, d_rows)
        ctx.plan, ctx.needs, ctx.d_rows = plan, needs, d_rows
        ctx.save_for_backward(hidden, weight, bias, row_weight)
        return loss

    @staticmethod
    def visit(hidden, weight, bias, row_weight, plan, needs, d_rows):
        flat, W = _two_dims(hidden), weight.detach()
        b = None if bias is None else bias.detach()
        weights = None if row_weight is None else row_weight.detach().reshape(-1)
        sums = _Sums(plan, flat, W, b, needs) if any(needs) else None
        found = torch.zeros_like(weights) if d_rows else None
        loss = torch.zeros((), device=hidden.device, dtype=_full(hidden.dtype))
        for rows, h, z in plan.logits(flat, W, b):
            own = None if weights is None else weights[rows].requires_grad_(d_rows)
            z.requires_grad_(sums is not None)
            with torch.set_grad_enabled(sums is not None or d_rows):
                part = plan.run(z, rows, own)
            leaves = [t for t in (z if sums else None, own if d_rows else None) if t is not None]
            gradients = list(torch.autograd.grad(part, leaves)) if leaves else []
            loss += part.detach()
            if sums is not None:
                sums.add(rows, h, gradients.pop(0))
            if d_rows:
                found[rows] = gradients.pop(0)
        if found is not None:
            found = found.view(row_weight.shape)
        if sums is None:
            return loss, [None, None, None, found]
        d_hidden, *others = sums.found()
        d_hidden = None if d_hidden is None else d_hidden.view(hidden.shape)
        return loss, [d_hidden, *others, found]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        hidden, weight, bias, row_weight = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward: the first gave its gradients away
            _, gradients = _Total.visit(
                hidden, weight, bias, row_weight, ctx.plan, ctx.needs, ctx.d_rows
            )
        for t in gradients:
            if t is not None:
                backend(t).scale_rows_(t.view(1, -1) if t.dim() < 2 else t, d_loss)
        return *gradients, None, None


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

        for rows, _, z in plan.logits(_two_dims(hidden), weight, bias):
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
        hidden, weight, bias, row_weight = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad
        flat = _two_dims(hidden)
        sums = _Sums(plan, flat, weight, bias, needs[:3])
        weights = None if row_weight is None else row_weight.reshape(-1)
        d_rows = torch.zeros_like(weights) if needs[3] else None
        for rows, h, z in plan.logits(flat, weight, bias):
            own = None if weights is None else weights[rows].requires_grad_(needs[3])
            z.requires_grad_()
            with torch.enable_grad():
                found, _ = pytree.tree_flatten(plan.run(z, rows, own))
            given = [(t, g[rows]) for t, g in zip(found, upstream, strict=True) if g is not None]
            leaves = [z, own] if d_rows is not None else [z]
            d_z, *rest = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given])
            sums.add(rows, h, d_z)
            if d_rows is not None:
                d_rows[rows] = rest[0]
        d_hidden, d_weight, d_bias = sums.found()
        return (
            None if d_hidden is None else d_hidden.view(hidden.shape),
            d_weight,
            d_bias,
            None if d_rows is None else d_rows.view(row_weight.shape),
            None,
        )


def _blank(t: Tensor, rows: int) -> Tensor:
    """What an ignored row gets: zeros, and no class."""
    fill = 0.0 if t.is_floating_point() else -1
    return torch.full((rows, *t.shape[1:]), fill, device=t.device, dtype=t.dtype)
