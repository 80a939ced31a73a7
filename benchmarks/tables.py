"""Rewrites the tables in README.md and docs/, and the plots, from the stored results.

    python -m benchmarks.tables            `make tables`
    python -m benchmarks.tables --check    changes nothing; exit status 1 if a table is out of date

A table stands in a page between <!-- table NAME --> and <!-- end -->. Its lines come from one run,
the newest in benchmarks/results/h200 that measured its cases, and the run is named below it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from logitless.cli.bench import plots, report
from logitless.cli.bench.cases import COMPILED, EAGER, OURS, PLAIN, Mode
from logitless.cli.bench.results import OVERWRITES, Result

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "benchmarks/results/h200"
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES = {EAGER: "PyTorch", COMPILED: "torch.compile", "liger": "Liger", OURS: OURS}
TITLES |= {"cce": "cut-cross-entropy", "3 GEMMs": "the three GEMMs alone"}
LARGE, UNALIGNED, SMALL = "8192×128256", "16384×50257", "64×1024"
PLAIN_HEAD = {"family": "heads", "op": "cross_entropy", "variant": PLAIN}
PLAIN_LOGITS = {"family": "logits", "op": "cross_entropy", "variant": PLAIN}
HEAD = "rows × width × vocabulary"
DAGGER = "†"  # beside a time: it overwrites its input


class Run(NamedTuple):
    """A stored result."""

    path: Path
    document: dict
    results: list[Result]

    def find(self, **wanted: str) -> Result | None:
        """The first timed result whose fields are these."""
        return next(iter(self.all(**wanted)), None)

    def all(self, **wanted: str) -> list[Result]:
        fits = (r for r in self.results if all(getattr(r, k) == v for k, v in wanted.items()))
        return [r for r in fits if r.ms]

    def shapes(self, **wanted: str) -> list[str]:
        return list(dict.fromkeys(r.shape for r in self.all(**wanted)))


def newest(**wanted: str) -> Run:
    """The run of the latest date that has a result of these fields."""
    runs = []
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        runs.append(Run(path, document, [Result(**row) for row in document["rows"]]))
    return max((run for run in runs if run.find(**wanted)), key=lambda run: run.document["date"])


def logits_run() -> Run:
    return newest(**PLAIN_LOGITS, mode=Mode.INPLACE)


def heads_run() -> Run:
    return newest(**PLAIN_HEAD, contender="liger")


def teachers_run() -> Run:
    return newest(family="teachers", op="topk_distill", contender=EAGER)


def sizes(shape: str) -> str:
    return " × ".join(f"{int(n):,}" for n in shape.split("×"))


def ms(value: float | None) -> str:
    return report.number(value, ".2f" if (value or 0.0) < 10 else ".1f")


def cell(r: Result | None, memory: str = "") -> str:
    """Milliseconds and, in brackets, the MiB of that field."""
    if r is None:
        return report.NOTHING
    mib = getattr(r, memory) if memory else None
    mark = f" {DAGGER}" if OVERWRITES in r.note else ""
    return ms(r.ms) + ("" if mib is None else f" ({max(mib, 0.0):,.0f})") + mark


def title(run: Run, contender: str) -> str:
    """Its name, and for a library its version."""
    version = run.document["contenders"].get(contender, "")
    if contender in (EAGER, COMPILED, OURS) or version.startswith("absent"):
        version = ""
    return f"{TITLES.get(contender, contender)} {version}".strip()


def cells(run: Run, contenders: tuple[str, ...], memory: str = "", **wanted: str) -> dict[str, str]:
    return {title(run, n): cell(run.find(**wanted, contender=n), memory) for n in contenders}


def table(rows: list[dict[str, str]], *runs: Run) -> str:
    """Its lines, and below them where they come from; {up} leads from the page to the root."""
    sources = []
    for run in runs:
        report_of = run.path.with_suffix(".md").relative_to(ROOT)
        sources.append(f"[{run.path.stem}]({{up}}{report_of}), commit {run.document['commit']}")
    first = runs[0].document
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "triton"))
    origin = f"{first['device']['name']}, {versions}. From {'; '.join(sources)}."
    return f"{report.table(rows)}\n\n{origin}"


def in_liger_memory(run: Run, shape: str) -> tuple[Result, Result | None]:
    """Liger over a head, and ours in the workspace that comes nearest to its memory, if it does."""
    liger = run.find(**PLAIN_HEAD, contender="liger", shape=shape)
    ours = run.all(op="cross_entropy", contender=OURS, shape=shape)
    small = [r for r in ours if r.family == "heads" and re.fullmatch(r"\d+ MiB", r.variant)]

    def apart(r: Result) -> float:
        return abs(math.log((r.spare_mib or 1.0) / (liger.spare_mib or 1.0)))

    near = [r for r in small if apart(r) < math.log(1.25)]
    return liger, min(near, key=apart, default=None)


def summary() -> str:
    """README's one table: ours by default, and ours in Liger's memory beside Liger."""
    logits, heads = logits_run(), heads_run()
    names, equal = (EAGER, COMPILED, "liger", OURS), f"{OURS} in Liger's memory"
    rows, notes, untried = [], [], []
    for shape in (LARGE, UNALIGNED):
        at = PLAIN_LOGITS | {"shape": shape, "dtype": "bf16"}
        row = cells(logits, names, "extra_mib", **at, mode=Mode.BACKWARD)
        in_place = logits.find(**at, contender=OURS, mode=Mode.INPLACE)
        rows.append({"": f"logits {sizes(shape)}", **row, equal: cell(in_place, "extra_mib")})
    for shape in heads.shapes(**PLAIN_HEAD, contender="liger"):
        liger, ours = in_liger_memory(heads, shape)
        row = cells(heads, names, "spare_mib", **PLAIN_HEAD, shape=shape)
        rows.append({"": f"head {sizes(shape)}", **row, equal: cell(ours, "spare_mib")})
        if ours is None:
            untried.append(sizes(shape))
        elif liger.ms < ours.ms:
            notes.append(f"In its own memory Liger is faster at {sizes(shape)}.")
    if untried:
        notes.append(f"Not measured in Liger's memory in this run: {', '.join(untried)};")
        notes.append(
            "[docs/heads.md]({up}docs/heads.md) has a commit that was, and was slower than Liger."
        )
    at = PLAIN_LOGITS | {"shape": SMALL, "mode": Mode.WALL}
    small = cells(logits, names, "extra_mib", **at)
    rows.append({"": f"logits {sizes(SMALL)}, host included", **small, equal: report.NOTHING})
    return "\n".join([table(rows, logits, heads), *(["", *notes] if notes else [])])


def heads() -> str:
    run = heads_run()
    names = (EAGER, COMPILED, "liger", "cce", "fla", OURS, "3 GEMMs")
    shapes = run.shapes(**PLAIN_HEAD, contender="liger")
    how = {"memory": "spare_mib", **PLAIN_HEAD}
    return table([{HEAD: sizes(s), **cells(run, names, shape=s, **how)} for s in shapes], run)


def workspaces() -> str:
    """Time against memory: our settings and Liger, by falling memory."""
    run, rows = heads_run(), []
    for shape in run.shapes(**PLAIN_HEAD, contender="liger"):
        ours = run.all(family="heads", op="cross_entropy", contender=OURS, shape=shape)
        tried = [r for r in ours if re.fullmatch(r"plain|\d+ MiB|.*summed in.*", r.variant)]
        tried += run.all(**PLAIN_HEAD, contender="liger", shape=shape)
        for r in sorted(tried, key=lambda r: -(r.spare_mib or 0.0)):
            setting = r.variant.replace("summed in the weight's dtype", '`accumulate="weight"`')
            setting = setting.replace("summed in fp32", '`accumulate="fp32"`')
            setting = setting if setting[0].isdigit() else f"1 GiB, {setting}"
            setting = "1 GiB, the default" if r.variant == PLAIN else setting
            over = r.ms / r.floor_ms if r.ms and r.floor_ms else None
            rows.append({
                HEAD: sizes(shape),
                "workspace": title(run, "liger") if r.contender == "liger" else setting,
                "ms": ms(r.ms),
                "× the three GEMMs": report.number(over, ".2f"),
                "MiB taken": report.number(r.spare_mib, ",.0f"),
            })  # fmt: skip
    return table(rows, run)


def cross_entropy() -> str:
    run, rows = logits_run(), []
    for mode in (Mode.FORWARD, Mode.BACKWARD, Mode.INPLACE):
        for r in run.all(**PLAIN_LOGITS, mode=mode, contender=OURS):
            at = PLAIN_LOGITS | {"mode": mode, "shape": r.shape, "dtype": r.dtype}
            times = cells(run, (EAGER, COMPILED, "liger", "fla", "quack", OURS), **at)
            rows.append(
                {"": f"{mode}, {sizes(r.shape)} {r.dtype}", **times, "floor": ms(r.floor_ms)}
            )
    return table(rows, run)


def small_calls() -> str:
    """Where launch overhead dominates: the host's time counts."""
    run = logits_run()
    names = (EAGER, COMPILED, "liger", "fla", "quack", OURS)
    at = PLAIN_LOGITS | {"mode": Mode.WALL}
    shapes = run.shapes(**at, contender=OURS)
    return table([{"ms": sizes(s), **cells(run, names, shape=s, **at)} for s in shapes], run)


