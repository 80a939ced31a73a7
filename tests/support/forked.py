"""Processes that start fast, because they are forked from a server that has imported PyTorch.

Without a GPU, the server also imports the modules that most processes import later. An optimizer
imports torch._dynamo, and an import of transformers.trainer takes as long as the rest of a short
example. With a GPU, the server imports only PyTorch, because a forked process cannot use CUDA if
its parent process has used CUDA.
"""

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from tests.support.paths import ROOT
from tests.support.patience import HANG

FORKED = multiprocessing.get_context("forkserver")
LATER = [
    "torch._dynamo", "transformers.trainer", "transformers.models.llama.modeling_llama",
    "logitless.hf", "logitless.store",
]  # fmt: skip


def start(work: Callable, *args, **environment: str):
    """Starts a process that runs work(*args), with these environment variables."""
    _start_server()
    given = _of_a_user(environment)
    process = FORKED.Process(target=_in_process, args=(given, work, *args), daemon=True)
    process.start()
    return process


def together(ranks: int, work: Callable, *args) -> list[Any]:
    """The results of work(rank, *args) on all ranks. The first error of a rank is raised.

    Several ranks get the environment variables of torchrun. If there are fewer GPUs than ranks, the
    ranks see no GPU.
    """
    _start_server()
    calls = [(rank, _of_a_user(own), work, args) for rank, own in enumerate(_environments(ranks))]
    with FORKED.Pool(ranks) as pool:
        ended = pool.imap_unordered(_as_rank, calls)
        found = dict(ended.next(timeout=HANG) for _ in calls)
    return [found[rank] for rank in range(ranks)]


def _start_server() -> None:
    """Starts the server without TRITON_INTERPRET, because the import of Triton reads this variable.

    The import of this module does not look for GPUs. A forked process imports this module before
    `_in_process` sets the environment variables. If the import looked for GPUs,
    CUDA_VISIBLE_DEVICES would have no effect afterwards.
    """
    FORKED.set_forkserver_preload(["torch"] if torch.cuda.is_available() else ["torch", *LATER])
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        forkserver.ensure_running()
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def _environments(ranks: int) -> list[dict[str, str]]:
    """The additional environment variables of each rank."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    all_know = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    all_know |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    if ranks > torch.cuda.device_count():
        all_know["CUDA_VISIBLE_DEVICES"] = ""
    return [all_know | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(ranks)]


def printed_by(script: Path, *arguments: str, ranks: int = 1) -> str:
    """The text that a script prints on all ranks. With one rank, a UserWarning is an error."""
    return "".join(together(ranks, _script, ranks, str(script), arguments))


def _script(rank: int, ranks: int, path: str, arguments: tuple[str, ...]) -> str:
    if ranks == 1:
        warnings.simplefilter("error", UserWarning)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))  # as `python path` does
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:  # would end the worker process, and the pool would wait forever
            if end.code:
                words = f"{path} ended with {end.code}, after {printed.getvalue()[-2000:]}"
                raise RuntimeError(words) from end
    return printed.getvalue()


def imported_by(*imports: str) -> list[set[str]]:
    """The modules that these imports add, one after another, in a process that has PyTorch only."""
    lines = ["import json, sys, torch", "found = [{*sys.modules}]"]
    for code in imports:
        lines += [code, "found.append({*sys.modules})"]
    lines.append("print(json.dumps([sorted(b - a) for a, b in zip(found, found[1:])]))")
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=_of_a_user({}), cwd=ROOT,
        stdout=subprocess.PIPE, check=True, timeout=HANG,
    )  # fmt: skip
    return [{*names} for names in json.loads(ended.stdout.splitlines()[-1])]


def _of_a_user(own: dict[str, str]) -> dict[str, str]:
    """The present environment variables, without TRITON_INTERPRET, plus `own`.

    The environment of the fork server is older than the environment of this process.
    """
    given = os.environ | own
    given.pop("TRITON_INTERPRET", None)
    return given


def _as_rank(call: tuple) -> tuple[int, Any]:
    rank, environment, work, args = call
    return rank, _in_process(environment, work, rank, *args)


def _in_process(environment: dict[str, str], work: Callable, *args) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch warns about gloo and about few processors
    return work(*args)
