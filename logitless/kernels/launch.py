"""Launches kernels with little host overhead, on the GPU that holds the tensors.

To find the compiled kernel, Triton inspects every argument, which often takes the host as long as
the kernel takes the GPU. A `Launch`, built once by a cached function of shapes and options, holds
all that is the same in every call, keeps the compiled kernel, and passes it bare addresses.

Triton also compiles by alignment to 16 bytes, but a Launch looks at dtypes only. So each pointer's
alignment is either fixed for a Launch (that of logits, their gradient and hidden states is a key of
the cached function; what a launcher allocates is always aligned), or the kernel declares it as
`do_not_specialize_on_alignment`.

Kernels that hot code launches have a `Launch` from a cached function; the others go through
`launch`, whose key takes a few µs more.

Every parameter costs host time, even a constant. A kernel with many has one, CONSTANTS, a frozen
dataclass that it reads with `field`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import triton
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
    """A cache of launch plans by NamedTuple, with faster lookups than functools.lru_cache."""

    def __init__(self, make: Callable[[K], V]):
        super().__init__()
        self.make = make

    def __missing__(self, key: K) -> V:
        if len(self) >= REMEMBERED:
            self.clear()
        plan = self[key] = self.make(key)
        return plan


class Launch:
    """Launches one kernel, like `kernel[programs](*tensors, *numbers, **constants)`.

    Only the tensors are passed in each call.
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
        device = tensors[0].device
        types = (device, *[
            t if t is None else t.base.dtype if t.__class__ is TensorDescriptor else t.dtype
            for t in tensors
        ])  # fmt: skip
        compiled = self.compiled.get(types)
        # a profiler's launch hooks are called only by Triton's own launch
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

        FMA contraction (a · b + c rounded once) is enabled explicitly, because Triton 3.10 changes
        the default, and all GPU tests and measurements had it.
        """
        with on(tensors[0].device):
            compiled = self.kernel[self.programs](
                *tensors, *self.numbers, **self.constants,
                num_warps=self.num_warps, enable_fp_fusion=True, **self.limit,
            )  # fmt: skip
        if isinstance(compiled, CompiledKernel):  # Triton's interpreter returns no kernel
            # first, because reading `run` loads `function`
            start = compiled.run
            self.compiled[types] = start, compiled.function, compiled.packed_metadata


_launches: dict[tuple, Launch] = {}


def launch(
    kernel,
    programs: tuple[int, ...],
    tensors: Sequence[Tensor | TensorDescriptor | None],
    numbers: tuple,
    *,
    num_warps: int,
    registers: int | None = None,
    **constants,
) -> None:
    """Launches a kernel by the `Launch` that is kept for its sizes, constants and alignments."""
    addresses = [
        0 if t is None or t.__class__ is TensorDescriptor else t.data_ptr() % 16 for t in tensors
    ]
    # by id, because the hash of a kernel takes longer than the rest of the key
    key = (
        id(kernel), programs, numbers, num_warps, registers, *constants.values(), *addresses
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= REMEMBERED:
            _launches.clear()
        found = _launches[key] = Launch(
            kernel, programs, numbers, num_warps=num_warps, registers=registers, **constants
        )
    found(*tensors)


def on(device: torch.device):
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _CURRENT
    return torch.get_device_module(device).device(device)


@triton.constexpr_function
def field(struct, name):
    """Returns one field of the dataclass that a kernel gets as CONSTANTS (see above)."""
    return getattr(struct, name)
