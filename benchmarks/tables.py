"""Rewrites the tables in README.md and docs/, and the plots, from the stored results.

    python -m benchmarks.tables            `make tables`

In a page, each table stands between <!-- table NAME --> and <!-- end -->. The numbers of a table
come from one run in benchmarks/results/h200. The run is named below the table. Of all runs that
measured the most cases of the table's family, the newest run is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks import heads_memory, pictures
from benchmarks.bench import cases, plots, results
from benchmarks.bench.cases import COMPILED, EAGER, FAMILIES, OURS, PLAIN, Mode
from benchmarks.bench.results import OVERWRITES, Result
from logitless.cli.report import NOTHING, number, sizes, table, time_text

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "benchmarks/results/h200"
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES = {EAGER: "PyTorch", COMPILED: "torch.compile", "liger": "Liger", OURS: OURS}
TITLES |= {"cce": "cut-cross-entropy"}
LARGE, UNALIGNED = "8192×128256", "16384×50257"
PLAIN_HEAD = {"family": "heads", "op": "cross_entropy", "variant": PLAIN}
PLAIN_LOGITS = {"family": "logits", "op": "cross_entropy", "variant": PLAIN}
NAMES = (EAGER, COMPILED, "liger", OURS)
ON_LOGITS = (EAGER, COMPILED, "liger", "fla", "quack", OURS)
HEAD = "rows × width × vocabulary"
WORKSPACE = re.compile(r"\d+ MiB")
MEMORY = "memory"  # stands for the runs of benchmarks/heads_memory.py
DAGGER = "†"  # marks the time of a contender that overwrites its input
Rows = list[dict[str, str]]


class Run(NamedTuple):
    """A stored result."""

    path: Path
    document: dict

    @property
    def rows(self) -> list[Result]:
        return self.document["rows"]

    def all(self, **wanted: str) -> list[Result]:
        """The timed results whose fields equal `wanted`."""
        fits = (r for r in self.rows if all(getattr(r, k) == v for k, v in wanted.items()))
        return [r for r in fits if r.ms]

    def find(self, **wanted: str) -> Result | None:
        return next(iter(self.all(**wanted)), None)

    def shapes(self, **wanted: str) -> list[str]:
        return list(dict.fromkeys(r.shape for r in self.all(**wanted)))

    def title(self, contender: str) -> str:
        """The name of a contender. Other libraries are named with their version."""
        version = self.document["contenders"].get(contender, "")
        known = contender not in (EAGER, COMPILED, OURS) and not version.startswith("absent")
        return f"{TITLES.get(contender, contender)} {version if known else ''}".strip()

    def cells(self, names: Iterable[str], memory: str = "", **wanted: str) -> dict[str, str]:
        """The cells of several contenders, as a dictionary with their titles as keys."""
        return {self.title(n): cell(self.find(**wanted, contender=n), memory) for n in names}


@cache
def newest(source: str) -> Run:
    """The run whose numbers are in the tables of a family or of MEMORY."""
    if source == MEMORY:
        path = max(RESULTS.glob("heads-memory-[0-9]*.json"))
        return Run(path, results.read(path))
    runs = [Run(path, results.read(path)) for path in RESULTS.glob("*.json")]
    wanted = {case.name for case in cases.choose("cuda", families=[source])}

    def worth(run: Run) -> tuple[int, str]:
        measured = {r.name for r in run.rows if r.family == source}
        return len(wanted & measured), run.document["date"]

    return max(runs, key=worth)


def ms(value: float | None) -> str:
    return number(value, ".2f" if (value or 0.0) < 10 else ".1f")


def cell(r: Result | None, memory: str = "") -> str:
    """The text of a cell: milliseconds, and in brackets the MiB of the field `memory`."""
    if r is None:
        return NOTHING
    mib = getattr(r, memory) if memory else None
    mark = f" {DAGGER}" if OVERWRITES in r.note else ""
    return ms(r.ms) + ("" if mib is None else f" ({max(mib, 0.0):,.0f})") + mark


def where(r: Result) -> str:
    return f"{r.work}, {r.mode}, {sizes(r.shape)} {r.dtype}"


def origin(*runs: Run) -> str:
    """The line below a table, which names the runs of the table.

    In the line, {up} stands for the path from the page to the root of the repository.
    """
    sources = []
    for run in runs:
        report_of = run.path.with_suffix(".md").relative_to(ROOT)
        sources.append(f"[{run.path.stem}]({{up}}{report_of}), commit {run.document['commit']}")
    first = runs[0].document
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "triton"))
    return f"{first['device']['name']}, {versions}. From {'; '.join(sources)}."


def in_liger_memory(run: Run, shape: str) -> tuple[Result, Result | None]:
    """The result of Liger over a head, and our result with nearly the same memory, or None."""
    liger = run.find(**PLAIN_HEAD, contender="liger", shape=shape)
    ours = run.all(family="heads", op="cross_entropy", contender=OURS, shape=shape)

    def ratio(r: Result) -> float:
        """The absolute logarithm of the ratio of our memory to Liger's memory."""
        return abs(math.log((r.spare_mib or 1.0) / (liger.spare_mib or 1.0)))

    near = [r for r in ours if WORKSPACE.fullmatch(r.variant) and ratio(r) < math.log(1.25)]
    return liger, min(near, key=ratio, default=None)


