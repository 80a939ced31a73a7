"""The name and the number of bytes that profilers show for each kernel.

`@triton.jit(**profiled("stats_bwd", ...))` gives a kernel two functions:

- `repr` names the compiled kernel for Nsight, torch.profiler and compute-sanitizer, for example
  `logitless_stats_bwd_bf16` (PTX allows only letters, digits and underscores);
- `launch_metadata` gives Proton the name of a launch, for example `stats_bwd[bf16, K=64]`, and the
  bytes it reads and writes. Triton calls it only while a profiler is active (see launch.py).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

Arguments = dict[str, Any]  # the arguments of one launch, by parameter name

# a kernel's name contains the dtype of the first of these that it has and that is not None
LOGITS = ("X", "STUDENT", "DX", "HIDDEN")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def profiled(
    family: str, *, shows: tuple[str, ...] = (), **moves: Callable[[Arguments], int]
) -> dict[str, Callable]:
    """Returns the options `repr` and `launch_metadata` of triton.jit.

    The kernel's name shows the parameters in `shows`. A launch moves the bytes of all its tensors,
    but with `P=count`, `count(args)` elements of the parameter P.
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
    """Returns the bytes of a launch, counting each element once, even in ignored rows."""
    total = 0
    for name, value in args.items():
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, torch.Tensor):
            count = moves[name](args) if name in moves else elements(tensor)
            total += count * tensor.element_size()
    return total


def elements(t: torch.Tensor | TensorDescriptor) -> int:
    """Returns the number of elements in memory: an expanded dimension counts as size 1."""
    base = t.base if isinstance(t, TensorDescriptor) else t
    return math.prod(n for n, stride in zip(base.shape, base.stride(), strict=True) if stride)


def at_ids(args: Arguments) -> int:
    """For tensors that a launch accesses only at the ids."""
    return elements(args["IDS"])


def nothing(args: Arguments) -> int:
    """For tensors of which a launch accesses only a small part."""
    return 0


def in_place(args: Arguments) -> int:
    """Returns the number of elements of X, doubled if the launch overwrites X."""
    return elements(args["X"]) * (2 if args.get("DX") is None else 1)
