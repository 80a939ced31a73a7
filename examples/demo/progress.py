"""A progress bar with tokens per second and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(title: str, total: float) -> Iterator[Callable]:
    """Yields a function advance(done, note="", tokens=0), which moves the bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[speed]}"), TextColumn("{task.description}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, speed="")
        begin, seen = time.perf_counter(), 0

        def advance(done: float, note: str = "", tokens: int = 0) -> None:
            nonlocal seen
            seen += tokens
            speed = f"{seen / max(time.perf_counter() - begin, 1e-9):,.0f} tokens/s" if seen else ""
            progress.update(task, advance=done, description=note, speed=speed)

        yield advance
