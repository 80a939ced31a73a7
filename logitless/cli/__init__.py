"""The `logitless` command.

COMMANDS lists the subcommands. Each is a module of this folder with the functions `add_parser` and
`run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import logitless

COMMANDS = ("doctor", "explain", "teacher")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    commands = {name: import_module(f"logitless.cli.{name}") for name in COMMANDS}
    parser = argparse.ArgumentParser(prog="logitless", description=logitless.__doc__)
    parser.add_argument("--version", action="version", version=logitless.__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in commands.values():
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return commands[args.command].run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # the exit status that shells use for Ctrl-C


def chosen_device(name: str | None) -> str:
    """Returns `name`. By default, returns "cuda" if PyTorch can use a GPU, else "cpu"."""
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise SystemExit("--device must be cpu, because PyTorch can use no GPU here, got cuda.")
    return name or ("cuda" if has_gpu else "cpu")


def require(extra: str, *modules: str) -> None:
    """Exits if a module is missing. The message names the pip extra that installs the module."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        needs = " and ".join(missing)
        raise SystemExit(f"logitless {extra} needs {needs}: in a clone, pip install '.[{extra}]'")
