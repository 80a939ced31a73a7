"""Check, then time: one case at a time, every contender in turn.

A contender that raises is reported as failed and one whose numbers are off as wrong, each with the
reason, and neither is timed. One that overwrites the logits it was lent is timed on a copy which is
restored, off the clock, before each repetition; its line says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _memory, formulas
from ..formulas import Inputs
from . import contenders, timing
from .cases import COMPILED, MIB, OURS, Case, Mode
from .contenders import Finder, short
from .results import OVERWRITES, SYNCHRONISES, Result, blank

Leaves = tuple[Tensor, ...]


class Entry:
    """A contender in a case."""

    def __init__(self, case: Case, name: str, op: Callable, inputs: Inputs):
        self.case, self.op, self.inputs, self.leaves = case, op, inputs, inputs.leaves
        self.scratch: Leaves = ()  # where it works, if it overwrites what it is lent
        self.result = blank(case, name)

    def attempt(self, step: Callable, argument, when: str = "") -> None:
        """Any failure is a finding, not the end of the run."""
        try:
            step(argument)
        except Exception as error:
            self.result.status, self.result.note = "failed", f"{when}{short(error)}"
        torch.cuda.empty_cache()  # one contender's is no burden to the next

    def examine(self, checked: bool) -> None:
        """Its answer and its memory."""
        result, in_place = self.result, self.case.mode == Mode.INPLACE
        scratch = tuple(leaf.clone() for leaf in self.leaves)
        out, grads = self.run(self.lend(scratch))
        if checked:
            self.compare(out, grads)
        if not all(map(torch.equal, scratch, self.leaves)):
            self.scratch = scratch
            if not in_place:
                result.note = OVERWRITES
                result.status = "wrong" if result.contender == OURS else result.status
        held = 0 if in_place else sum(grad.nbytes for grad in grads)
        del out, grads, scratch
        extra = _memory.extra_memory(self.leaves[0].device.type, self.prepare(), self.run)
        result.extra_mib, result.spare_mib = extra / MIB, (extra - held) / MIB
        if self.case.mode == Mode.WALL and timing.synchronises(self.run, self.prepare()):
            result.note = "; ".join(filter(None, (result.note, SYNCHRONISES)))

    def compare(self, out, grads: Leaves) -> None:
        op, result = self.case.op, self.result
        errors = formulas.errors(op, self.inputs, out, grads)
        result.value_error, result.grad_error = errors
        bound = formulas.TOLERANCE[self.case.dtype] * formulas.CLIPPED.get(op, 1)
        bound *= 1 if result.contender == OURS else 10
        if not all(error is None or error <= bound for error in errors):  # NaN included
            worst = max(error or 0.0 for error in errors)
            result.status, result.note = "wrong", f"error {worst:.1e}, allowed {bound:.0e}"

    def lend(self, leaves: Leaves) -> Leaves:
        """The same memory as fresh leaves: no gradient or graph of an earlier call remains."""
        gradient = self.case.mode not in (Mode.FORWARD, Mode.REPLAY)
        return tuple(leaf.detach().requires_grad_(gradient) for leaf in leaves)

    def prepare(self) -> Leaves:
        restored = tuple(map(Tensor.copy_, self.scratch, self.leaves)) if self.scratch else ()
        return self.lend(restored or self.leaves)

    def run(self, leaves: Leaves):
        """One unit of work: (output, gradients of the leaves)."""
        gradient = leaves[0].requires_grad
        with torch.set_grad_enabled(gradient):
            out = self.op(*leaves, *self.inputs.rows, **self.inputs.options)
        if not gradient:
            return out, ()
        loss = formulas.objective(self.case.op, out)
        loss = loss.mean() if loss.dim() else loss
        if self.case.mode == Mode.REPLAY_BOTH:
            return out, torch.autograd.grad(loss, leaves)
        loss.backward()
        return out, tuple(leaf.grad for leaf in leaves)

    def clock(self, spend: float) -> None:
        """On a GPU, by the clock of its mode."""
        if self.case.mode in (Mode.REPLAY, Mode.REPLAY_BOTH):
            copies = many_copies(self.leaves[0], cold=self.case.mode == Mode.REPLAY)
            ms = timing.graph_time(lambda x: self.run(self.lend((x,))), copies, spend)
        elif self.case.mode == Mode.WALL:
            ms = timing.host_time(self.run, self.prepare())
        else:
            ms = timing.device_time(self.prepare, self.run, spend)
        self.result.ms = ms


def run_case(
    case: Case, loaded: dict[str, Finder], device: str, spend: float, *, checked: bool = True
) -> list[Result]:
    """Results of every contender that has this op; without `checked`, times and memory alone."""
    torch.manual_seed(case.rows * 1_000_003 + case.sizes[-1])
    invited = {name: f for name, f in loaded.items() if name == OURS or not case.alone}
    ops = {name: op for name, find in invited.items() if (op := find(case))}
    try:
        inputs = contenders.inputs(case, device)
    except RuntimeError as error:  # too large for this machine
        return [blank(case, name, status="failed", note=short(error)) for name in ops]
    entries = [Entry(case, name, op, inputs) for name, op in ops.items()]
    for entry in entries:
        if entry.result.contender == COMPILED:
            torch.compiler.reset()  # else its limit on recompilations ends in eager code
        entry.attempt(entry.examine, checked)
    results = [entry.result for entry in entries]
    ready = [entry for entry in entries if entry.result.status == "ok"]
    if device == "cpu":
        times = timing.wall_times([(entry.prepare, entry.run) for entry in ready], spend)
        for entry, ms in zip(ready, times, strict=True):
            entry.result.ms = ms
        return results
    beside = bool(case.yardstick and checked)
    around = [yardstick(case.yardstick, inputs.leaves, spend)] if beside else []
    for i, entry in enumerate(ready):
        entry.attempt(entry.clock, spend, "while timed: ")
        if beside and i == 0:  # ours, between two measurements: clocks drift
            around.append(yardstick(case.yardstick, inputs.leaves, spend))
    if not around:
        return results
    before, after = around[0], around[-1]
    note = f"{before:.3f} ms before ours, {after:.3f} after"
    return [blank(case, case.yardstick, ms=(before + after) / 2, note=note), *results]


def many_copies(x: Tensor, *, cold: bool) -> Tensor:
    """Of few rows, enough to overflow L2 twice; unless `cold`, ten times the same memory."""
    if not cold:  # logits that have just been gathered are in the cache
        return x.expand(10, *x.shape)
    wanted = 2 * torch.cuda.get_device_properties(x.device).L2_cache_size
    return x.expand(min(512, max(4, wanted // x.nbytes)), *x.shape).contiguous()


def three_gemms(h: Tensor, W: Tensor) -> Leaves:
    """The matrix products of a head, forward and backward."""
    z = h @ W.t()
    return z @ W, z.t() @ h


YARDSTICKS = {  # what is run, and how many times as long
    "3 GEMMs": (three_gemms, 1.0),
    "4 GEMMs": (three_gemms, 4 / 3),
    "zeros_like": (torch.zeros_like, 1.0),
}


def yardstick(name: str, leaves: Leaves, spend: float) -> float:
    run, factor = YARDSTICKS[name]
    return factor * timing.device_time(lambda: leaves, lambda leaves: run(*leaves), spend)
