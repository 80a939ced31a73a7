"""Stores a run, checks whether the results of logitless reach their targets, and writes the report.

A run of the benchmark is stored as a document. A document is a dictionary of facts about the run,
and the key "rows" holds the results. The report depends only on the document, so a report of an old
run can be written on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from logitless.cli import machine
from logitless.cli.report import NOTHING, number, table, time_text

from .cases import EAGER, OUR_PLAIN, OURS, PLAIN, Case, Mode, Work
from .contenders import NAMES

OVERWRITES, SYNCHRONISES = "overwrites its input", "synchronises with the host"
KERNEL_START_MS = 0.006  # added to the time limit if the reference is "start + floor"
Times = dict[tuple[str, str], float]  # maps (contender, name of a case) to milliseconds


@dataclass
class Result(Work):
    """The result of one contender in one case. Numbers that were not measured are None."""

    rows: int = 0
    vocab: int = 0
    contender: str = ""
    status: str = "ok"  # "ok", "wrong" or "failed"
    note: str = ""
    value_error: float | None = None
    grad_error: float | None = None
    ms: float | None = None
    extra_mib: float | None = None  # peak memory without the inputs
    spare_mib: float | None = None  # peak memory without the inputs and the gradients
    # `judge` sets the following fields after all cases have run, when the copy bandwidth is known.
    eager_x: float | None = None  # the contender's time divided by PyTorch's time
    floor_ms: float | None = None
    tbps: float | None = None
    target: str = ""
    limit_ms: float | None = None
    reached: bool | None = None


def blank(case: Case, contender: str, **known) -> Result:
    known |= {field.name: getattr(case, field.name) for field in fields(Work)}
    return Result(rows=case.rows, vocab=case.sizes[-1], contender=contender, **known)


def new_document(device: str, contenders: dict[str, str], commit: str | None) -> dict:
    """Returns the document of a new run, without results."""
    return {
        "device": machine.device(device),
        "versions": machine.versions(),
        "contenders": contenders,
        "commit": commit or machine.commit(),
        "date": machine.now(),
        "copy_tbps": None,
        "rows": [],
    }


def read(path: Path) -> dict:
    document = json.loads(path.read_text())
    try:
        return document | {"rows": [Result(**row) for row in document["rows"]]}
    except TypeError as error:  # a field of a result is unknown or missing
        raise ValueError(f"{path} must be a result of this version of the benchmark.") from error


def write(document: dict, text: str, stem: Path) -> list[Path]:
    """Writes the document as JSON and the report as Markdown, and returns both paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stored, report = stem.with_suffix(".json"), stem.with_suffix(".md")
    data = json.dumps(document, indent=1, ensure_ascii=False, default=asdict)
    stored.write_text(data + "\n")
    report.write_text(text)
    return [stored, report]


def joined(first: dict, *others: dict) -> dict:
    """Joins the results of several documents into one document.

    The device, the versions, the contenders and the commit of all documents must be equal.
    """
    for fact in ("device", "versions", "contenders", "commit"):
        if differs := [part[fact] for part in others if part[fact] != first[fact]]:
            raise ValueError(f"{fact} must be {first[fact]} in every part, got {differs[0]}.")
    parts = (first, *others)
    ceiling = max(part["copy_tbps"] or 0.0 for part in parts) or None
    return first | {"copy_tbps": ceiling, "rows": [row for part in parts for row in part["rows"]]}


def judge(cases: Iterable[Case], results: list[Result], copy_tbps: float | None) -> None:
    """Sets the fields that depend on other results, and checks the targets of logitless."""
    times = {(r.contender, r.name): r.ms for r in results if r.ms}
    named = {case.name: case for case in cases}
    for r, case in ((r, named[r.name]) for r in results if r.name in named):
        eager, total = times.get((EAGER, r.name)), case.passes * case.rows * case.row_bytes
        r.eager_x = r.ms / eager if r.ms and eager else None
        r.floor_ms = times.get((case.yardstick, r.name))
        if copy_tbps and total:
            r.floor_ms = total / copy_tbps / 1e9
            r.tbps = total / r.ms / 1e9 if r.ms else None
        if r.contender == OURS:
            check_targets(case, r, times)


