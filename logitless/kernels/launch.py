"""Launching at little cost to the host, on the tensor's own GPU.

What does not change from call to call (the grid, sizes and constants of a kernel) is a `Launch`,
made once by a cached function of shapes and options. Triton looks at every argument of a launch to
find the compiled kernel that suits it, which takes the host as long as many a kernel takes the GPU.
A Launch remembers the compiled kernel and calls its entry point with bare addresses.

The rule that makes this right: a kernel is compiled for the dtypes of its tensors, which a Launch
looks at, and for what is 16-byte aligned, which it does not. So logits and their gradient come with
their alignment among the sizes, what the launchers allocate is always aligned, and every other
pointer is declared `do_not_specialize_on_alignment` by its kernel.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

REMEMBERED = 1024  # shapes and options, for each kind of launch

_HERE = contextlib.nullcontext()


class Launch:
    """kernel[programs](*tensors, *numbers, **constants), for tensors to come, on one device."""

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
        """On the GPU of the first tensor, which is no descriptor."""
        device = tensors[0].device  # pyright: ignore
        types = (device, *[
            t if t is None else t.base.dtype if t.__class__ is TensorDescriptor else t.dtype
            for t in tensors
        ])  # fmt: skip
        found = self.compiled.get(types)
        if found is None or knobs.runtime.launch_enter_hook.calls:  # a profiler wants to know
            self.compile(types, tensors)
            return
        start, function, metadata = found
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
        """Launch by Triton's own way, and remember what it compiled.

        Products that are added to are rounded once, with the sum, as in all that was measured and
        tested on a GPU. Triton's own default for it changes with 3.10.
        """
        with on(tensors[0].device):
            compiled = self.kernel[self.programs](
                *tensors, *self.numbers, **self.constants,
                num_warps=self.num_warps, enable_fp_fusion=True, **self.limit,
            )  # fmt: skip
        if isinstance(compiled, CompiledKernel):  # the interpreter has none
            start = compiled.run  # first: it loads the function
            self.compiled[types] = start, compiled.function, compiled.packed_metadata


def on(device: torch.device):
    """The tensor's GPU made current, if another is."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _HERE
    return torch.get_device_module(device).device(device)
