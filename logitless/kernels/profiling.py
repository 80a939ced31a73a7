"""The name and the bytes that profilers show for each kernel.

`@triton.jit(**profiled("ids_bwd", ...))` gives a kernel two functions:

- `repr` names the compiled kernel, as Nsight, torch.profiler and compute-sanitizer show it:
  `logitless_ids_bwd_bf16`. A name in PTX has letters, digits and underscores only. Triton calls it
  once per compilation.
- `launch_metadata` names one launch and counts its bytes, as Proton shows them:
  `ids_bwd[bf16, K=64]`. Triton calls it only while a profiler is active (see launch.py), so
  an unprofiled launch does not pay for it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

Arguments = dict[str, Any]  # of one launch, by the names of the kernel's parameters

LOGITS = ("X", "STUDENT", "DX")  # the first of these that a kernel has gives the dtype in its name
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def profiled(
    family: str, *, shows: tuple[str, ...] = (), **moves: Callable[[Arguments], int]
) -> dict[str, Callable]:
    """The options `repr` and `launch_metadata` of triton.jit.

    `shows` lists the parameters whose values are part of the name. The bytes of a launch count
    every element of every tensor once, read or written. A keyword argument replaces that count for
    the parameter of its name: it returns the number of elements that the launch moves.
    """

    def repr(specialization) -> str:
        types, constants = specialization.signature, specialization.constants
        dtypes = [types[name].lstrip("*") for name in LOGITS if types.get(name, "")[:1] == "*"]
        texts = [constants.get(name) for name in shows]
        return "_".join(["logitless", family, *dtypes[:1], *[t for t in texts if type(t) is str]])

    def launch_metadata(grid, metadata, args: Arguments) -> dict[str, Any]:
        dtypes = [DTYPES[args[name].dtype] for name in LOGITS if args.get(name) is not None]
        values = [(name, args[name]) for name in shows if args[name]]
        texts = [value if type(value) is str else f"{name}={value}" for name, value in values]
        about = ", ".join([*dtypes[:1], *texts])
        return {
            "name": f"{family}[{about}]" if about else family,
            "bytes": _bytes_moved(args, moves),
        }

    return {"repr": repr, "launch_metadata": launch_metadata}


def _bytes_moved(args: Arguments, moves: dict[str, Callable[[Arguments], int]]) -> int:
    """The bytes that a launch reads and writes, if every row counts and caches serve repeats."""
    total = 0
    for name, value in args.items():
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, torch.Tensor):
            count = moves[name](args) if name in moves else elements(tensor)
            total += count * tensor.element_size()
    return total


def elements(t: torch.Tensor | TensorDescriptor) -> int:
    """The numbers that a tensor has in memory. An expanded dimension counts once."""
    base = t.base if isinstance(t, TensorDescriptor) else t
    return math.prod(n for n, stride in zip(base.shape, base.stride(), strict=True) if stride)


def at_ids(args: Arguments) -> int:
    """One element per id."""
    return elements(args["IDS"])


def nothing(args: Arguments) -> int:
    """For memory that most launches do not touch."""
    return 0


def in_place(args: Arguments) -> int:
    """X, read, and written too unless the gradient has memory of its own."""
    return elements(args["X"]) * (2 if args.get("DX") is None else 1)
