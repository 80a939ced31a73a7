"""Runs one case: first checks every contender, then times every contender.

A contender is logitless, PyTorch or another library. A contender that raises an error is reported
as "failed". A contender with wrong results is reported as "wrong". For failed and wrong contenders,
the report gives the reason instead of a time. A contender that overwrites its inputs is timed on a
copy of the inputs. Before each repetition, the inputs are copied again, and the time of copying is
not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.demo import memory
from logitless.cli.report import short

from . import clocks, contenders, formulas
from .cases import MIB, OURS, Case, Mode
from .contenders import Finder
from .formulas import Inputs
from .results import OVERWRITES, SYNCHRONISES, Result, blank

Leaves = tuple[Tensor, ...]


class Entry:
    """Runs one contender in one case."""

    def __init__(self, case: Case, name: str, op: Callable, inputs: Inputs):
        self.case, self.op, self.inputs, self.leaves = case, op, inputs, inputs.leaves
        self.scratch: Leaves = ()  # a copy of the leaves, for a contender that overwrites them
        self.result = blank(case, name)

    def attempt(self, step: Callable, argument, when: str = "") -> None:
        """Calls `step(argument)`.

        If the call raises an error, the contender's status becomes "failed", and its note is the
        error.
        """
        try:
            step(argument)
        except Exception as error:
            self.result.status, self.result.note = "failed", f"{when}{short(error)}"
        torch.cuda.empty_cache()  # frees the cached memory for the next contender

    def examine(self, checked: bool) -> None:
        """Checks the values and gradients, and measures the memory."""
        result, in_place = self.result, self.case.mode == Mode.INPLACE
        scratch = tuple(leaf.clone() for leaf in self.leaves)
        out, grads = self.run(self.fresh(scratch))
        if checked:
            errors = formulas.errors(self.case.op, self.inputs, out, grads)
            result.value_error, result.grad_error = errors
            bound = formulas.TOLERANCE[self.case.dtype] * formulas.CLIPPED.get(self.case.op, 1)
            bound *= 1 if result.contender == OURS else 10
            off = [x for x in errors if x is not None and not x <= bound]  # also true for NaN
            if off:
                result.status, result.note = "wrong", f"error {off[-1]:.1e}, allowed {bound:.0e}"
        if not all(map(torch.equal, scratch, self.leaves)):
            self.scratch = scratch
            if not in_place:
                result.note = OVERWRITES
                result.status = "wrong" if result.contender == OURS else result.status
        gradient_bytes = 0 if in_place else sum(grad.nbytes for grad in grads)
        del out, grads, scratch
        extra = memory.extra_memory(self.leaves[0].device.type, self.prepare(), self.run)
        result.extra_mib, result.spare_mib = extra / MIB, (extra - gradient_bytes) / MIB
        if self.case.mode == Mode.WALL and clocks.synchronises(self.run, self.prepare()):
            result.note = "; ".join(filter(None, (result.note, SYNCHRONISES)))

    def fresh(self, leaves: Leaves) -> Leaves:
        """Returns new leaves that share memory with `leaves` and have no gradient or graph yet."""
        gradient = self.case.mode not in (Mode.FORWARD, Mode.REPLAY)
        return tuple(leaf.detach().requires_grad_(gradient) for leaf in leaves)

    def prepare(self) -> Leaves:
        restored = tuple(map(Tensor.copy_, self.scratch, self.leaves)) if self.scratch else ()
        return self.fresh(restored or self.leaves)

    def run(self, leaves: Leaves):
        """Runs the op once, and returns its output and the gradients of the leaves."""
        gradient = leaves[0].requires_grad
        with torch.set_grad_enabled(gradient):
            out = self.op(*leaves, *self.inputs.rows, **self.inputs.options)
        if not gradient:
            return out, ()
        loss = scalar_loss(self.case.op, out)
        if self.case.mode == Mode.REPLAY_BOTH:
            return out, torch.autograd.grad(loss, leaves)
        loss.backward()
        return out, tuple(leaf.grad for leaf in leaves)

    def step(self) -> clocks.Run:
        """Returns a function that runs only forward and backward, for cases of Mode.WALL.

        `run` does more work on the host. This work would slow down contenders that are limited by
        the host, but not contenders that are limited by the GPU.
        """
        op, rows, options, name = self.op, self.inputs.rows, self.inputs.options, self.case.op

        def step(leaves: Leaves) -> None:
            scalar_loss(name, op(*leaves, *rows, **options)).backward()

        return step

    def clock(self, budget: float) -> None:
        """Times the op on a GPU, with the clock that the mode of the case requires."""
        if self.case.mode in (Mode.REPLAY, Mode.REPLAY_BOTH):
            # In the mode REPLAY_BOTH, the logits are in the L2 cache when the op starts. In real
            # use, `gathered_kl` runs directly after its logits were gathered, so the logits are
            # still in the cache.
            cold = self.case.mode == Mode.REPLAY
            x = self.leaves[0]
            ms = clocks.graph_time(lambda y: self.run(self.fresh((y,))), x, budget, cold=cold)
        else:
            ms = clocks.device_time(self.prepare, self.run, budget)
        self.result.ms = ms


def scalar_loss(op: str, out: Any) -> Tensor:
    """Returns the scalar to differentiate: the objective of an op, or its mean over rows."""
    loss = formulas.objective(op, out)
    return loss.mean() if loss.dim() else loss


def run_case(
    case: Case, loaded: dict[str, Finder], device: str, budget: float, *, checked: bool = True
) -> list[Result]:
    """Runs a case, and returns the results of all contenders that support the op of the case.

    If `checked` is True, values and gradients are compared with the formulas in fp64.
    """
    torch.manual_seed(case.rows * 1_000_003 + case.sizes[-1])
    finders = {name: f for name, f in loaded.items() if name == OURS or not case.alone}
    ops = {name: op for name, find in finders.items() if (op := find(case))}
    try:
        inputs = contenders.inputs(case, device)
    except RuntimeError as error:  # out of memory
        return [blank(case, name, status="failed", note=short(error)) for name in ops]
    entries = [Entry(case, name, op, inputs) for name, op in ops.items()]
    for entry in entries:
        entry.attempt(entry.examine, checked)
    results = [entry.result for entry in entries]
    ready = [entry for entry in entries if entry.result.status == "ok"]
    times = None
    if device == "cpu":
        times = clocks.wall_times(device, [(entry.prepare, entry.run) for entry in ready], budget)
    elif case.mode == Mode.WALL:
        times = clocks.host_times([(entry.step(), entry.prepare()) for entry in ready])
    if times is not None:
        for entry, ms in zip(ready, times, strict=True):
            entry.result.ms = ms
        return results
    measure = partial(yardstick, case.yardstick, inputs.leaves, budget)
    around = [measure()] if case.yardstick and checked and ready else []
    for entry in ready:
        entry.attempt(entry.clock, budget, "while timed: ")
        # The time of the yardstick is the floor of the case. GPU clocks drift, so the yardstick is
        # timed before and after the first contender.
        if len(around) == 1:
            around.append(measure())
    if not around:
        return results
    first = ready[0].result.contender.replace(OURS, "ours")
    note = f"{around[0]:.3f} ms before {first}, {around[1]:.3f} after"
    return [blank(case, case.yardstick, ms=sum(around) / 2, note=note), *results]


def yardstick(name: str, leaves: Leaves, budget: float) -> float:
    """Returns the time of a yardstick. A yardstick is `zeros_like(logits)` or a head's GEMMs."""

    def run(leaves: Leaves):
        if name == "zeros_like":
            return torch.zeros_like(*leaves)
        h, W = leaves
        z = h @ W.t()
        return z @ W, z.t() @ h  # forward and backward are three GEMMs

    return clocks.device_time(lambda: leaves, run, budget) * (4 / 3 if name == "4 GEMMs" else 1)