def check_targets(case: Case, r: Result, times: Times) -> None:
    """Sets the fields `target`, `limit_ms` and `reached` of a result of logitless.

    If a case has several time limits, our time must be within the shortest limit. A time limit is
    ignored if the time of its reference was not measured.
    """
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


def limit(case: Case, of: str, factor: float, floor: float | None, times: Times):
    """Returns the text of a target, and the time limit of the target in milliseconds.

    The time limit is `factor` times the time of a reference. `of` names the reference, as the
    docstring of `Case` explains. If the reference is "start + floor", 6 µs are added to the time
    limit. If `of` names several contenders, the reference is the fastest contender. If the
    reference was not measured, the time limit is None.
    """
    plain, start = replace(case, variant=PLAIN), KERNEL_START_MS if of == "start + floor" else 0.0
    if "floor" in of:
        passes = "" if case.passes == 1 else f"{case.passes:g}"
        references = {case.yardstick or f"{passes}B/C": floor}
    elif of == OUR_PLAIN:
        references = {of: times.get((OURS, replace(plain, op="cross_entropy").name))}
    else:  # if a contender lacks this variant, its plain variant is the reference
        names = of.split(", ")
        references = {x: times.get((x, case.name), times.get((x, plain.name))) for x in names}
    known = {name: ms for name, ms in references.items() if ms}
    text = f"{start * 1e3:.0f} µs + " if start else ""
    text += ("" if factor == 1 else f"{factor:.2f} × ") + ", ".join(known or references)
    return f"≤ {text}", start + factor * min(known.values()) if known else None


def markdown(document: dict) -> str:
    results = document["rows"]
    ours = [target_row(r, results) for r in results if r.contender == OURS]
    facts = "\n".join(f"- {fact}" for fact in [*about(document), *outcome(results)])
    parts = ["# Benchmark", facts, "## Targets", table(ours)]
    for family, mode in dict.fromkeys((r.family, r.mode) for r in results):
        rows = [work_row(r) for r in results if (r.family, r.mode) == (family, mode)]
        parts += [f"## {family.capitalize()}: {mode}", table(rows)]
    return "\n\n".join(parts) + "\n"


def about(document: dict) -> list[str]:
    """Returns the facts of a run, one per line: device, versions, commit and date."""
    standing, C, left = document["contenders"], document["copy_tbps"], document.get("left")
    present = {name: text for name, text in standing.items() if not text.startswith("absent")}
    facts = [
        f"device: {', '.join(f'{v}' for v in document['device'].values() if v)}",
        f"versions: {', '.join(f'{k} {v}' for k, v in document['versions'].items() if v)}",
        f"contenders: {', '.join(f'{k} {v}' for k, v in present.items())}",
        *(f"{name} {text}" for name, text in standing.items() if name not in present),
        f"commit: {document['commit'] or 'unknown'}, date: {document['date']}",
        "times are medians; logits have variance 4; targets are uniform",
    ]
    if C:
        facts += [
            f"C: {C:.3f} TB/s, bytes read plus bytes written by a copy; B: bytes of the logits",
            "floor: bytes that must move, divided by C; for a head the time of its GEMMs by cuBLAS",
        ]
    return [*facts, f"{left} cases are left for --resume"] if left else facts


def outcome(results: list[Result]) -> list[str]:
    """Returns a line with the number of reached targets, and one line per missed target."""
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
    """Returns a row of the table of targets. The row also names the fastest other contender.

    A contender that overwrites the logits is compared only with our in-place result. A comparison
    with our other results would be unfair, because a function that keeps the logits does more work.
    """
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
        "value error": number(r.value_error, ".0e"),
        "gradient error": number(r.grad_error, ".1e"),
        "note": r.note,
    }
