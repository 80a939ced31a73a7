"""What the benchmarks of one subject share: the machine in words, and a table with targets."""

import argparse
import datetime
import platform
from collections.abc import Callable

import torch
import triton

import logitless as ll

MIB = 2**20


class Table:
    """Lines of a Markdown table, printed as they come."""

    def __init__(self):
        self.lines = [
            "| work | contender | time | target | reached | extra memory |",
            "| --- | --- | --- | --- | --- | --- |",
        ]

    def add(self, work, contender, time, limit=None, rule="", extra=None, unit="ms"):
        reached = "" if limit is None else "yes" if time <= limit else "NO"
        target = "" if limit is None else f"{rule}: {limit:.3f} {unit}"
        memory = "" if extra is None else f"{extra / MIB:.0f} MiB"
        line = f"| {work} | {contender} | {time:.3f} {unit} | {target} | {reached} | {memory} |"
        print(line, flush=True)
        self.lines.append(line)

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


def run(title: str, about: str, parts: list[Callable[[Table], None]]) -> None:
    """Fill one table by parts, and write it where --out says."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--out", help="a Markdown file")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    head = [
        f"# {title}",
        "",
        f"- device: {torch.cuda.get_device_name()}, commit {args.commit}, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        f"- python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, logitless {ll.__version__}",
        f"- {about}",
        "",
    ]
    print("\n".join(head))
    table = Table()
    for part in parts:
        part(table)
        torch.cuda.empty_cache()
        if args.out:  # after every part: what is measured is not lost
            with open(args.out, "w") as file:
                file.write("\n".join([*head, *table.lines]) + "\n")
