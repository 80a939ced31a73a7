"""What is stored of a contender in a case, and the verdict on it: floors and targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .cases import EAGER, OURS, PLAIN, Case, Mode, Work

OVERWRITES, SYNCHRONISES = "overwrites its input", "synchronises with the host"
KERNEL_START_MS = 0.006  # what a call on few rows may cost beyond its bytes
Times = dict[tuple[str, str], float | None]  # by contender and name of a case


@dataclass
class Result(Work):
    """One contender in one case. What couldn't be measured is None."""

    rows: int = 0
    vocab: int = 0
    contender: str = ""
    status: str = "ok"  # "ok", "wrong" or "failed"
    note: str = ""
    value_error: float | None = None
    grad_error: float | None = None
    ms: float | None = None
    extra_mib: float | None = None  # at most at once, beyond the inputs
    spare_mib: float | None = None  # the same, beyond the gradients too
    # filled in by `judge`, once the ceiling and all times are known
    eager_x: float | None = None  # time over PyTorch's
    floor_ms: float | None = None
    tbps: float | None = None
    target: str = ""
    limit_ms: float | None = None
    reached: bool | None = None


def blank(case: Case, contender: str, **known) -> Result:
    what = {"shape": case.shape, "dtype": case.dtype, "rows": case.rows, "vocab": case.sizes[-1]}
    work = (case.family, case.op, case.mode, case.variant)
    return Result(*work, **what, contender=contender, **known)


def judge(cases: Iterable[Case], results: list[Result], copy_tbps: float | None) -> None:
    """Fills in what follows from the times, and holds our own against their targets."""
    times = {(r.contender, r.name): r.ms for r in results}
    named = {case.name: case for case in cases}
    for r, case in ((r, named[r.name]) for r in results if r.name in named):
        eager, total = times.get((EAGER, r.name)), case.passes * case.rows * case.row_bytes
        r.eager_x = r.ms / eager if r.ms and eager else None
        r.floor_ms = times.get((case.yardstick, r.name))
        if copy_tbps and total and not case.yardstick and case.mode != Mode.WALL:
            r.floor_ms = total / copy_tbps / 1e9
            r.tbps = total / r.ms / 1e9 if r.ms else None
        if r.contender == OURS:
            hold(case, r, times)


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
    plain = replace(case, variant=PLAIN)  # a contender without this variant is compared in that one
    names = (of,) if isinstance(of, str) else of
    found = {name: times.get((name, case.name)) or times.get((name, plain.name)) for name in names}
    if of == "cross_entropy":
        found = {"our cross_entropy": times.get((OURS, replace(plain, op=of).name))}
    known = {name: ms for name, ms in found.items() if ms}
    text = f"≤ {'' if factor == 1 else f'{factor:.2f} × '}{', '.join(known or found)}"
    return text, factor * min(known.values()) if known else None
