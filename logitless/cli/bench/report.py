"""The report of a result: one table for our targets, one for each kind of work.

It is made from the stored document alone: an old result can be shown again, without its machine.
"""

from __future__ import annotations

from .cases import OURS, Mode
from .contenders import NAMES
from .results import OVERWRITES, Result

NOTHING = "–"


def markdown(document: dict) -> str:
    results = [Result(**row) for row in document["rows"]]
    ours = [target_row(r, results) for r in results if r.contender == OURS]
    facts = "\n".join(f"- {fact}" for fact in [*about(document), *outcome(results)])
    parts = ["# Benchmark", facts, "## Targets", table(ours)]
    for family, mode in dict.fromkeys((r.family, r.mode) for r in results):
        rows = [work_row(r) for r in results if (r.family, r.mode) == (family, mode)]
        parts += [f"## {family.capitalize()}: {mode}", table(rows)]
    return "\n\n".join(parts) + "\n"


def table(rows: list[dict[str, str]]) -> str:
    """Of rows by column; a column that says nothing is left out."""
    columns = [c for c in rows[0] if any(row[c] not in ("", NOTHING) for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def about(document: dict) -> list[str]:
    """What was run, where and when, one fact a line."""
    standing, C, left = document["contenders"], document["copy_tbps"], document.get("left")
    present = {name: text for name, text in standing.items() if not text.startswith("absent")}
    facts = [
        f"device: {', '.join(f'{v}' for v in document['device'].values() if v)}",
        f"versions: {', '.join(f'{k} {v}' for k, v in document['versions'].items() if v)}",
        f"contenders: {', '.join(f'{k} {v}' for k, v in present.items())}",
        *(f"{name} {text}" for name, text in standing.items() if name not in present),
        f"commit: {document['commit'] or 'unknown'}, date: {document['date']}",
        "times are medians; logits have variance 4, targets are uniform",
    ]
    if C:
        facts += [
            f"C: {C:.3f} TB/s, bytes read plus bytes written by a copy; B: bytes of the logits",
            "floor: bytes that must move, over C; for a head the GEMMs that it needs, by cuBLAS",
        ]
    return [*facts, f"{left} cases are left for --resume"] if left else facts


def outcome(results: list[Result]) -> list[str]:
    reached = [r.reached for r in results if r.reached is not None]
    lines = [f"targets reached: {sum(reached)} of {len(reached)}"]
    for r in results:
        if r.reached is False:
            why = r.note or f"{number(r.spare_mib, '.1f')} MiB beyond gradients"
            if r.ms and r.limit_ms and r.ms > r.limit_ms:
                why = f"{time_text(r.ms)} (our target was {time_text(r.limit_ms)})"
            lines.append(f"missed: {r.name}: {why}")
    return lines


def target_row(r: Result, results: list[Result]) -> dict[str, str]:
    """Beside the fastest of the others. One that destroys the logits isn't doing the same work."""
    rivals = [x for x in results if x.name == r.name and x.contender in NAMES[1:] and x.ms]
    fair = [x for x in rivals if x.mode == Mode.INPLACE or OVERWRITES not in x.note]
    best = min(fair, key=lambda x: x.ms or 0.0, default=None)
    return {
        **{column: getattr(r, column) for column in ("work", "mode", "shape", "dtype")},
        "target": r.target,
        "allowed": time_text(r.limit_ms),
        "ours": time_text(r.ms) if r.status == "ok" else r.status,
        "reached": NOTHING if r.reached is None else "yes" if r.reached else "NO",
        "MiB beyond gradients": number(r.spare_mib, ".1f"),
        "best other": f"{best.contender} {time_text(best.ms)}" if best else NOTHING,
        "ours faster": number(best and best.ms and r.ms and best.ms / r.ms, ".2f", " ×"),
    }


def work_row(r: Result) -> dict[str, str]:
    return {
        **{column: getattr(r, column) for column in ("work", "shape", "dtype", "contender")},
        "time": time_text(r.ms) if r.status == "ok" else r.status,
        "× eager": number(r.eager_x, ".2f"),
        "TB/s": number(r.tbps, ".3g"),
        "floor / time": number(r.floor_ms and r.ms and r.floor_ms / r.ms, ".0%"),
        "extra MiB": number(r.extra_mib, ".1f"),
        "beyond gradients": number(r.spare_mib, ".1f"),
        "error": number(r.value_error, ".0e"),
        "of gradients": number(r.grad_error, ".1e"),
        "note": r.note,
    }


def time_text(ms: float | None) -> str:
    return number(ms and ms * 1e3, ".1f", " µs") if ms and ms < 0.2 else number(ms, ".3f", " ms")


def number(value: float | None, spec: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{spec}}{unit}"
