"""Compares our own times in two checkouts: python benchmarks/compare.py OLD NEW --out FOLDER

Three processes load the library of OLD, of NEW, and of OLD again. Each case runs in all three
processes before the next case begins. Wall times are the fastest of five such turns, because other
work on the host can slow a single turn by half. The code of the benchmark is from the checkout of
this script. Other libraries are not measured, and results are not checked. The difference of the
two times of OLD is the noise of a case. A case is "slower" or "faster" if the times of OLD and NEW
differ by more than 2 % plus the noise. For this comparison, the noise of a case is at least the
median noise of all cases. A case that is slower is measured once more. The script writes
FOLDER/compare.md. The exit status is 1 if a case is slower or fails.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
MARGIN = 0.02
TURNS = 5  # how often each process measures a wall time
COLUMNS = ("case", "old ms", "new ms", "old again", "new / old", "noise", "MiB old", "MiB new", "")


def worker(checkout: Path) -> ProcessPoolExecutor:
    """A new process that imports the library of one checkout."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        1, context, initializer=set_path, initargs=(str(checkout.resolve()),)
    )


def set_path(checkout: str) -> None:
    """Runs in a worker. Imports `logitless` from `checkout`, and the bench from this checkout."""
    sys.path.insert(0, checkout)
    import logitless

    assert Path(logitless.__file__).is_relative_to(checkout), logitless.__file__
    sys.path[0] = str(ROOT)


def functions() -> set[str]:
    """Runs in a worker. Returns the names of the public functions."""
    import logitless

    return set(logitless.__all__)


def names(device: str, filters: dict, without: set[str]) -> list[str]:
    """Runs in a worker. Returns the names of the cases, except those of the functions `without`."""
    from benchmarks.bench import cases

    return [case.name for case in cases.choose(device, **filters) if case.op not in without]


def measure(device: str, filters: dict, name: str, ms: float) -> dict:
    """Runs in a worker. Returns the result of one case, timed for `ms` milliseconds."""
    from benchmarks.bench import cases, contenders, runner

    case = next(case for case in cases.choose(device, **filters) if case.name == name)
    ours = {contenders.OURS: contenders.ours}
    (result,) = runner.run_case(case, ours, device, ms, checked=False)
    torch.cuda.empty_cache()  # frees the memory for the other workers
    return asdict(result)


def fastest(turns: list[list[dict]]) -> list[dict]:
    """The fastest result of each process."""
    return [min(results, key=lambda r: r["ms"] or 1e9) for results in zip(*turns, strict=True)]


def noise(old: dict, new: dict, again: dict) -> float | None:
    """The relative difference of the two times of OLD, or None if a time is missing."""
    timed = all(result["ms"] for result in (old, new, again))
    return abs(again["ms"] / old["ms"] - 1) if timed else None


def row(case: str, results: list[dict], typical: float) -> list[str]:
    """The cells of a case in the table. The last cell is the verdict."""

    def cell(value: float | None, spec: str) -> str:
        return "–" if value is None else f"{value:{spec}}"

    old, new, again = results
    ratio, spread = None, noise(*results)
    verdict = "; ".join(sorted({r["note"] for r in results if r["note"]}))
    if spread is not None:
        ratio, margin = 2 * new["ms"] / (old["ms"] + again["ms"]), MARGIN + max(spread, typical)
        verdict = "slower" if ratio > 1 + margin else "faster" if ratio < 1 - margin else ""
    elif new["status"] != "ok":
        verdict = f"FAILS: {verdict}"
    memory = [cell(result["extra_mib"], ".1f") for result in (old, new)]
    measured = [cell(result["ms"], ".4f") for result in results]
    return [case, *measured, cell(ratio, ".3f"), cell(spread, ".1%"), *memory, verdict]


def typical_noise(results: dict[str, list[dict]]) -> float:
    spreads = [x for three in results.values() if (x := noise(*three)) is not None]
    return statistics.median(spreads or [0.0])


def table(about: str, results: dict[str, list[dict]], cases: int) -> tuple[str, int]:
    """Returns the page with one row per measured case, and the number of slower or failing cases.

    `cases` is the number of all cases. If fewer cases are measured, the page says so.
    """
    typical = typical_noise(results)
    rows = [row(case, three, typical) for case, three in results.items()]
    bad = sum(cells[-1].startswith(("slower", "FAILS")) for cells in rows)
    faster = sum(cells[-1] == "faster" for cells in rows)
    lines = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    measured = len(rows) if len(rows) == cases else f"{len(rows)} measured cases of {cases}"
    summary = f"{bad} slower or failing, {faster} faster, of {measured}; noise {typical:.1%}"
    return "\n".join([about, "", *lines, "", summary, ""]), bad


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("old", type=Path, help="checkout to compare with")
    add("new", type=Path, help="checkout to measure")
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--minutes", type=float, default=5.0, help="time for the whole run (default 5)")
    add("--family", action="append", choices=("logits", "teachers", "heads"))
    add("--op", action="append", help="only this op (repeatable)")
    add("--named", default="", help="only cases with this text in their name")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="small shapes")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    filters = {"quick": args.quick, "families": args.family, "ops": args.op}
    workers = [worker(path) for path in (args.old, args.new, args.old)]
    old, new, _ = (w.submit(functions).result() for w in workers)
    cases = [
        name
        for name in workers[0].submit(names, args.device, filters, new - old).result()
        if args.named in name
    ]

    def turn(case: str, ms: float) -> list[dict]:
        return [w.submit(measure, args.device, filters, case, ms).result() for w in workers]

    def run(case: str, ms: float) -> list[dict]:
        return fastest([turn(case, ms) for _ in range(TURNS if "wall time" in case else 1)])

    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    about = f"# {args.old} and {args.new}\n\n{where}, torch {torch.__version__}"
    args.out.mkdir(parents=True, exist_ok=True)

    def report() -> tuple[str, int]:
        text, bad = table(about, results, len(cases))
        (args.out / "compare.md").write_text(text)
        return text, bad

    results = {}
    for i, case in enumerate(cases):
        share = max(0.0, end - time.monotonic()) / (len(cases) - i) / len(workers)
        # 310 ms of each second are for timing. Creating inputs and measuring memory take the rest.
        results[case] = run(case, min(1000.0, max(20.0, 310 * share)))
        print(f"{i + 1}/{len(cases)}", *row(case, results[case], 0.0), sep=" | ", flush=True)
        report()  # so that a run that is stopped leaves the cases until then
    typical = typical_noise(results)
    for case in cases:
        if row(case, results[case], typical)[-1] == "slower":
            results[case] = fastest([results[case], run(case, 500.0)])
    text, bad = report()
    print(text)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
