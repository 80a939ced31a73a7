"""Runs test cases in several processes on one machine, which communicate by gloo.

`run` starts the processes and returns the outcome of every case on every rank. An outcome is the
error of the result divided by the allowed error, or the text of an exception. All cases run in the
same processes, because starting processes is slow.
"""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist

from tests.support.paths import ROOT
from tests.support.patience import HANG

WORLD = 4
WIDTHS = {2: (20, 17), 3: (9, 0, 28), 4: (0, 5, 31, 1)}  # number of columns of each rank
EXACT = 1e-9  # the allowed error in fp64
PATIENCE = timedelta(seconds=HANG / 6)  # timeout of a collective, in case a rank has failed

GROUPS: dict[int, dist.ProcessGroup] = {}  # GROUPS[n] contains the first n ranks
MESHES: dict[tuple[int, ...], Any] = {}

Case = Callable[[], float]


def calls():
    """The module `calls`. The import is late, because the process must be set up first."""
    from tests.support import calls

    return calls


def mesh_of(*shape: int):
    from torch.distributed.device_mesh import init_device_mesh

    names = ("data", "model")[-len(shape) :]
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return MESHES[shape]


def differentiated(call, source, leaves):
    found = [t for t in call(source) if t is not None]
    used = [t for t in found if t.requires_grad]
    scalar = sum((t.double() * (i + 1)).sum() for i, t in enumerate(used))
    d = torch.autograd.grad(scalar, leaves) if used else [torch.zeros_like(t) for t in leaves]
    return [t.detach() for t in found], d


def apart(got, want) -> float:
    """The largest difference, divided by the allowed error in fp64."""
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a.numel()]
    return largest(float((a.double() - b.double()).abs().max()) for a, b in pairs) / EXACT


def largest(numbers: Iterable[float]) -> float:
    """The largest number, or NaN if a number is NaN. Python's max may ignore a NaN."""
    return torch.tensor(list(numbers), dtype=torch.float64).max().item()


def in_process(rank: int, world: int, cases: dict[str, Case]) -> None:
    """Runs all cases in the process of one rank, and prints the outcomes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=PATIENCE)
    for ranks in WIDTHS:
        if ranks <= world:
            GROUPS[ranks] = dist.new_group(list(range(ranks)), timeout=PATIENCE)
    for name, work in cases.items():
        try:
            far = work()
        except Exception:
            far = traceback.format_exc()
        print(json.dumps([name, far]), flush=True)
    dist.destroy_process_group()


def started(world: int, code: str) -> list[tuple[str, str]]:
    """The stdout and stderr of each of `world` processes that run `code`, which may use `rank`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the ranks and their meshes are on the CPU
    with contextlib.ExitStack() as stack:  # ranks write to files, because a full pipe would block
        written = [
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ("stdout", "stderr")]
            for _ in range(world)
        ]
        ranks = [
            subprocess.Popen([sys.executable, "-W", "ignore", "-c", f"rank = {rank}\n{code}"],
                             env=environment, stdout=out, stderr=error)
            for rank, (out, error) in enumerate(written)
        ]  # fmt: skip
        late = not all_ended(ranks, [file for files in written for file in files])
        for file in itertools.chain(*written):
            file.seek(0)
        said = [(out.read(), error.read()) for out, error in written]
    assert not late, f"the ranks neither write nor end: {errors_of(said)}"
    return said


def all_ended(ranks: list[subprocess.Popen], files: list[IO[str]]) -> bool:
    """Whether all ranks end by themselves. Kills ranks that write nothing for HANG seconds."""
    written, since = 0, time.monotonic()
    try:
        for rank in ranks:
            while rank.poll() is None:
                size = sum(os.fstat(file.fileno()).st_size for file in files)
                if size != written:
                    written, since = size, time.monotonic()
                if time.monotonic() - since > HANG:
                    return False
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(timeout=1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return True


def errors_of(said: list[tuple[str, str]]) -> str:
    """The last part of each rank's stderr."""
    return "".join(f"\nrank {rank}: {error[-2000:]}" for rank, (_, error) in enumerate(said))


def run(world: int, module: str, which: str) -> list[dict[str, float | str]]:
    """The outcomes of the cases of `module` on each of `world` ranks."""
    code = (
        f"import {module} as cases\nfrom tests.support import rank_processes\n"
        f"rank_processes.in_process(rank, {world}, cases.{which})"
    )
    said = started(world, code)
    # Lines of other formats are skipped, because PyTorch 2.9 writes to stdout too.
    lines = [[line for line in out.splitlines() if line.startswith('["')] for out, _ in said]
    found = [dict(map(json.loads, own)) for own in lines]
    assert all(own.keys() == found[0].keys() != set() for own in found), errors_of(said)
    return found


def failures(outcomes: list[dict[str, float | str]]) -> list[str]:
    """The cases that failed, on which rank, and how far off they are or their traceback."""
    return [
        f"{name}, rank {rank}: {far}"
        for rank, found in enumerate(outcomes)
        for name, far in found.items()
        if isinstance(far, str) or not far <= 1
    ]
