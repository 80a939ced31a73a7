"""Runs test cases in several processes on one machine, which communicate by gloo.

`run` starts the processes and returns the outcome of every case on every rank. An outcome is the
error of the result divided by the allowed error, or the text of an exception. All cases run in the
same processes, because starting processes is slow.
"""

import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked import together
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


def in_process(rank: int, world: int, cases: Callable[[], dict[str, Case]]) -> dict:
    """The outcomes of all cases in the process of one rank."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks and their meshes are on the CPU
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=PATIENCE)
    for ranks in WIDTHS:
        if ranks <= world:
            GROUPS[ranks] = dist.new_group(list(range(ranks)), timeout=PATIENCE)
    outcomes = {}
    for name, work in cases().items():
        try:
            outcomes[name] = work()
        except Exception:
            outcomes[name] = traceback.format_exc()
    dist.destroy_process_group()
    return outcomes


def run(world: int, cases: Callable[[], dict[str, Case]]) -> list[dict[str, float | str]]:
    """The outcomes of cases on each of `world` ranks."""
    found = together(world, in_process, world, cases)
    assert all(own.keys() == found[0].keys() != set() for own in found)
    return found


def failures(outcomes: list[dict[str, float | str]]) -> list[str]:
    """The cases that failed, on which rank, and how far off they are or their traceback."""
    return [
        f"{name}, rank {rank}: {far}"
        for rank, found in enumerate(outcomes)
        for name, far in found.items()
        if isinstance(far, str) or not far <= 1
    ]
