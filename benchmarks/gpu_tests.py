"""Runs the test files on a GPU, several files at once, and writes one line per file.

    python -m benchmarks.gpu_tests --out benchmarks/results/h200 --minutes 6

Each file runs in its own process. The slowest files of the last run start first. A file that does
not end in time is reported as "not finished". The exit status is 1 if a test fails. Tests of cli/,
of the docs, and most tests of store/ do not run, because a GPU changes little in their code.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from logitless.cli import machine

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("gpu", "kernels", "core", "heads", "losses", "parallel", "lazy", "targets", "eager")
FILES = ("tests/test_contract.py", "tests/test_nn.py", "tests/store/test_capture.py")


def test_files() -> list[Path]:
    found = [path for room in ROOMS for path in sorted((ROOT / "tests" / room).glob("test_*.py"))]
    # test_aot.py compiles for several GPUs and runs nothing, so a GPU would only wait.
    found = [path for path in found if path.name != "test_aot.py"]
    return [*found, *(ROOT / name for name in FILES)]


def seconds_of(text: str) -> dict[str, float]:
    """Returns the seconds that each file took in an earlier run, whose output is `text`."""
    lines = re.findall(r"^(\S+): .* in ([\d.]+)s", text, re.M)
    return {name: float(seconds) for name, seconds in lines}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "tests").with_suffix("").as_posix()


def run_all(files: Iterable[Path], workers: int, end: float, folder: Path) -> dict[str, str]:
    """Runs the files and returns the last line that pytest prints for each file."""
    waiting, running, lines = list(files), {}, {}
    while waiting or running:
        while waiting and len(running) < workers:
            path = waiting.pop(0)
            log = open(folder / f"{name_of(path).replace('/', '-')}.log", "w+")  # noqa: SIM115
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            running[path] = (process, log)
        time.sleep(0.2)
        late = time.monotonic() > end
        for path, (process, log) in list(running.items()):
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            log.seek(0)
            printed = log.read()
            log.close()
            del running[path]
            last = printed.strip().splitlines()[-1:] or [""]
            lines[name_of(path)] = last[0] if process.returncode is not None else "not finished"
            if re.search(r"\d (failed|error)", last[0]) or process.returncode not in (0, None, 5):
                print(f"--- {name_of(path)}\n{printed[-3000:]}", flush=True)
        if late:
            lines |= {name_of(path): "not started" for path in waiting}
            break
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of tests-gpu.txt")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this time")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--only", help="run only files whose name contains this text")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This script needs a GPU.")
    results = given.out / "tests-gpu.txt"
    known = seconds_of(results.read_text()) if results.exists() else {}
    files = [path for path in test_files() if (given.only or "") in name_of(path)]
    files.sort(key=lambda path: -known.get(name_of(path), 1e9 if "gpu/" in name_of(path) else 20))
    logs = given.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    lines = run_all(files, given.workers, begin + 60 * given.minutes, logs)
    counts = {
        kind: sum(int(n) for line in lines.values() for n in re.findall(rf"(\d+) {kind}", line))
        for kind in ("passed", "failed", "skipped", "error")
    }
    about = f"{machine.device('cuda')['name']}, " + ", ".join(
        f"{name} {version}" for name, version in machine.versions().items()
    )
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    unfinished = [name for name, line in lines.items() if line.startswith("not ")]
    text = "\n".join(
        (
            f"GPU tests at {machine.commit()}: {about}.",
            f"{total}, in {time.monotonic() - begin:.0f} s with {given.workers} processes; "
            f"not finished: {', '.join(unfinished) or 'none'}.",
            "",
            *(f"{name}: {line.strip('= ')}" for name, line in sorted(lines.items())),
        )
    )
    print(text)
    results.write_text(text + "\n")
    return int(counts["failed"] + counts["error"] > 0 or bool(unfinished))


if __name__ == "__main__":
    sys.exit(main())
