"""`logitless doctor`: describes the machine and the backend, and checks the library's results.

The output is plain text without host names or paths, so that users can paste the output into a bug
report. The self-check (selfcheck.py) runs each family of kernels on a few error-prone shapes.
Values and gradients are compared with a naive formula in fp64. The upstream gradients are random.
The exit status is 1 if a check fails.

With --json, the command prints the same facts and results as one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

import logitless as ll

from .. import eager
from ..core import choose_backend as _choose_backend
from . import chosen_device, machine
from .selfcheck import CHECKS, Check

VARIABLES = (
    "LOGITLESS_IMPL", "LOGITLESS_FUSE", "LOGITLESS_CHECK", "LOGITLESS_WAITING",
    "LOGITLESS_WARN_BYTES", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
# Shapes (N, V) of logits. V is 1 in the first shape, and odd in the second shape. In the third
# shape, rows are 16-byte aligned. In the last shape, V is so large that kernels split a row.
SHAPES = ((3, 1), (5, 33), (4, 1000), (1, 16411))
# Bounds on the errors of values and of gradients. Values have the same bound for 16-bit logits as
# for fp32 logits, because losses of 16-bit logits are returned in fp32. Gradients are rounded to
# the dtype of the logits.
BOUNDS = {
    torch.bfloat16: (2e-5, 1e-2),
    torch.float16: (2e-5, 2e-3),
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-11, 1e-11),
}
NO_PATH = "none"


class Error(NamedTuple):
    """The error of a result, the bound on this error, and the dtype of the logits."""

    size: float = 0.0
    bound: float = 1.0
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.size:.0e} of {self.bound:.0e} {self.dtype}" if self.dtype else "none"

    @property
    def wrong(self) -> bool:
        return not self.size <= self.bound

    def worse(self, other: Error) -> Error:
        return self if self.size / self.bound > other.size / other.bound else other


class Outcome(NamedTuple):
    """The result of one check.

    Over all dtypes and shapes of the check, `value` and `gradient` are the errors that came closest
    to their bounds. If a result is wrong, `value` and `gradient` hold only the errors of the wrong
    result. `problem` is empty if the check passed.
    """

    value: Error = Error()
    gradient: Error = Error()
    problem: str = ""


ADVICE = """
What to do: set LOGITLESS_IMPL=eager until this is fixed; everything then runs in plain PyTorch.
If only jsd and the check "in place" are wrong or hang, try LOGITLESS_WAITING=0
(docs/performance.md). Please report the problem with all of the output above."""


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="describe this machine and check the library's results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: all devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    kinds = (chosen_device(args.device),) if args.device else ("cuda", "cpu")
    facts = {
        "machine": machine_facts(),
        "environment": {name: os.environ.get(name, "not set") for name in VARIABLES},
        "paths": {f"{kind} tensors": path(kind) for kind in ("cuda", "cpu")},
    }
    return (print_json if args.json else print_text)(facts, kinds)


def print_json(facts: dict[str, dict[str, str]], kinds: tuple[str, ...]) -> int:
    outcomes = list(self_check(kinds))
    checks = [
        {
            "backend": way,
            "check": name,
            "values": str(outcome.value),
            "gradients": str(outcome.gradient),
            "result": outcome.problem or "ok",
        }
        for way, name, outcome in outcomes
    ]
    print(json.dumps({**facts, "checks": checks}, indent=1, ensure_ascii=False))
    return status([outcome for _, _, outcome in outcomes])


def print_text(facts: dict[str, dict[str, str]], kinds: tuple[str, ...]) -> int:
    for title, part in facts.items():
        show(title, part)
    start, outcomes = time.perf_counter(), []
    print("self-check against fp64: the error nearest to its bound, with the dtype of the logits")
    print(f"  {'':<8}{'':<32}{'values':<24}{'gradients':<24}")
    for way, name, outcome in self_check(kinds):
        outcomes.append(outcome)
        errors = f"{outcome.value!s:<24}{outcome.gradient!s:<24}"
        print(f"  {way:<8}{name:<32}{errors}{outcome.problem or 'ok'}", flush=True)
    took = time.perf_counter() - start
    right = sum(not outcome.problem for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} right, in {took:.1f} s")
    if right < len(outcomes):
        print(ADVICE)
    return status(outcomes)


def status(outcomes: list[Outcome]) -> int:
    """Returns the exit status: 1 if a check has a problem or no check ran, else 0."""
    return 1 if not outcomes or any(outcome.problem for outcome in outcomes) else 0


def show(title: str, facts: dict[str, str]) -> None:
    print(title)
    for name, fact in facts.items():
        print(f"  {name:<22}{fact}")
    print()


def machine_facts() -> dict[str, str]:
    facts = {"logitless": f"{ll.__version__}, commit {machine.commit() or 'unknown'}"}
    facts |= {name: version or "none" for name, version in machine.versions().items()}
    facts["platform"] = f"{platform.system()} {platform.machine()}"
    facts["CPU"] = ", ".join(filter(None, machine.device("cpu").values()))
    facts["GPU"] = "none that torch can use"
    if torch.cuda.is_available():
        facts["GPU"] = ", ".join(filter(None, machine.device("cuda").values()))
    return facts


def path(kind: str) -> str:
    """Returns the backend for tensors on this kind of device, and the reason for this choice."""
    if kind == "cuda" and not torch.cuda.is_available():
        return "not available on this machine"
    try:
        module = _choose_backend.backend_of(torch.zeros(1, 1, device=kind))
    except Exception as error:
        return f"{NO_PATH}: {error}"
    name = "eager PyTorch" if module is eager else "Triton kernels"
    if _choose_backend.chosen():
        return f"{name}, chosen by LOGITLESS_IMPL"
    return f"{name}, the default {'on a GPU (fp64: eager)' if kind == 'cuda' else 'on a CPU'}"


def ways(kinds: tuple[str, ...]) -> Iterator[tuple[str, str, contextlib.AbstractContextManager]]:
    """Yields (name, device, context manager) for each backend that this machine can run."""
    for kind in kinds:
        if (kind == "cpu" or torch.cuda.is_available()) and not path(kind).startswith(NO_PATH):
            yield kind, kind, contextlib.nullcontext()
    if (
        "cpu" in kinds
        and os.environ.get("TRITON_INTERPRET") == "1"
        and not _choose_backend.chosen()
    ):
        yield "interp", "cpu", ll.impl("triton")


def self_check(kinds: tuple[str, ...]) -> Iterator[tuple[str, str, Outcome]]:
    """Yields (backend, check, outcome) for each check on each backend of this machine."""
    for way, device, context in ways(kinds):
        with context:
            for check in CHECKS:
                yield way, check.name, examine(check, device)


def examine(check: Check, device: str) -> Outcome:
    """Runs a check with all dtypes and shapes, and stops at the first problem."""
    worst = Outcome()
    dtypes = [d for d in BOUNDS if d != torch.float64 or device == "cpu"]
    if torch.float64 in dtypes and _choose_backend.chosen() == "triton":
        dtypes.remove(torch.float64)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for shape in [shape for shape in SHAPES if shape[1] >= check.least]:
            where = f"{name} {shape[0]}×{shape[1]}"
            try:
                sizes = errors(check, shape, dtype, device)
            except Exception as error:
                return worst._replace(problem=f"FAILED at {where}: {error}")
            value, gradient = (
                Error(size, bound, name) for size, bound in zip(sizes, BOUNDS[dtype], strict=True)
            )
            if not check.differentiable:
                gradient = Error()
            if value.wrong or gradient.wrong:
                return Outcome(value, gradient, f"WRONG at {where}")
            worst = Outcome(worst.value.worse(value), worst.gradient.worse(gradient))
    return worst


def errors(check: Check, shape, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Returns the error of values, and the relative error of gradients.

    The error of a value is relative to max(1, |value|).
    """
    generator = torch.Generator().manual_seed(shape[1])
    x, other = ((2 * torch.randn(shape, generator=generator)).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    ids = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    z = x.detach().double().requires_grad_()
    ours, naive = check.ours(x, ids, other), check.naive(z, ids, other.double())
    difference = (ours.detach().double() - naive.detach()).abs()
    value = (difference / naive.detach().abs().clamp(min=1.0)).max().item()
    if not check.differentiable:
        return value, 0.0
    upstream = torch.randn(naive.shape, generator=generator).to(device)
    (d_x,) = torch.autograd.grad(ours, x, upstream.to(ours.dtype))
    (d_z,) = torch.autograd.grad(naive, z, upstream.double())
    difference = torch.linalg.vector_norm(d_x.double() - d_z)
    size = torch.linalg.vector_norm(d_z).clamp(min=0.1)  # avoids 0 / 0 if V = 1
    return value, (difference / size).item()
