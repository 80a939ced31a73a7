"""From raw times to claims: floors, bandwidths, and targets reached or not."""

from __future__ import annotations

from .cases import EAGER, OURS, Case, Mode, size
from .runner import SYNCHRONISES, Result

KERNEL_START_MS = 0.006  # what a call on few rows may cost beyond its bytes
Times = dict[tuple[str, ...], float | None]  # by contender, work, mode, shape and dtype


def judge(ran: list[tuple[Case, list[Result]]], copy_tbps: float | None) -> list[Result]:
    """Fills in what follows from the times, and holds our own against their targets."""
    times = {(r.contender, *r.key): r.ms for _, results in ran for r in results}
    for case, results in ran:
        floor = next((r.ms for r in results if r.contender == case.yardstick), None)
        if copy_tbps and case.passes and not case.yardstick and case.mode != Mode.WALL:
            floor = case.floor_bytes / copy_tbps / 1e9
        for r in results:
            r.floor_ms, eager = floor, times.get((EAGER, *r.key))
            r.eager_x = r.ms / eager if r.ms and eager else None
            if r.ms and floor and not case.yardstick:
                r.tbps = case.floor_bytes / r.ms / 1e9
            if r.contender == OURS:
                hold(case, r, times)
    return [result for _, results in ran for result in results]


def hold(case: Case, r: Result, times: Times) -> None:
    """The strictest limit on time counts; one whose reference wasn't measured does not."""
    limits = [limit(case, of, factor, r.floor_ms, times) for of, factor in case.targets.items()]
    r.limit_ms = min((ms for _, ms in limits if ms is not None), default=None)
    kept = [False] if r.status != "ok" else []
    if r.limit_ms is not None and r.ms is not None:
        kept += [r.ms <= r.limit_ms, SYNCHRONISES not in r.note]
    if case.spare_mib is not None and r.spare_mib is not None:
        limits.append((f"≤ {case.spare_mib:.0f} MiB", None))
        kept.append(r.spare_mib <= case.spare_mib)
    r.target = ", ".join(text for text, _ in limits)
    r.reached = all(kept) if kept else None


def limit(case: Case, of, factor: float, floor: float | None, times: Times):
    """A target in words, and in milliseconds if what it speaks of was measured."""
    if of in ("floor", "start + floor"):
        start = KERNEL_START_MS if of == "start + floor" else 0.0
        passes = "" if case.passes == 1 else f"{case.passes:g}"
        unit = f"× {case.yardstick}" if case.yardstick else f"· {passes}B/C"
        text = f"≤ {f'{start * 1e3:.0f} µs + ' if start else ''}{factor:.2f} {unit}"
        return text, None if floor is None else start + factor * floor

    def time_of(name: str, *works: str) -> float | None:
        where = (case.mode, size(case.shape), case.dtype)
        return next((ms for work in works if (ms := times.get((name, work, *where)))), None)

    names = (of,) if isinstance(of, str) else of
    found = {name: time_of(name, case.work, case.op) for name in names}
    if of == "cross_entropy":
        found = {"our cross_entropy": time_of(OURS, of)}
    known = {name: ms for name, ms in found.items() if ms}
    text = f"≤ {'' if factor == 1 else f'{factor:.2f} × '}{', '.join(known or found)}"
    return text, factor * min(known.values()) if known else None
