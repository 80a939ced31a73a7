"""From raw times to claims: floors, bandwidths, and targets reached or not."""

from __future__ import annotations

from .cases import EAGER, OURS, PLAIN, Case, Mode
from .runner import SYNCHRONISES, Result

KERNEL_START_MS = 0.006  # what a call on few rows may cost beyond its bytes
Ran = list[tuple[Case, list[Result]]]


def judge(ran: Ran, copy_tbps: float | None) -> list[Result]:
    """Fills in what follows from the times, and holds our own against their targets."""
    for case, results in ran:
        times = {r.contender: r.ms for r in results}
        floor = times.get(case.yardstick)
        if copy_tbps and case.passes and not case.yardstick and case.mode != Mode.WALL:
            floor = case.floor_bytes / copy_tbps / 1e9
        for r in results:
            r.floor_ms = floor
            if r.ms and times.get(EAGER):
                r.eager_x = r.ms / times[EAGER]
            if r.ms and floor and not case.yardstick:
                r.tbps = case.floor_bytes / r.ms / 1e9
            if r.contender == OURS:
                hold(case, r, ran)
    return [result for _, results in ran for result in results]


def hold(case: Case, r: Result, ran: Ran) -> None:
    """The strictest limit on time counts; one whose reference wasn't measured does not."""
    limits = [limit(case, of, factor, r.floor_ms, ran) for of, factor in case.targets.items()]
    r.target = ", ".join(text for text, _ in limits)
    r.limit_ms = min((ms for _, ms in limits if ms is not None), default=None)
    kept = []
    if r.limit_ms is not None and r.ms is not None:
        kept = [r.ms <= r.limit_ms, SYNCHRONISES not in r.note]
    if case.spare_mib is not None and r.spare_mib is not None:
        r.target += f"{', ' if r.target else ''}≤ {case.spare_mib:.0f} MiB"
        kept.append(r.spare_mib <= case.spare_mib)
    if r.status != "ok":
        kept.append(False)
    r.reached = all(kept) if kept else None


def limit(case: Case, of, factor: float, floor: float | None, ran: Ran) -> tuple[str, float | None]:
    """A target in words, and in milliseconds."""
    if of in ("floor", "start + floor"):
        start = KERNEL_START_MS if of == "start + floor" else 0.0
        passes = "" if case.passes == 1 else f"{case.passes:g}"
        unit = f"× {case.yardstick}" if case.yardstick else f"· {passes}B/C"
        text = f"≤ {f'{start * 1e3:.0f} µs + ' if start else ''}{factor:.2f} {unit}"
        return text, None if floor is None else start + factor * floor
    if of == "cross_entropy":
        times = {"our cross_entropy": time_of(OURS, of, PLAIN, case, ran)}
    else:
        times = {
            name: time_of(name, case.op, case.variant, case, ran)
            or time_of(name, case.op, PLAIN, case, ran)
            for name in ((of,) if isinstance(of, str) else of)
        }
    known = {name: ms for name, ms in times.items() if ms}
    text = f"≤ {'' if factor == 1 else f'{factor:.2f} × '}{', '.join(known or times)}"
    return text, factor * min(known.values()) if known else None


def time_of(contender: str, op: str, variant: str, case: Case, ran: Ran) -> float | None:
    """A contender's time for an op in the mode, shape and dtype of a case."""
    wanted = (op, variant, case.mode, case.shape, case.dtype)
    for other, results in ran:
        if (other.op, other.variant, other.mode, other.shape, other.dtype) == wanted:
            return next((r.ms for r in results if r.contender == contender), None)
    return None
