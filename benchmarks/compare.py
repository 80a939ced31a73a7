"""Our own times in two checkouts: python benchmarks/compare.py OLD NEW --out FOLDER

Three processes, with the library of OLD, of NEW, and of OLD again, run each case in turn before the
next one, by the harness of *this* checkout, without rivals and without checking answers. The two
old times say how noisy a case is: "slower" and "faster" are 2 % beyond that, and beyond the median
noise of the run; what looks slower is measured once more. Exit status 1 if a case is slower or
fails. Writes FOLDER/compare.md and nothing else.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

HARNESS = Path(__file__).resolve().parents[1] / "logitless/cli/bench"
MARGIN = 0.02
COLUMNS = ("case", "old ms", "new ms", "old again", "new / old", "noise", "MiB old", "MiB new", "")


class Worker:
    """A process with the library of one checkout, that runs cases by name."""

    def __init__(self, checkout: Path, args: argparse.Namespace):
        how = json.dumps({"quick": args.quick, "families": args.family})
        command = [sys.executable, __file__, "worker", str(checkout), args.device, how]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process, self.cases = subprocess.Popen(command, **pipes), []

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else sys.exit("a worker died: its last words are above")

    def run(self, case: str, ms: float) -> dict:
        """{} where this library lacks what the case needs."""
        if case not in self.cases:
            return {}
        print(json.dumps([case, ms]), file=self.process.stdin, flush=True)
        return self.answer()


def work(checkout: str, device: str, how: str) -> None:
    """What a worker does: a case and its milliseconds in, a result out, a line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.path.insert(0, checkout)
    package = {"submodule_search_locations": [str(HARNESS)]}
    spec = importlib.util.spec_from_file_location("bench", HARNESS / "__init__.py", **package)
    sys.modules["bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bench"])
    import torch
    from bench import contenders, runner, timing

    library = Path(contenders.ll.__file__)
    assert library.is_relative_to(Path(checkout).resolve()), library
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen, _ = contenders.choose(device, **json.loads(how))
    cases = {case.name: case for case in chosen if not case.study}
    loaded, _ = contenders.load([contenders.OURS], device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    first = [f"{where}, torch {torch.__version__}", list(cases)]
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin:
        case, ms = json.loads(line)
        budget = timing.Budget(ms / 4, ms)
        (result,) = runner.run_case(cases[case], loaded, device, budget, check=False)
        timing.release()  # the GPU's memory, for the other workers
        print(json.dumps(asdict(result)), file=answers, flush=True)


def noise(old: dict, new: dict, again: dict) -> float | None:
    """None where one of them has no time."""
    timed = all(result.get("ms") for result in (old, new, again))
    return abs(again["ms"] / old["ms"] - 1) if timed else None


def row(case: str, results: list[dict], typical: float) -> list[str]:
    """The cells of a case; the last one is the verdict."""

    def cell(result: dict, key: str, digits: int) -> str:
        return "–" if result.get(key) is None else f"{result[key]:.{digits}f}"

    old, new, again = results
    ratio, apart = "–", noise(*results)
    verdict = "; ".join(sorted({r["note"] for r in results if r.get("note")}))
    if apart is not None:
        times = new["ms"] / ((old["ms"] + again["ms"]) / 2)
        ratio, margin = f"{times:.3f}", MARGIN + max(apart, typical)
        verdict = "slower" if times > 1 + margin else "faster" if times < 1 - margin else ""
    elif new.get("status", "ok") != "ok":
        verdict = f"FAILS: {verdict}"
    memory = [cell(result, "extra_mib", 1) for result in (old, new)]
    about = [ratio, "–" if apart is None else f"{apart:.1%}", *memory, verdict]
    return [case, *(cell(result, "ms", 4) for result in results), *about]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("old", type=Path, help="a checkout")
    add("new", type=Path, help="a checkout")
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--minutes", type=float, default=5.0, help="to spend in all (default 5)")
    add("--family", action="append", choices=("logits", "teachers", "heads"), help="(repeatable)")
    add("--device", default="", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    add("--quick", action="store_true", help="small shapes")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    workers = [Worker(path.resolve(), args) for path in (args.old, args.new, args.old)]
    for worker in workers:
        where, worker.cases = worker.answer()
    cases = list(dict.fromkeys(case for worker in workers for case in worker.cases))
    results = {}
    for i, case in enumerate(cases):
        share = max(0.0, end - time.monotonic()) / (len(cases) - i) / len(workers)
        ms = min(1000.0, max(20.0, 350 * share))  # the rest: inputs, warming up, memory
        results[case] = [worker.run(case, ms) for worker in workers]
        print(f"{i + 1}/{len(cases)}", *row(case, results[case], 0.0), sep=" | ", flush=True)
    found = [apart for three in results.values() if (apart := noise(*three)) is not None]
    typical = statistics.median(found) if found else 0.0
    for case in cases:
        if row(case, results[case], typical)[-1] == "slower":
            pairs = zip(results[case], [worker.run(case, 500.0) for worker in workers], strict=True)
            results[case] = [min(pair, key=lambda r: r.get("ms") or 1e9) for pair in pairs]
    rows = [row(case, three, typical) for case, three in results.items()]
    bad = sum(cells[-1].startswith(("slower", "FAILS")) for cells in rows)
    faster = sum(cells[-1] == "faster" for cells in rows)
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    summary = f"{bad} slower or failing, {faster} faster, of {len(cases)}; noise {typical:.1%}"
    text = "\n".join([f"# {args.old} and {args.new}", "", where, "", *table, "", summary, ""])
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "compare.md").write_text(text)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(work(*sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main())
