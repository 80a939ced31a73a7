"""Our own times in two checkouts: python benchmarks/compare.py OLD NEW --out FOLDER

Three processes, with the library of OLD, of NEW, and of OLD again, run each case in turn before the
next one, by the harness of *this* checkout, without rivals and without checking answers. The two
old times say how noisy a case is: "slower" and "faster" are 2 % beyond that, and beyond the median
noise of the run; what looks slower is measured once more. Exit status 1 if a case is slower or
fails. Writes FOLDER/compare.md and nothing else.
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

PACKAGE = Path(__file__).resolve().parents[1] / "logitless"
MARGIN = 0.02
COLUMNS = ("case", "old ms", "new ms", "old again", "new / old", "noise", "MiB old", "MiB new", "")


def worker(checkout: Path) -> ProcessPoolExecutor:
    """A process of its own, that will import the library of one checkout."""
    fresh = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, fresh, initializer=find, initargs=(str(checkout.resolve()),))


def find(checkout: str) -> None:
    """In a worker: `logitless` is the checkout's, `cli` is this one's."""
    sys.path[:] = [checkout, *sys.path, str(PACKAGE)]
    import logitless

    assert Path(logitless.__file__).is_relative_to(checkout), logitless.__file__


def names(device: str, how: dict) -> list[str]:
    """In a worker: its cases."""
    from cli.bench import cases

    return [case.name for case in cases.choose(device, **how)]


def measure(device: str, how: dict, name: str, ms: float) -> dict:
    """In a worker: the result of a case, after this many milliseconds of measuring."""
    from cli.bench import cases, contenders, runner

    case = next(case for case in cases.choose(device, **how) if case.name == name)
    ours = {contenders.OURS: contenders.ours}
    (result,) = runner.run_case(case, ours, device, ms, checked=False)
    torch.cuda.empty_cache()  # for the other workers
    return asdict(result)


def noise(old: dict, new: dict, again: dict) -> float | None:
    """None where one of them has no time."""
    timed = all(result["ms"] for result in (old, new, again))
    return abs(again["ms"] / old["ms"] - 1) if timed else None


def row(case: str, results: list[dict], typical: float) -> list[str]:
    """The cells of a case; the last one is the verdict."""

    def cell(value: float | None, spec: str) -> str:
        return "–" if value is None else f"{value:{spec}}"

    old, new, again = results
    times, apart = None, noise(*results)
    verdict = "; ".join(sorted({r["note"] for r in results if r["note"]}))
    if apart is not None:
        times, margin = 2 * new["ms"] / (old["ms"] + again["ms"]), MARGIN + max(apart, typical)
        verdict = "slower" if times > 1 + margin else "faster" if times < 1 - margin else ""
    elif new["status"] != "ok":
        verdict = f"FAILS: {verdict}"
    memory = [cell(result["extra_mib"], ".1f") for result in (old, new)]
    measured = [cell(result["ms"], ".4f") for result in results]
    return [case, *measured, cell(times, ".3f"), cell(apart, ".1%"), *memory, verdict]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("old", type=Path, help="a checkout")
    add("new", type=Path, help="a checkout")
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--minutes", type=float, default=5.0, help="to spend in all (default 5)")
    add("--family", action="append", choices=("logits", "teachers", "heads"), help="(repeatable)")
    add("--op", action="append", help="(repeatable)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="small shapes")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    how = {"quick": args.quick, "families": args.family, "ops": args.op}
    workers = [worker(path) for path in (args.old, args.new, args.old)]
    cases = workers[0].submit(names, args.device, how).result()

    def run(case: str, ms: float) -> list[dict]:
        return [each.submit(measure, args.device, how, case, ms).result() for each in workers]

    results = {}
    for i, case in enumerate(cases):
        share = max(0.0, end - time.monotonic()) / (len(cases) - i) / len(workers)
        results[case] = run(case, min(1000.0, max(20.0, 310 * share)))  # the rest: inputs, memory
        print(f"{i + 1}/{len(cases)}", *row(case, results[case], 0.0), sep=" | ", flush=True)
    found = [apart for three in results.values() if (apart := noise(*three)) is not None]
    typical = statistics.median(found or [0.0])
    for case in cases:
        if row(case, results[case], typical)[-1] == "slower":
            pairs = zip(results[case], run(case, 500.0), strict=True)
            results[case] = [min(pair, key=lambda r: r["ms"] or 1e9) for pair in pairs]
    rows = [row(case, three, typical) for case, three in results.items()]
    bad = sum(cells[-1].startswith(("slower", "FAILS")) for cells in rows)
    faster = sum(cells[-1] == "faster" for cells in rows)
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    summary = f"{bad} slower or failing, {faster} faster, of {len(cases)}; noise {typical:.1%}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    about = [f"# {args.old} and {args.new}", "", f"{where}, torch {torch.__version__}", ""]
    text = "\n".join([*about, *table, "", summary, ""])
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "compare.md").write_text(text)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