def teachers() -> str:
    run, rows = teachers_run(), []
    for ours in run.all(family="teachers", contender=OURS):
        by = {r.contender: r.ms for r in run.results if r.name == ours.name}
        names = (EAGER, COMPILED, "liger", OURS)
        times = {title(run, name): report.time_text(by.get(name)) for name in names}
        rows.append({"": f"{ours.work}, {ours.mode}, {sizes(ours.shape)} {ours.dtype}", **times})
    return table(rows, run)


def targets() -> str:
    """How many of the targets were reached, and each that was missed."""
    runs = {"logits": logits_run(), "teachers": teachers_run(), "heads": heads_run()}
    rows, counts = [], []
    for family, run in runs.items():
        judged = [r for r in run.results if r.family == family and r.reached is not None]
        counts.append(f"{sum(bool(r.reached) for r in judged)} of {len(judged)} ({family})")
        for r in judged:
            if not r.reached:
                time = f"{report.time_text(r.ms)}, {report.number(r.spare_mib, '.0f')} MiB"
                where = f"{r.work}, {r.mode}, {sizes(r.shape)} {r.dtype}"
                allowed = report.time_text(r.limit_ms)
                rows.append({"missed": where, "target": r.target, "that is": allowed, "ours": time})
    reached = f"Reached: {', '.join(counts)}."
    return f"{reached}\n\n{table(rows or [{'missed': 'none'}], *runs.values())}"


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "heads": heads,
    "workspaces": workspaces,
    "cross-entropy": cross_entropy,
    "small-calls": small_calls,
    "teachers": teachers,
    "targets": targets,
}


def rewritten(page: Path) -> str:
    """The page with its tables made anew."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def block(found: re.Match) -> str:
        return f"{found[1]}{TABLES[found[2]]().replace('{up}', up)}\n{found[3]}"

    return BLOCK.sub(block, page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    old = [page for page in PAGES if page.read_text() != rewritten(page)]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if check else 'rewritten'}")
        if not check:
            page.write_text(rewritten(page))
    if not check:
        for run in (logits_run(), teachers_run(), heads_run()):
            print(*(path.relative_to(ROOT) for path in plots.save(run.document, RESULTS)), sep="\n")
    return int(check and bool(old))


if __name__ == "__main__":
    raise SystemExit(main())
