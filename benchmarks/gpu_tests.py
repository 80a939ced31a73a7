"""For developers: runs the GPU's share of the tests, several files at once; one line per file.

    python -m benchmarks.gpu_tests --out build/gpu-tests

The GPU's share are the cases of `make test` (`pytest --few`) of every room whose code runs on a
GPU, and tests/gpu at real sizes: minutes on an H200 with 16 cores. `--all` runs the whole
matrix. Each file runs in its own process, or in several if it is in PARTS; the slowest of
the last run start first. A file that does not end in time is reported as "not finished". The exit
status is 1 if a test fails.
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
from typing import NamedTuple

import torch

from logitless.cli import machine

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "gpu", "kernels", "core", "heads", "losses", "contrastive", "parallel", "lazy",
    "targets", "eager",
)  # fmt: skip
FILES = ("tests/test_contract.py", "tests/test_nn.py", "tests/store/test_capture.py")
# The files with the most kernels to compile.
PARTS = {
    "gpu/test_head_sizes": 3, "losses/test_sparse_teacher": 3, "losses/test_every_function": 3,
    "core/test_evaluate": 2,
}  # fmt: skip


class Job(NamedTuple):
    """A test file, or a part of it."""

    path: Path
    part: int
    parts: int

    @property
    def file(self) -> str:
        return self.path.relative_to(ROOT / "tests").with_suffix("").as_posix()

    @property
    def name(self) -> str:
        return self.file if self.parts == 1 else f"{self.file}, part {self.part + 1}"

    @property
    def command(self) -> list[str]:
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)]
        return pytest if self.parts == 1 else [*pytest, "--part", f"{self.part}/{self.parts}"]


def all_jobs() -> list[Job]:
    found = [path for room in ROOMS for path in sorted((ROOT / "tests" / room).glob("test_*.py"))]
    # test_aot.py compiles for several GPUs and runs nothing, so a GPU would only wait.
    found = [path for path in found if path.name != "test_aot.py"]
    whole = [Job(path, 0, 1) for path in (*found, *(ROOT / name for name in FILES))]
    counts = [PARTS.get(job.file, 1) for job in whole]
    return [
        Job(job.path, part, count)
        for job, count in zip(whole, counts, strict=True)
        for part in range(count)
    ]


def seconds_of(text: str) -> dict[str, float]:
    """Returns the seconds that each file took in an earlier run, whose output is `text`."""
    lines = re.findall(r"^([^:]+): .* in ([\d.]+)s", text, re.M)
    return {name: float(seconds) for name, seconds in lines}


def run_all(
    jobs: Iterable[Job], options: list[str], workers: int, end: float, folder: Path
) -> dict[str, str]:
    """Runs the jobs and returns the last line that pytest prints for each job."""
    waiting, running, lines = list(jobs), {}, {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # each process would use all cores
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            log = open(folder / f"{re.sub('[/, ]+', '-', job.name)}.log", "w+")  # noqa: SIM115
            command = [*job.command, *options]
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
            )
            running[job] = (process, log)
        time.sleep(0.2)
        late = time.monotonic() > end
        for job, (process, log) in list(running.items()):
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            log.seek(0)
            printed = log.read()
            log.close()
            del running[job]
            last = printed.strip().splitlines()[-1:] or [""]
            lines[job.name] = last[0] if process.returncode is not None else "not finished"
            if re.search(r"\d (failed|error)", last[0]) or process.returncode not in (0, None, 5):
                print(f"--- {job.name}\n{printed[-3000:]}", flush=True)
        if late:
            lines |= {job.name: "not started" for job in waiting}
            break
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of tests-gpu.txt")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this time")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--all", action="store_true", help="all cases of every test")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run only files whose name contains one of these"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This script needs a GPU.")
    results = given.out / "tests-gpu.txt"
    known = seconds_of(results.read_text()) if results.exists() else {}
    jobs = [job for job in all_jobs() if any(text in job.name for text in given.only)]
    jobs.sort(key=lambda job: -known.get(job.name, 1e9 if "gpu/" in job.name else 20))
    logs = given.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    options = [] if given.all else ["--few"]
    lines = run_all(jobs, options, given.workers, begin + 60 * given.minutes, logs)
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
