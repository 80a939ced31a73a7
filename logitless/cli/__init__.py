"""The `logitless` command. A subcommand is a module with `add_parser` and `run`, listed here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import logitless

COMMANDS = ("demo", "bench", "doctor", "scale", "teacher")


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
        return 130  # what a shell expects of a process that Ctrl-C ended


def chosen_device(given: str | None) -> str:
    """The device a command runs on: a GPU where there is one, unless another is named."""
    import torch

    has_gpu = torch.cuda.is_available()
    if given == "cuda" and not has_gpu:
        raise SystemExit("--device cuda must have a GPU that PyTorch can use, got none here.")
    return given or ("cuda" if has_gpu else "cpu")


def require(extra: str, *modules: str) -> None:
    """Exits, saying what to install, unless every module of an extra is there."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        needs = " and ".join(missing)
        raise SystemExit(f"logitless {extra} needs {needs}: in a clone, pip install '.[{extra}]'")
