"""`logitless doctor`: what this machine has, which code will run on it, and whether it is right.

Its output is made to be pasted into a bug report: plain text, no host name, no path. The self-check
runs each public op, values and gradients under a random upstream gradient, on a few shapes that are
easy to get wrong, against the same formula written naively in fp64. Exit status 1 if one is off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import logitless as ll

from .. import _dispatch
from . import _machine
from .bench import reference

VARIABLES = (
    "LOGITLESS_IMPL", "LOGITLESS_CHECK", "LOGITLESS_WAITING", "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
SHAPES = ((3, 1), (5, 33), (4, 1000), (2, 16411))  # V: one, odd, aligned, odd over several blocks
# Bounds on the error of values and of gradients. Losses come back in fp32, from logits that fp64
# holds exactly; gradients are rounded to the dtype of the logits.
BOUNDS = {
    torch.bfloat16: (2e-5, 1e-2),
    torch.float16: (2e-5, 2e-3),
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-11, 1e-11),
}
NO_PATH = "none"


class Check(NamedTuple):
    """An op as we ship it and as fp64 has it; both take (logits, ids) and return a float tensor."""

    name: str
    ours: Callable[[Tensor, Tensor], Tensor]
    naive: Callable[[Tensor, Tensor], Tensor]


def columns_of_row_stats(x: Tensor, ids: Tensor) -> Tensor:
    stats = ll.row_stats(x, ids, entropy=True, total=True, argmax=True)
    numbers = (stats.lse, stats.picked, stats.entropy, stats.total)
    columns = torch.stack([n.reshape(len(x)) for n in numbers if n is not None], -1)
    return columns * columns.new_tensor([1, 1, 1, 1 / x.shape[1]])  # the mean: a sum may cancel


def naive_row_stats(x: Tensor, ids: Tensor) -> Tensor:
    logp = x.log_softmax(-1)
    picked = x.gather(-1, ids[:, None])[:, 0]
    return torch.stack((x.logsumexp(-1), picked, -(logp.exp() * logp).sum(-1), x.mean(-1)), -1)


def cross_entropy(name: str, **options) -> Check:
    """Cross-entropy with these options, row 0 ignored, one number a row."""

    def target(ids: Tensor) -> Tensor:
        return ids.index_fill(0, ids.new_zeros(1), reference.IGNORED)

    return Check(
        name,
        lambda x, ids: ll.cross_entropy(x, target(ids), reduction="none", **options),
        lambda x, ids: reference.per_row("cross_entropy", x, target(ids), options)[:, 0],
    )


CHECKS = (
    Check("logsumexp", lambda x, ids: ll.logsumexp(x), lambda x, ids: x.logsumexp(-1)),
    Check(
        "token_logprobs",
        lambda x, ids: ll.token_logprobs(x, ids),
        lambda x, ids: x.log_softmax(-1).gather(-1, ids[:, None])[:, 0],
    ),
    Check(
        "token_logprobs, K ids",
        lambda x, ids: ll.token_logprobs(x, torch.stack((ids, ids), -1)),
        lambda x, ids: x.log_softmax(-1).gather(-1, torch.stack((ids, ids), -1)),
    ),
    Check(
        "entropy",
        lambda x, ids: ll.entropy(x),
        lambda x, ids: naive_row_stats(x, ids)[:, 2],
    ),
    Check(
        "score",
        lambda x, ids: torch.stack(tuple(ll.score(x, ids)[:3]), -1),
        lambda x, ids: reference.per_row("score", x, ids, {}),
    ),
    Check("row_stats", columns_of_row_stats, naive_row_stats),
    cross_entropy("cross_entropy"),
    cross_entropy("cross_entropy, smoothing and z-loss", label_smoothing=0.1, z_loss=1e-3),
    cross_entropy("cross_entropy, softcap, temperature", softcap=5.0, temperature=0.7),
)


class Outcome(NamedTuple):
    value_error: float = 0.0
    grad_error: float = 0.0
    problem: str = ""


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, which code runs on it, and a self-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    show("machine", machine())
    show("environment", {name: os.environ.get(name, "not set") for name in VARIABLES})
    show("paths", {f"{kind} tensors": path(kind) for kind in ("cuda", "cpu")})
    return self_check()


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
        module = _dispatch.backend(torch.zeros(1, 1, device=kind))
    except Exception as error:
        return f"{NO_PATH}: {error}"
    name = "Triton kernels" if module.__name__.endswith("kernels") else "eager PyTorch"
    if _dispatch.chosen():
        return f"{name}, chosen by LOGITLESS_IMPL"
    return f"{name}, the default {'on a GPU (fp64: eager)' if kind == 'cuda' else 'on a CPU'}"


def ways() -> Iterator[tuple[str, str, contextlib.AbstractContextManager]]:
    """(name, device, context) of each way the ops can run here."""
    for kind in ("cuda", "cpu"):
        if (kind == "cpu" or torch.cuda.is_available()) and not path(kind).startswith(NO_PATH):
            yield kind, kind, contextlib.nullcontext()
    if os.environ.get("TRITON_INTERPRET") == "1" and not _dispatch.chosen():
        yield "interp", "cpu", ll.impl("triton")


def self_check() -> int:
    start, failures, count = time.perf_counter(), 0, 0
    print("self-check against fp64: largest error of values, of gradients")
    for way, device, context in ways():
        with context:
            for check in CHECKS:
                outcome = examine(check, device)
                count += 1
                failures += bool(outcome.problem)
                errors = f"{outcome.value_error:.0e}  {outcome.grad_error:.0e}"
                state = outcome.problem or "ok"
                print(f"  {way:<8}{check.name:<38}{errors}  {state}", flush=True)
    took = time.perf_counter() - start
    print(f"\n{count - failures} of {count} right, in {took:.1f} s")
    return 1 if failures or not count else 0


def examine(check: Check, device: str) -> Outcome:
    """The worst of all dtypes and shapes; the first problem is named with where it was."""
    worst = Outcome()
    dtypes = [d for d in BOUNDS if d != torch.float64 or device == "cpu"]
    if torch.float64 in dtypes and _dispatch.chosen() == "triton":
        dtypes.remove(torch.float64)
    for dtype in dtypes:
        for shape in SHAPES:
            where = f"{str(dtype).removeprefix('torch.')} {shape[0]}×{shape[1]}"
            try:
                value, grad = errors(check, shape, dtype, device)
            except Exception as error:
                return worst._replace(problem=f"FAILED at {where}: {error}")
            worst = Outcome(max(worst.value_error, value), max(worst.grad_error, grad))
            most_value, most_grad = BOUNDS[dtype]
            if not (value <= most_value and grad <= most_grad):
                return Outcome(value, grad, f"WRONG at {where}")
    return worst


def errors(check: Check, shape, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Errors of values, relative to max(1, |value|), and of gradients, relative in norm."""
    generator = torch.Generator().manual_seed(shape[1])
    x = (2 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    ids = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    z = x.detach().double().requires_grad_()
    found, wanted = check.ours(x, ids), check.naive(z, ids)
    upstream = torch.randn(wanted.shape, generator=generator).to(device)
    (d_x,) = torch.autograd.grad(found, x, upstream.to(found.dtype))
    (d_z,) = torch.autograd.grad(wanted, z, upstream.double())
    off = torch.linalg.vector_norm(d_x.double() - d_z)
    size = torch.linalg.vector_norm(d_z).clamp(min=0.1)  # with V = 1 it is 0
    return reference.distance(found, wanted).item(), (off / size).item()
