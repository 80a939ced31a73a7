"""Draws a progress bar with speed and remaining time, for all commands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .report import bytes_text


@contextmanager
def bar(title: str, total: float | None = None) -> Iterator[Callable]:
    """Yields a function advance(done, note="", tokens=0, written=0), which moves the bar.

    Each call adds `done`, and the bar is full at `total`. It shows the remaining time, and the
    speed in tokens and written bytes per second if these are given. It is drawn on stderr, under
    torchrun only by rank 0.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[speed]}"), TextColumn("{task.description}"), TimeRemainingColumn(),
    )  # fmt: skip
    shown = os.environ.get("RANK", "0") == "0"
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("", total=total, speed="")
        begin, seen, stored = time.perf_counter(), 0, 0.0

        def advance(done: float, note: str = "", tokens: int = 0, written: float = 0) -> None:
            nonlocal seen, stored
            seen, stored = seen + tokens, max(stored, written)
            seconds = max(time.perf_counter() - begin, 1e-9)
            speed = f"{seen / seconds:,.0f} tokens/s" if seen else ""
            speed += f", {bytes_text(stored / seconds)}/s" if stored else ""
            progress.update(task, advance=done, description=note, speed=speed)

        yield advance
