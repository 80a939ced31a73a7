"""Check, then time: one case at a time, every contender in turn.

A contender that raises is reported as failed and one whose numbers are off as wrong, each with the
reason, and neither is timed. One that overwrites the logits it was lent is timed on a copy which is
restored, off the clock, before each repetition; its line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import contenders, formulas, timing
from .cases import COMPILED, OURS, PLAIN, Case, Mode, size
from .contenders import Finder, short
from .formulas import Inputs
from .timing import MIB, Budget

Leaves = tuple[Tensor, ...]
OVERWRITES, SYNCHRONISES = "overwrites its input", "synchronises with the host"


@dataclass
class Result:
    """One contender in one case. What couldn't be measured is None."""

    family: str
    op: str
    mode: str
    variant: str
    shape: str
    rows: int
    vocab: int
    dtype: str
    contender: str
    status: str = "ok"  # "ok", "wrong" or "failed"
    note: str = ""
    value_error: float | None = None
    grad_error: float | None = None
    ms: float | None = None
    extra_mib: float | None = None  # at most at once, beyond the inputs
    spare_mib: float | None = None  # the same, beyond the gradients too
    # filled in by verdict.judge, once the ceiling and all times are known
    eager_x: float | None = None  # time over PyTorch's
    floor_ms: float | None = None
    tbps: float | None = None
    target: str = ""
    limit_ms: float | None = None
    reached: bool | None = None

    @property
    def work(self) -> str:
        return self.op if self.variant == PLAIN else f"{self.op}, {self.variant}"

    @property
    def key(self) -> tuple[str, ...]:
        """What it has in common with the other contenders of its case."""
        return self.work, self.mode, self.shape, self.dtype


class Entry:
    """A contender in a case: its answer and memory at once, then ready for the clock."""

    def __init__(self, case: Case, name: str, op: Callable, inputs: Inputs, check: bool):
        self.case, self.op, self.inputs, self.leaves = case, op, inputs, inputs.leaves
        self.scratch: Leaves = ()  # where it works, if it overwrites what it is lent
        self.result = blank(case, name)
        self.attempt(partial(self.examine, check))

    def attempt(self, step: Callable[[], None], when: str = "") -> None:
        """Any failure is a finding, not the end of the run."""
        try:
            step()
        except Exception as error:
            self.result.status, self.result.note = "failed", f"{when}{short(error)}"
        timing.release()

    def examine(self, check: bool) -> None:
        result, in_place = self.result, self.case.mode == Mode.INPLACE
        scratch = tuple(leaf.clone() for leaf in self.leaves)
        out, grads = self.run(self.lend(scratch))
        if check:
            self.compare(out, grads)
        if not all(map(torch.equal, scratch, self.leaves)):
            self.scratch = scratch
            if not in_place:
                result.note = OVERWRITES
                result.status = "wrong" if result.contender == OURS else result.status
        held = 0 if in_place else sum(grad.numel() * grad.element_size() for grad in grads)
        del out, grads, scratch
        extra = timing.extra_memory(self.leaves[0].device.type, self.prepare(), self.run)
        result.extra_mib, result.spare_mib = extra / MIB, (extra - held) / MIB
        if self.case.mode == Mode.WALL and timing.synchronises(self.run, self.prepare()):
            result.note = "; ".join(filter(None, (result.note, SYNCHRONISES)))

    def compare(self, out, grads: Leaves) -> None:
        op, result = self.case.op, self.result
        result.value_error, result.grad_error = formulas.errors(op, self.inputs, out, grads)
        bound = formulas.TOLERANCE[self.case.dtype] * formulas.CLIPPED.get(op, 1)
        bound *= 1 if result.contender == OURS else 10
        errors = result.value_error, result.grad_error or 0.0
        if not all(error <= bound for error in errors):  # NaN included
            result.status, result.note = "wrong", f"error {max(errors):.1e}, allowed {bound:.0e}"

    def lend(self, leaves: Leaves) -> Leaves:
        """The same memory as fresh leaves: no gradient or graph of an earlier call remains."""
        gradient = self.case.mode not in (Mode.FORWARD, Mode.REPLAY)
        return tuple(leaf.detach().requires_grad_(gradient) for leaf in leaves)

    def prepare(self) -> Leaves:
        restored = tuple(map(Tensor.copy_, self.scratch, self.leaves)) if self.scratch else ()
        return self.lend(restored or self.leaves)

    def run(self, leaves: Leaves):
        """One unit of work: (output, gradients of the leaves)."""
        if not leaves[0].requires_grad:
            with torch.no_grad():
                return self.op(*leaves, *self.inputs.rows, **self.inputs.options), ()
        out = self.op(*leaves, *self.inputs.rows, **self.inputs.options)
        loss = formulas.objective(self.case.op, out)
        loss = loss.mean() if loss.dim() else loss
        if self.case.mode == Mode.REPLAY_BOTH:
            return out, torch.autograd.grad(loss, leaves)
        loss.backward()
        return out, tuple(leaf.grad for leaf in leaves)

    def clock(self, budget: Budget) -> None:
        """On a GPU, by the clock of its mode."""
        if self.case.mode in (Mode.REPLAY, Mode.REPLAY_BOTH):
            copies = many_copies(self.leaves[0], cold=self.case.mode == Mode.REPLAY)
            ms = timing.graph_time(lambda x: self.run(self.lend((x,))), copies, budget)
        elif self.case.mode == Mode.WALL:
            ms = timing.host_time(self.run, self.prepare())
        else:
            ms = timing.device_time(self.prepare, self.run, budget)
        self.result.ms = ms


