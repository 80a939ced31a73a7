"""`logitless teacher info`: describes a store in a table, and in a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from logitless.cli import require
from logitless.store import Store

from .teacher_summary import Summary, summary


def print_info(path: Path | str, plot: Path | None) -> None:
    """Prints a table that describes a store.

    If `plot` is a path, the function saves a plot of statistics there.
    """
    store = Store(path)
    statistics = summary(store)
    size = sum(shard.size for shard in store.shards)
    table = Table("", "", title=str(path), show_header=False)
    rows = {"documents": f"{len(store):,}", "tokens": f"{store.tokens:,}"}
    rows |= {
        "bytes per token": f"{size / max(store.tokens, 1):.1f}",
        "files": f"{len(store.shards)}",
    }
    rows |= {name: str(value) for name, value in asdict(store.info).items()}
    k = store.info.k
    if store.info.sampled:
        rows["distinct ids per token"] = f"{statistics.slots:.2f}"
    rows[f"mass of the {k} slots"] = f"{float(statistics.covered[-1]):.4f}"
    entropy = f"{float(statistics.entropy.mean()):.3f} nats" if statistics.rows else "-"
    rows["entropy, the tail as one token"] = entropy
    rows["next token is the first slot"] = f"{statistics.within(1):.1%}"
    rows["next token is among the slots"] = f"{statistics.within(k):.1%}"
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    if plot is not None:
        require("teacher", "matplotlib")
        _plot(statistics, k, plot)
        print(f"plot: {plot}")


def _plot(statistics: Summary, k: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    covered, entropy, rank = figure.subplots(1, 3)
    covered.plot(range(1, k + 1), statistics.covered.tolist())
    covered.set(title="Which K?", ylabel="teacher's mass on the K most probable ids")
    entropy.hist(statistics.entropy.tolist(), bins=50)
    entropy.set(title="How certain is the teacher?", ylabel="rows")
    entropy.set(xlabel="entropy per row in nats, with the tail as one token")
    shares = [statistics.within(n) for n in range(1, k + 1)]
    rank.plot(range(1, k + 1), shares)
    rank.set(title="How often is the teacher right?", ylabel="share of next tokens among the K")
    for axes in (covered, rank):
        axes.set(xscale="log", xlabel="K", ylim=(0, 1.02))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    entropy.yaxis.set_major_formatter("{x:,.0f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
