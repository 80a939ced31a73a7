"""Processes of their own, forked from one that has imported PyTorch: none imports it again."""

import contextlib
import io
import multiprocessing
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch"])


def start(work: Callable, *args, **environment: str):
    """A process that does work(*args), with these variables of the environment."""
    process = FORKED.Process(target=_in_process, args=(environment, work, *args), daemon=True)
    process.start()
    return process


def together(ranks: int, work: Callable, *args) -> list[Any]:
    """What work(rank, *args) returns of each rank, with what torchrun tells them of each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    all_know = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    all_know |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    calls = [
        (all_know | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), work, rank, *args)
        for rank in range(ranks)
    ]
    with FORKED.Pool(ranks) as pool:
        return pool.starmap_async(_in_process, calls, chunksize=1).get(timeout=300)


def printed_by(script: Path, *arguments: str, ranks: int = 1) -> str:
    """What a script prints, on all ranks. Of a single one, a UserWarning is an error."""
    return "".join(together(ranks, _script, ranks, str(script), arguments))


def _script(rank: int, ranks: int, path: str, arguments: tuple[str, ...]) -> str:
    if ranks == 1:
        warnings.simplefilter("error", UserWarning)
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def imported_by(code: str) -> list[str]:
    """The modules that this code brings to a process that has imported PyTorch."""
    with FORKED.Pool(1) as pool:
        return pool.apply(_imported_by, (code,))


def _imported_by(code: str) -> list[str]:
    before = set(sys.modules)
    exec(code, {})
    return sorted(set(sys.modules) - before)


def _in_process(environment: dict[str, str], work: Callable, *args) -> Any:
    os.environ.pop("TRITON_INTERPRET", None)  # as in a process of a user's
    os.environ |= environment
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's, of gloo and of few processors
    return work(*args)
