"""Launches that cost the host little, on the GPU of their tensors.

Triton inspects every argument of a launch to find the compiled kernel that fits it. The inspection
takes the host as long as many kernels take the GPU. A `Launch` holds what is the same in every
call: the kernel, its grid, sizes and constants. It is built once, by a cached function of shapes
and options. It also keeps the compiled kernel, and calls its entry point with bare addresses.

A compiled kernel depends on two properties of its tensors. A Launch looks up the dtypes. It does
not look up which addresses are multiples of 16 bytes, so every pointer must follow one of three
rules:

- Logits and their gradient come with their alignment among the sizes or constants.
- Memory that a launcher allocates is always aligned.
- Every other pointer is declared `do_not_specialize_on_alignment` by its kernel.

Each parameter of a kernel costs host time per launch, constants too. So a kernel with many
constants takes them as one parameter, CONSTANTS: a frozen dataclass `_Constants`, which the kernel
reads by `field(CONSTANTS, "block_v")` (state.py). Triton compiles a kernel once per value of it, as
for any `tl.constexpr`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

REMEMBERED = 1024  # entries in each cache of launches and plans

K = TypeVar("K")
V = TypeVar("V")

_CURRENT = contextlib.nullcontext()


class Plans(dict[K, V]):
    """plans[key] is make(key), kept for the next call with the same key.

    The key is a NamedTuple. A dictionary finds it sooner than functools.lru_cache does.
    """

    def __init__(self, make: Callable[[K], V]):
        super().__init__()
        self.make = make

    def __missing__(self, key: K) -> V:
        if len(self) >= REMEMBERED:
            self.clear()
        plan = self[key] = self.make(key)
        return plan


class Launch:
    """kernel[programs](*tensors, *numbers, **constants) for tensors that each call passes."""

    def __init__(
        self,
        kernel,
        programs: tuple[int, ...],
        numbers: tuple[int | float | None, ...],
        *,
        num_warps: int,
        registers: int | None = None,
        **constants: int | bool | str,
    ):
        self.kernel, self.programs, self.numbers = kernel, programs, numbers
        self.constants, self.num_warps = constants, num_warps
        self.limit = {"maxnreg": registers} if registers and torch.version.cuda else {}
        self.after = (*numbers, *(constants[n] for n in kernel.arg_names if n in constants))
        self.grid = (*programs, 1, 1)[:3]
        self.compiled: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Tensor | TensorDescriptor | None) -> None:
        """Launches on the GPU of the first tensor, which must not be a descriptor."""
        device = tensors[0].device  # pyright: ignore
        types = (device, *[
            t if t is None else t.base.dtype if t.__class__ is TensorDescriptor else t.dtype
            for t in tensors
        ])  # fmt: skip
        compiled = self.compiled.get(types)
        if compiled is None or knobs.runtime.launch_enter_hook.calls:  # hooks: a profiler is active
            self.compile(types, tensors)
            return
        start, function, metadata = compiled
        addresses = [
            t if t is None or t.__class__ is TensorDescriptor else t.data_ptr() for t in tensors
        ]
        stream = driver.active.get_current_stream(device.index)
        rest = (stream, function, metadata, None, None, None, *addresses, *self.after)
        if device.index == torch.accelerator.current_device_index():
            start(*self.grid, *rest)
        else:
            with on(device):
                start(*self.grid, *rest)

    def compile(self, types: tuple, tensors: Sequence) -> None:
        """Launches through Triton, and keeps the compiled kernel.

        FMA contraction is pinned on, because every measurement and test on a GPU used it, and
        Triton 3.10 changes the default.
        """
        with on(tensors[0].device):
            compiled = self.kernel[self.programs](
                *tensors, *self.numbers, **self.constants,
                num_warps=self.num_warps, enable_fp_fusion=True, **self.limit,
            )  # fmt: skip
        if isinstance(compiled, CompiledKernel):  # the interpreter returns none
            start = compiled.run  # read first, because reading it loads the function
            self.compiled[types] = start, compiled.function, compiled.packed_metadata


def on(device: torch.device):
    """A context in which this GPU is the current one."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _CURRENT
    return torch.get_device_module(device).device(device)
