"""`logitless doctor`: what this machine has, which code will run on it, and whether it is right.

Its output is made to be pasted into a bug report: plain text, no host name, no path. The self-check
runs every public function and every kernel that this device can run (selfcheck.py), values and
gradients under a random upstream gradient, on a few shapes that are easy to get wrong, against the
same formula written naively in fp64. Exit status 1 if one is off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

import logitless as ll

from ..core import call as _call
from . import chosen_device
from . import machine as _machine
from .selfcheck import CHECKS, Check

VARIABLES = (
    "LOGITLESS_IMPL", "LOGITLESS_CHECK", "LOGITLESS_WAITING", "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
SHAPES = ((3, 1), (5, 33), (4, 1000), (1, 16411))  # V: one, odd, aligned, one row in several parts
# Bounds on the error of values and of gradients. Losses come back in fp32, from logits that fp64
# holds exactly; gradients are rounded to the dtype of the logits.
BOUNDS = {
    torch.bfloat16: (2e-5, 1e-2),
    torch.float16: (2e-5, 2e-3),
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-11, 1e-11),
}
NO_PATH = "none"


class Error(NamedTuple):
    """How far off, how far is allowed, and in which dtype."""

    found: float = 0.0
    bound: float = 1.0
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.found:.0e} of {self.bound:.0e} {self.dtype}" if self.dtype else "none"

    @property
    def wrong(self) -> bool:
        return not self.found <= self.bound

    def worse(self, other: Error) -> Error:
        return self if self.found / self.bound >= other.found / other.bound else other


class Outcome(NamedTuple):
    value: Error = Error()
    gradient: Error = Error()
    problem: str = ""


ADVICE = """
What to do: LOGITLESS_IMPL=eager computes the same in plain PyTorch until this is mended.
If only what is in place or jsd is wrong, or hangs, try LOGITLESS_WAITING=0 (docs/performance.md).
Then please report it, with all of the above."""


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, which code runs on it, and a self-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: all there are")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    kinds = (chosen_device(args.device),) if args.device else ("cuda", "cpu")
    show("machine", machine())
    show("environment", {name: os.environ.get(name, "not set") for name in VARIABLES})
    show("paths", {f"{kind} tensors": path(kind) for kind in ("cuda", "cpu")})
    return self_check(kinds)


def show(title: str, facts: dict[str, str]) -> None:
    print(title)
    for name, fact in facts.items():
        print(f"  {name:<22}{fact}")
    print()


def machine() -> dict[str, str]:
    facts = {"logitless": f"{ll.__version__}, commit {_machine.commit() or 'unknown'}"}
    facts |= {name: version or "none" for name, version in _machine.versions().items()}
    facts["platform"] = f"{platform.system()} {platform.machine()}"
    facts["CPU"] = ", ".join(filter(None, _machine.device("cpu").values()))
    facts["GPU"] = "none that torch can use"
    if torch.cuda.is_available():
        facts["GPU"] = ", ".join(filter(None, _machine.device("cuda").values()))
    return facts


def path(kind: str) -> str:
    """Which code runs for tensors on this kind of device, and why."""
    if kind == "cuda" and not torch.cuda.is_available():
        return "no such tensors here"
    try:
        module = _call.backend_of(torch.zeros(1, 1, device=kind))
    except Exception as error:
        return f"{NO_PATH}: {error}"
    name = "Triton kernels" if module.__name__.endswith("kernels") else "eager PyTorch"
    if _call.chosen():
        return f"{name}, chosen by LOGITLESS_IMPL"
    return f"{name}, the default {'on a GPU (fp64: eager)' if kind == 'cuda' else 'on a CPU'}"


def ways(kinds: tuple[str, ...]) -> Iterator[tuple[str, str, contextlib.AbstractContextManager]]:
    """(name, device, context) of each way the ops can run here."""
    for kind in kinds:
        if (kind == "cpu" or torch.cuda.is_available()) and not path(kind).startswith(NO_PATH):
            yield kind, kind, contextlib.nullcontext()
    if "cpu" in kinds and os.environ.get("TRITON_INTERPRET") == "1" and not _call.chosen():
        yield "interp", "cpu", ll.impl("triton")


def self_check(kinds: tuple[str, ...]) -> int:
    start, failures, count = time.perf_counter(), 0, 0
    print("self-check against fp64: the error nearest its bound, and in which dtype")
    print(f"  {'':<8}{'':<32}{'values':<24}{'gradients':<24}")
    for way, device, context in ways(kinds):
        with context:
            for check in CHECKS:
                found = examine(check, device)
                count += 1
                failures += bool(found.problem)
                errors = f"{found.value!s:<24}{found.gradient!s:<24}"
                print(f"  {way:<8}{check.name:<32}{errors}{found.problem or 'ok'}", flush=True)
    took = time.perf_counter() - start
    print(f"\n{count - failures} of {count} right, in {took:.1f} s")
    if failures:
        print(ADVICE)
    return 1 if failures or not count else 0


def examine(check: Check, device: str) -> Outcome:
    """The worst of all dtypes and shapes; the first problem is named with where it was."""
    worst = Outcome()
    dtypes = [d for d in BOUNDS if d != torch.float64 or device == "cpu"]
    if torch.float64 in dtypes and _call.chosen() == "triton":
        dtypes.remove(torch.float64)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for shape in [shape for shape in SHAPES if shape[1] >= check.least]:
            where = f"{name} {shape[0]}×{shape[1]}"
            try:
                found = errors(check, shape, dtype, device)
            except Exception as error:
                return worst._replace(problem=f"FAILED at {where}: {error}")
            of = [Error(e, b, name) for e, b in zip(found, BOUNDS[dtype], strict=True)]
            if not check.differentiable:
                of[1] = Error()
            if any(e.wrong for e in of):
                return Outcome(of[0], of[1], f"WRONG at {where}")
            worst = Outcome(worst.value.worse(of[0]), worst.gradient.worse(of[1]))
    return worst


def errors(check: Check, shape, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Errors of values, relative to max(1, |value|), and of gradients, relative in norm."""
    generator = torch.Generator().manual_seed(shape[1])
    x, other = ((2 * torch.randn(shape, generator=generator)).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    ids = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    z = x.detach().double().requires_grad_()
    found, wanted = check.ours(x, ids, other), check.naive(z, ids, other.double())
    apart = (found.detach().double() - wanted.detach()).abs()
    value = (apart / wanted.detach().abs().clamp(min=1.0)).max().item()
    if not check.differentiable:
        return value, 0.0
    upstream = torch.randn(wanted.shape, generator=generator).to(device)
    (d_x,) = torch.autograd.grad(found, x, upstream.to(found.dtype))
    (d_z,) = torch.autograd.grad(wanted, z, upstream.double())
    off = torch.linalg.vector_norm(d_x.double() - d_z)
    size = torch.linalg.vector_norm(d_z).clamp(min=0.1)  # with V = 1 it is 0
    return value, (off / size).item()
