"""Launching: at little cost to the host, on the tensor's own GPU.

What does not change from call to call, the grid, sizes and constants of a kernel, is a `Launch`,
made once by a cached function of shapes and options. Triton looks at every argument of a launch to
find the compiled kernel that suits them; a Launch remembers what was found for tensors like these.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

REMEMBERED = 1024  # shapes and options, for each kind of launch

_HERE = contextlib.nullcontext()


class Launch:
    """kernel[programs](*tensors, *numbers, **constants), for tensors to come."""

    def __init__(
        self,
        kernel,
        programs: tuple[int, ...],
        numbers: tuple[int | float | None, ...],
        *,
        num_warps: int,
        **constants: int | bool,
    ):
        self.kernel, self.programs, self.numbers = kernel, programs, numbers
        self.constants, self.num_warps = constants, num_warps
        self.after = (*numbers, *(constants[n] for n in kernel.arg_names if n in constants))
        self.found: dict[tuple, Callable] = {}

    def __call__(self, *tensors: Tensor | TensorDescriptor | None) -> None:
        """On the GPU of the first tensor."""
        device = tensors[0].device  # pyright: ignore[reportOptionalMemberAccess]
        like = (device, *[
            None if t is None
            else (t.base.dtype, *t.block_shape) if t.__class__ is TensorDescriptor
            else (t.dtype, t.data_ptr() % 16)
            for t in tensors
        ])  # fmt: skip
        with _on(device):
            run = self.found.get(like)
            if run is not None:
                run(*tensors, *self.after)
                return
            compiled = self.kernel[self.programs](
                *tensors, *self.numbers, **self.constants, num_warps=self.num_warps
            )
            if isinstance(compiled, CompiledKernel):  # the interpreter has none
                self.found[like] = compiled[(*self.programs, 1, 1)[:3]]


def _on(device: torch.device):
    """The tensor's GPU made current, if another is."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _HERE
    return torch.get_device_module(device).device(device)
