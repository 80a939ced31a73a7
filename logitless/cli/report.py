"""Formats numbers, times, exceptions and tables as text or Markdown."""

from __future__ import annotations

NOTHING = "–"


def number(value: float | None, spec: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{spec}}{unit}"


def time_text(ms: float | None) -> str:
    return number(ms and ms * 1e3, ".1f", " µs") if ms and ms < 0.2 else number(ms, ".3f", " ms")


def bytes_text(n: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.3g} {unit}" if n < 1000 else f"{n:,.0f} {unit}"
        n /= 1000
    raise AssertionError


def sizes(shape: str) -> str:
    """Turns "8192×128256" into "8,192 × 128,256"."""
    return " × ".join(f"{int(n):,}" for n in shape.split("×"))


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows {column: cell}, without empty columns."""
    columns = [c for c in rows[0] if any(row[c] not in ("", NOTHING) for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
