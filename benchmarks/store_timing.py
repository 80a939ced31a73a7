"""Functions that time calls and write result files, for benchmarks/store_*.py.

All times are CPU times of this thread, because other processes on the machine do not change CPU
time much. The files of the stores are in the page cache, so that no call waits for a disk.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.bench.clocks import repetitions
from logitless.cli import machine as _machine
from logitless.cli.report import table

Call = Callable[[], object]


def medians(calls: Sequence[Call], budget: float) -> list[float]:
    """Median CPU times of several calls, in milliseconds. The calls alternate."""

    def once(call: Call) -> float:
        start = time.thread_time()
        call()
        return 1e3 * (time.thread_time() - start)

    slowest = max(once(call) for call in calls)
    times = [[once(call) for call in calls] for _ in range(repetitions(budget, slowest, most=200))]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def arguments(description: str | None) -> argparse.Namespace:
    """Parses the arguments of a benchmark, and limits PyTorch to one thread."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result file")
    parser.add_argument("--budget", type=float, default=3000.0, help="milliseconds per table row")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return parser.parse_args()


def write(
    file: Path, title: str, text: str, *tables: list[dict[str, str]], times: bool = True
) -> None:
    """Writes and prints a result file, which names the machine and the commit."""
    about = f"{_machine.device('cpu')['name']}, torch {torch.__version__}"
    about = f"{about}, commit {_machine.commit()}{'; CPU times of one thread' * times}."
    parts = [f"# {title}", about, text, *map(table, tables)]
    content = "\n\n".join(part for part in parts if part) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    print(content)
