"""Launches kernels with little host overhead, on the GPU that holds the tensors.

Triton inspects every argument of a launch to find the matching compiled kernel. For many kernels,
inspecting the arguments takes as much time on the host as the kernel takes on the GPU. A `Launch`
holds the arguments that are the same in every call: the kernel, its grid, its sizes and its
constants. Each Launch is built once, by a cached function of shapes and options. A Launch also
keeps the compiled kernel, and calls its entry point with bare addresses instead of tensors.

Triton compiles a kernel once per combination of dtypes and alignments. An address is aligned if it
is a multiple of 16 bytes. A Launch selects the compiled kernel by the dtypes only. Therefore every
pointer needs one of two guarantees. Either the alignment of the pointer is the same in all calls of
a Launch, or the compiled kernel does not depend on this alignment:

- For the logits, the gradient of the logits, and the hidden states, each alignment has its own
  Launch, because the alignment is an argument of the cached function that builds the Launch.
- Memory that a launcher allocates is always aligned.
- The kernel declares every other pointer as `do_not_specialize_on_alignment`.

Each parameter of a kernel costs host time per launch, even a constant parameter. Therefore a kernel
with many constants has only one parameter for all constants. The parameter CONSTANTS is a frozen
dataclass `_Constants`. The kernel reads a constant such as `block_v` with
`field(CONSTANTS, "block_v")` (state.py). Triton compiles the kernel once per value of CONSTANTS, as
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

REMEMBERED = 1024  # largest number of entries in each cache of launches or plans

K = TypeVar("K")
V = TypeVar("V")

_CURRENT = contextlib.nullcontext()


class Plans(dict[K, V]):
    """A cache of launch plans. The function `make` builds the plan of a new key.

    The key is a NamedTuple. A lookup in a dictionary takes less time than functools.lru_cache.
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
    """Launches one kernel, like the call `kernel[programs](*tensors, *numbers, **constants)`.

    The tensors are passed in each call. Everything else is fixed when the Launch is created.
    """

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
        """Launches on the GPU of the first argument, which must be a Tensor."""
        device = tensors[0].device  # pyright: ignore
        types = (device, *[
            t if t is None else t.base.dtype if t.__class__ is TensorDescriptor else t.dtype
            for t in tensors
        ])  # fmt: skip
        compiled = self.compiled.get(types)
        # A profiler installs launch hooks in Triton. Only a launch through Triton calls the hooks,
        # so every launch goes through Triton while a profiler is active.
        if compiled is None or knobs.runtime.launch_enter_hook.calls:
            self.compile(types, tensors)
            return
        start, function, metadata = compiled
        addresses = [
            t if t is None or t.__class__ is TensorDescriptor else t.data_ptr() for t in tensors
        ]
        stream = driver.active.get_current_stream(device.index)
        args = (
            *self.grid, stream, function, metadata, None, None, None, *addresses, *self.after,
        )  # fmt: skip
        if device.index == torch.accelerator.current_device_index():
            start(*args)
        else:
            with on(device):
                start(*args)

    def compile(self, types: tuple, tensors: Sequence) -> None:
        """Launches the kernel through Triton, and keeps the compiled kernel for later calls.

        FMA contraction computes a · b + c with one rounding instead of two. FMA contraction is
        enabled explicitly, because Triton 3.10 changes the default. All GPU tests and measurements
        used FMA contraction.
        """
        with on(tensors[0].device):
            compiled = self.kernel[self.programs](
                *tensors, *self.numbers, **self.constants,
                num_warps=self.num_warps, enable_fp_fusion=True, **self.limit,
            )  # fmt: skip
        if isinstance(compiled, CompiledKernel):  # Triton's interpreter returns no kernel
            # The attribute `run` must be read before the attribute `function`, because reading
            # `run` loads the function.
            start = compiled.run
            self.compiled[types] = start, compiled.function, compiled.packed_metadata


def on(device: torch.device):
    """Returns a context manager that makes the GPU `device` the current GPU."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _CURRENT
    return torch.get_device_module(device).device(device)
