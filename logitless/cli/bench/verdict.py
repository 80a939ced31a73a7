"""From raw times to claims: bandwidth, multiples of the floor, and targets reached or not."""

from __future__ import annotations

from .cases import BACKWARD, FEW, FORWARD, HOST, INPLACE, KERNEL_START_MS, SPARE_MIB, Case
from .contenders import EAGER, OURS, TRITON_RIVALS
from .runner import SYNCHRONISES, Result
from .timing import MIB

FLOOR_NAME = {FORWARD: "B/C", FEW: "B/C", BACKWARD: "3B/C", INPLACE: "2B/C"}


def judge(ran: list[tuple[Case, list[Result]]], copy_tbps: float) -> list[Result]:
    """Fills in what follows from the times, and holds our own against their targets."""
    everything = [result for _, results in ran for result in results]
    for case, results in ran:
        for result in results:
            derive(case, result, copy_tbps)
            if result.contender == OURS:
                hold_to_memory(case, result)
                hold_to_time(case, result, everything, copy_tbps)
    return everything


def derive(case: Case, result: Result, copy_tbps: float) -> None:
    if result.extra_mib is not None:
        result.extra_x = result.extra_mib * MIB / case.logits_bytes
    if result.ms is not None and case.mode != HOST:  # a call bound by the host has no floor
        result.tbps = case.floor_bytes / (result.ms * 1e-3) / 1e12
        result.floor_x = copy_tbps / result.tbps


def hold_to_memory(case: Case, result: Result) -> None:
    """The gradient and a little more; in place, the little alone."""
    if case.mode not in (BACKWARD, INPLACE):
        return
    gradient = case.logits_bytes / MIB if case.mode == BACKWARD else 0.0
    result.memory_limit_mib = gradient + SPARE_MIB
    if result.extra_mib is not None:
        result.memory_reached = result.extra_mib <= result.memory_limit_mib


def hold_to_time(case: Case, result: Result, everything: list[Result], copy_tbps: float) -> None:
    if case.target is None:
        return
    limit, of = case.target
    floor_ms = case.floor_bytes / copy_tbps / 1e9
    if of == "floor":
        result.target = f"≤ {limit:.2f} · {FLOOR_NAME[case.mode]}"
        result.limit_ms = limit * floor_ms
    elif of == "few rows":
        result.target = f"≤ {KERNEL_START_MS * 1e3:.0f} µs + {limit:.1f} · B/C"
        result.limit_ms = KERNEL_START_MS + limit * floor_ms
    elif of == "plain":
        result.target = f"≤ {limit:.2f} × plain"
        result.limit_ms = scaled(limit, find(everything, case, OURS, plain=True))
    else:
        result.target = f"≤ {limit:.2f} × eager"
        result.limit_ms = scaled(limit, find(everything, case, EAGER))
    if case.mode == HOST:
        result.target += ", < rivals"
        rivals = [find(everything, case, name) for name in TRITON_RIVALS]
        result.limit_ms = min((t for t in [result.limit_ms, *rivals] if t), default=None)
    if result.status != "ok":
        result.reached = False
    elif result.limit_ms is not None and result.ms is not None:
        result.reached = result.ms <= result.limit_ms and SYNCHRONISES not in result.note


def scaled(limit: float, ms: float | None) -> float | None:
    return None if ms is None else limit * ms


def find(
    everything: list[Result], case: Case, contender: str, *, plain: bool = False
) -> float | None:
    """The time of a contender in this case, or in the plain cross-entropy of its shape."""
    op, variant = ("cross_entropy", "plain") if plain else (case.op, case.variant)
    wanted = (contender, case.mode, op, variant, case.rows, case.vocab, case.dtype)
    for r in everything:
        if (r.contender, r.mode, r.op, r.variant, r.rows, r.vocab, r.dtype) == wanted:
            return r.ms
    return None


def all_ours_right(results: list[Result]) -> bool:
    return all(r.status == "ok" for r in results if r.contender == OURS)