def run_case(
    case: Case, loaded: dict[str, Finder], device: str, budget: Budget, *, check: bool = True
) -> list[Result]:
    """Results of every contender that has this op; without `check`, times and memory alone."""
    torch.manual_seed(case.rows * 1_000_003 + case.shape[-1])
    invited = {name: f for name, f in loaded.items() if name == OURS or not case.alone}
    ops = {name: op for name, find in invited.items() if (op := find(case))}
    try:
        inputs = contenders.inputs(case, device)
    except RuntimeError as error:  # too large for this machine
        return [blank(case, name, status="failed", note=short(error)) for name in ops]
    entries = []
    for name, op in ops.items():
        if name == COMPILED:
            torch.compiler.reset()  # else its limit on recompilations ends in eager code
        entries.append(Entry(case, name, op, inputs, check))
    results = [entry.result for entry in entries]
    ready = [entry for entry in entries if entry.result.status == "ok"]
    if device == "cpu":
        times = timing.wall_times([(entry.prepare, entry.run) for entry in ready], budget)
        for entry, ms in zip(ready, times, strict=True):
            entry.result.ms = ms
        return results
    beside = bool(case.yardstick and check)
    around = [yardstick(case.yardstick, inputs.leaves, budget)] if beside else []
    for i, entry in enumerate(ready):
        entry.attempt(partial(entry.clock, budget), "while timed: ")
        if beside and i == 0:  # ours, between two measurements: clocks drift
            around.append(yardstick(case.yardstick, inputs.leaves, budget))
    if not around:
        return results
    before, after = around[0], around[-1]
    note = f"{before:.3f} ms before ours, {after:.3f} after"
    return [blank(case, case.yardstick, ms=(before + after) / 2, note=note), *results]


def blank(case: Case, name: str, **known) -> Result:
    where = (case.family, case.op, case.mode, case.variant, size(case.shape), case.rows)
    return Result(*where, case.shape[-1], case.dtype, name, **known)


def many_copies(x: Tensor, *, cold: bool) -> Tensor:
    """Of few rows, enough to overflow L2 twice; unless `cold`, ten times the same memory."""
    if not cold:  # logits that have just been gathered are in the cache
        return x.expand(10, *x.shape)
    wanted = 2 * torch.cuda.get_device_properties(x.device).L2_cache_size
    count = min(512, max(4, wanted // (x.numel() * x.element_size())))
    return x.expand(count, *x.shape).contiguous()


def three_gemms(h: Tensor, W: Tensor) -> Callable:
    """The matrix products of a head, forward and backward."""
    z = torch.empty(len(h), len(W), device=h.device, dtype=h.dtype)
    dh, dW = torch.empty_like(h), torch.empty_like(W)

    def run(_):
        torch.mm(h, W.t(), out=z)
        torch.mm(z, W, out=dh)
        torch.mm(z.t(), h, out=dW)

    return run


YARDSTICKS = {  # what is run, and how many times as long
    "3 GEMMs": (three_gemms, 1.0),
    "4 GEMMs": (three_gemms, 4 / 3),
    "zeros_like": (lambda x: lambda _: torch.zeros_like(x), 1.0),
}


def yardstick(name: str, leaves: Leaves, budget: Budget) -> float:
    make, factor = YARDSTICKS[name]
    return factor * timing.device_time(lambda: None, make(*leaves), budget)
