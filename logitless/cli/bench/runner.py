"""Check, then time: one case at a time, every contender in turn.

A contender that raises is reported as failed and one whose numbers are off as wrong, each with the
reason, and neither is timed. One that overwrites the logits it was lent is timed on a copy which is
restored, off the clock, before each repetition; its line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference, timing
from .cases import FEW, FORWARD, HALF, HOST, INPLACE, OPTIONS, Case
from .contenders import COMPILED, OURS, Ops, short
from .timing import MIB, Budget, Timing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OVERWRITES, SYNCHRONISES = "overwrites its input", "synchronises with the host"


@dataclass
class Result:
    """One contender in one case. What couldn't be measured is None."""

    group: str
    mode: str
    op: str
    variant: str
    rows: int
    vocab: int
    dtype: str
    contender: str
    status: str = "ok"  # "ok", "wrong" or "failed"
    note: str = ""
    value_error: float | None = None
    grad_error: float | None = None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    reps: int | None = None
    extra_mib: float | None = None
    floor_bytes: float | None = None
    # filled in by verdict.judge, once the ceiling and all times are known
    tbps: float | None = None
    floor_x: float | None = None
    extra_x: float | None = None
    target: str = ""
    limit_ms: float | None = None
    reached: bool | None = None
    memory_limit_mib: float | None = None
    memory_reached: bool | None = None


@dataclass
class Entry:
    """A contender ready to run in a case: `prepare` lends it logits, `run` calls it on them."""

    result: Result
    prepare: Callable[[], Tensor]
    run: Callable[[Tensor], Any]


def run_case(case: Case, loaded: dict[str, Ops], device: str, budget: Budget) -> list[Result]:
    """Results of every contender that has this case's op."""
    torch.manual_seed(case.rows * 1_000_003 + case.vocab)
    try:
        x, target = inputs(case, device)
    except RuntimeError as error:  # too large for this machine
        failed = {"status": "failed", "note": short(error)}
        return [blank(case, name, **failed) for name, _ in taking_part(case, loaded)]
    options = option_values(case, device)
    entries = []
    for name, op in taking_part(case, loaded):
        if name == COMPILED:
            torch.compiler.reset()  # else its limit on recompilations ends in eager code
        entries.append(enter(case, name, op, x, target, options))
        timing.release()
    measure(case, [entry for entry in entries if entry.result.status == "ok"], x, budget)
    return [entry.result for entry in entries]


def taking_part(case: Case, loaded: dict[str, Ops]):
    key = "cross_entropy in place" if case.mode == INPLACE else case.op
    for name, ops in loaded.items():
        invited = name == OURS or not case.ours_only
        if key in ops and invited and (case.compiled or name != COMPILED):
            yield name, ops[key]


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Logits of variance 4 and targets that all count, but for the half-ignored cases."""
    x = torch.randn(case.rows, case.vocab, dtype=DTYPES[case.dtype], device=device).mul_(2)
    target = torch.randint(case.vocab, (case.rows,), device=device)
    if case.variant in HALF:
        run_length = 1 if case.variant == "alternating" else 256
        row = torch.arange(case.rows, device=device)
        target[row // run_length % 2 == 0] = reference.IGNORED
    return x, target


def option_values(case: Case, device: str) -> dict:
    if case.variant not in OPTIONS:
        return {}
    if case.variant == "weight":
        return {"weight": torch.rand(case.vocab, device=device) + 0.5}
    values = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "temperature": 0.7}
    return {case.variant: values[case.variant]}


def enter(case: Case, name: str, op: Callable, x: Tensor, target: Tensor, options: dict) -> Entry:
    """Runs a contender for its answer and its memory, and readies it for the clock."""
    result = blank(case, name)
    entry = Entry(result, lambda: lend(x, case), lambda leaf: call(case, op, leaf, target, options))
    try:
        scratch = x.clone()
        out, grad = entry.run(lend(scratch, case))
        check(case, result, x, target, options, out, grad)
        if not torch.equal(scratch, x):
            if case.mode != INPLACE:
                result.note = OVERWRITES
                result.status = "wrong" if name == OURS else result.status
            entry.prepare = lambda: lend(scratch.copy_(x), case)
        del out, grad
        extra = timing.extra_memory(x.device.type, entry.prepare(), entry.run)
        result.extra_mib = extra / MIB
        if case.mode == HOST and x.is_cuda and waits(entry):
            result.note = "; ".join(filter(None, (result.note, SYNCHRONISES)))
    except Exception as error:  # any failure of a contender is a finding, not the end of the run
        result.status, result.note = "failed", short(error)
    return entry


def blank(case: Case, name: str, **known) -> Result:
    where = (case.group, case.mode, case.op, case.variant, case.rows, case.vocab, case.dtype)
    return Result(*where, name, floor_bytes=case.floor_bytes, **known)


def lend(x: Tensor, case: Case) -> Tensor:
    """The same memory as a fresh leaf, so that no gradient or graph of an earlier call remains."""
    return x.detach().requires_grad_(case.mode not in (FORWARD, FEW))


def call(case: Case, op: Callable, x: Tensor, target: Tensor, options: dict):
    """One unit of work: (output, gradient of the logits or None)."""
    if not x.requires_grad:
        with torch.no_grad():
            return op(x, target, **options), None
    out = op(x, target, **options)
    loss = -(out[0] + reference.ENTROPY_BONUS * out[1]).mean() if case.op == "score" else out
    loss.backward()
    return out, x.grad


def check(case: Case, result: Result, x, target, options, out, grad) -> None:
    errors = reference.compare(case.op, x, target, options, out, grad)
    result.value_error, result.grad_error = errors
    bound = reference.TOLERANCE[case.dtype]
    if not errors.worst() <= bound:
        result.status, result.note = "wrong", f"error {errors.worst():.1e}, allowed {bound:.0e}"


def waits(entry: Entry) -> bool:
    """Whether a call makes the host wait for the GPU."""
    leaf = entry.prepare()
    torch.cuda.set_sync_debug_mode("error")
    try:
        entry.run(leaf)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def measure(case: Case, entries: list[Entry], x: Tensor, budget: Budget) -> None:
    if not entries:
        return
    if x.device.type == "cpu":
        works = [(entry.prepare, entry.run) for entry in entries]
        for entry, found in zip(entries, timing.wall_times(works, budget), strict=True):
            record(entry.result, found)
        return
    copies = many_copies(x) if case.mode == FEW else None
    for entry in entries:
        try:
            record(entry.result, clock(case, entry, copies, budget))
        except Exception as error:
            entry.result.status, entry.result.note = "failed", f"while timed: {short(error)}"
        timing.release()


def clock(case: Case, entry: Entry, copies: Tensor | None, budget: Budget) -> Timing:
    if copies is not None:
        return timing.graph_time(entry.run, copies, budget)
    if case.mode == HOST:
        return timing.host_time(entry.run, entry.prepare())
    return timing.device_time(entry.prepare, entry.run, budget)


def many_copies(x: Tensor) -> Tensor:
    """(M, N, V): enough copies of few rows to overflow L2 twice."""
    wanted = 2 * torch.cuda.get_device_properties(x.device).L2_cache_size
    count = min(512, max(4, wanted // (x.numel() * x.element_size())))
    return x.expand(count, *x.shape).contiguous()


def record(result: Result, found: Timing) -> None:
    result.ms, result.p20, result.p80, result.reps = found