def summary(logits: Run, heads: Run) -> str:
    """The table of all contenders with their defaults, and of logitless in Liger's memory."""
    rows, notes, untried, equal = [], [], [], f"{OURS} in Liger's memory"
    for shape in (LARGE, UNALIGNED):
        at = PLAIN_LOGITS | {"shape": shape, "dtype": "bf16"}
        row = logits.cells(NAMES, "extra_mib", **at, mode=Mode.BACKWARD)
        in_place = logits.find(**at, contender=OURS, mode=Mode.INPLACE)
        rows.append({"": f"logits {sizes(shape)}", **row, equal: cell(in_place, "extra_mib")})
    for shape in heads.shapes(**PLAIN_HEAD, contender="liger"):
        liger, ours = in_liger_memory(heads, shape)
        row = heads.cells(NAMES, "spare_mib", **PLAIN_HEAD, shape=shape)
        rows.append({"": f"head {sizes(shape)}", **row, equal: cell(ours, "spare_mib")})
        if ours is None:
            untried.append(sizes(shape))
        elif liger.ms < ours.ms:
            notes.append(f"In about the same memory, Liger is faster at {sizes(shape)}.")
    if untried:
        notes += [
            f"Not measured in Liger's memory in this run: {', '.join(untried)}.",
            "[docs/heads.md]({up}docs/heads.md) has newer times against memory, ours and Liger's.",
        ]
    after = ["", *notes] if notes else []
    return "\n".join([table(rows), "", origin(logits, heads), *after])


def head_memory(run: Run) -> Rows:
    """Our times with every workspace, and the times of other libraries."""
    rows = []
    for shape in run.shapes():
        at = {"op": "cross_entropy", "shape": shape}
        ours = {mib: run.find(**at, variant=f"{mib} MiB") for mib in heads_memory.WORKSPACES}
        row = {f"{mib:,} MiB": cell(r, "spare_mib") for mib, r in ours.items()}
        wanted = at | {"variant": heads_memory.OWN_MEMORY}
        row |= run.cells(heads_memory.RIVALS, "spare_mib", **wanted)
        rows.append({HEAD: sizes(shape), **row})
    return rows


def cross_entropy(run: Run) -> Rows:
    """Each mode at two shapes; the run's own report has all of them."""
    rows = []
    for mode in (Mode.FORWARD, Mode.BACKWARD, Mode.INPLACE):
        for r in run.all(**PLAIN_LOGITS, mode=mode, contender=OURS):
            if r.shape not in (LARGE, UNALIGNED):
                continue
            work = f"{mode}, {sizes(r.shape)} {r.dtype}"
            times = run.cells(ON_LOGITS, name=r.name, family="logits")
            rows.append({"": work, **times, "floor": ms(r.floor_ms)})
    return rows


def small_calls(run: Run) -> Rows:
    """Wall times of small calls, in which the launch overhead dominates."""
    ours = run.all(**PLAIN_LOGITS, mode=Mode.WALL, contender=OURS)
    return [
        {"rows × vocabulary": sizes(r.shape), **run.cells(ON_LOGITS, name=r.name)} for r in ours
    ]


def teachers(run: Run) -> Rows:
    """The times of the cases in which something else was measured too."""
    rows = []
    for ours in run.all(family="teachers", contender=OURS):
        texts = {r.contender: time_text(r.ms) for r in run.rows if r.name == ours.name}
        if texts.keys() & {*NAMES} - {OURS}:
            times = {run.title(name): texts.get(name, NOTHING) for name in NAMES}
            rows.append({"": where(ours), **times})
    return rows


def targets(*runs: Run) -> str:
    """The number of reached targets, and a table of the missed targets."""
    rows, counts = [], []
    for family, run in zip(FAMILIES, runs, strict=True):
        judged = [r for r in run.rows if r.family == family and r.reached is not None]
        missed = [r for r in judged if not r.reached]
        counts.append(f"{len(judged) - len(missed)} of {len(judged)} ({family})")
        for r in missed:
            time = f"{time_text(r.ms)}, {number(r.spare_mib, '.0f')} MiB"
            allowed = time_text(r.limit_ms)
            rows.append({"missed": where(r), "target": r.target, "limit": allowed, "ours": time})
    missed = table(rows or [{"missed": "none"}])
    return f"Reached: {', '.join(counts)}.\n\n{missed}\n\n{origin(*runs)}"


def training_step() -> str:
    """The table of README."""
    rows = [
        {
            "model": s.name,
            "peak memory beyond the weights": f"{s.gib} GiB",
            "tokens per second": s.tokens,
        }
        for s in pictures.training_step()
    ]
    return table(rows)


TABLES: dict[str, tuple[Callable, tuple[str, ...]]] = {  # name: (function, families of its runs)
    "training-step": (training_step, ()),
    "summary": (summary, ("logits", "heads")),
    "head-memory": (head_memory, (MEMORY,)),
    "cross-entropy": (cross_entropy, ("logits",)),
    "small-calls": (small_calls, ("logits",)),
    "teachers": (teachers, ("teachers",)),
    "targets": (targets, FAMILIES),
}


def rewritten(page: Path) -> str:
    """The text of a page with all tables rewritten."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def block(match: re.Match) -> str:
        begin, name, end = match.groups()
        make, sources = TABLES[name]
        runs = [newest(source) for source in sources]
        rows = make(*runs)
        text = rows if isinstance(rows, str) else f"{table(rows)}\n\n{origin(*runs)}"
        return f"{begin}{text.replace('{up}', up)}\n{end}"

    return BLOCK.sub(block, page.read_text())


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page))
    for run in map(newest, FAMILIES):
        plots.save(run.document, RESULTS)
    pytorch = [r for r in newest("heads").rows if r.contender in (EAGER, COMPILED)]
    pictures.draw()
    heads_memory.draw(newest(MEMORY).document, RESULTS / "heads-memory.png", pytorch)


if __name__ == "__main__":
    main()
