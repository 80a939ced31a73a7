"""Compiles every kernel for a GPU without having this GPU, and prints its resources.

    python -m tests.support.aot cuda:90 [--all | --few] [--only KERNEL ...]

TRITON_INTERPRET must be unset. The calls of kernel_calls.py run on CPU tensors. Their launches are
recorded and compiled, but not run, so the compiled kernels are those that a GPU would run. The
command prints one JSON line per compiled kernel: with --all, of every form; with --few, one per
kernel; else one per kernel and constant in its name, and for Hopper, whose resources the tests
check, also per variant.
"""

import argparse
import contextlib
import json
import os
from typing import NamedTuple
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything looks for GPUs

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import logitless as ll
from logitless.core import target_checks, tensor_checks
from logitless.kernels import config, program_exchange
from tests.support import kernel_calls
from tests.support.cubin import resources
from tests.support.replaced import replaced

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8",
    torch.uint8: "*u8", torch.bool: "*u1",
}  # fmt: skip
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def source_of(kernel, args, kwargs):
    """The source that Triton would compile for a launch, its options and its arguments.

    Arguments that are None or 1 become constants.
    """
    bound = dict(zip(kernel.arg_names, args, strict=False))
    options = {k: kwargs[k] for k in kwargs if k not in kernel.arg_names}
    bound.update({k: v for k, v in kwargs.items() if k in kernel.arg_names})
    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        frozen = param.do_not_specialize
        one = type(value) is int and value == 1 and not frozen
        if param.is_constexpr or value is None or one:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            size = ",".join(map(str, value.block_shape))
            signature[param.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{size}]>"
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not frozen:
                attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attrs), options, bound


@contextlib.contextmanager
def recording():
    """Yields a list of the launches in this block. The launches are recorded but not run."""
    launches = []

    def record(self, *args, grid, warmup, **kwargs):
        launches.append(source_of(self, args, kwargs))

    with mock.patch.object(triton.runtime.JITFunction, "run", record):
        yield launches


class Variant(NamedTuple):
    """What a kernel is compiled for, beside the options of a call."""

    dtype: torch.dtype
    vocab: int  # with 50257, rows are not 16-byte aligned
    width: int  # of a head
    pairs: int  # embeddings of a contrastive loss; 512 is a multiple of every tile
    processors: int = 1  # with 132, two rows are split, because they do not fill the GPU

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]} V={self.vocab} D={self.width}" + " split" * (
            self.processors > 1
        )


VARIANTS = (
    Variant(BF16, 32768, 128, 512),
    Variant(BF16, 50257, 96, 500),
    Variant(FP32, 32768, 64, 512),
    Variant(FP32, 50257, 72, 501, 132),
    Variant(FP16, 50257, 100, 501),
)
FEW = (Variant(BF16, 32768, 64, 64),)  # launches every kernel


def launches_of(v: Variant, target: str):
    """The launches of all calls, forward and backward, over two rows."""
    given = kernel_calls.make(2, v.vocab, v.dtype, v.width, v.pairs)
    memory = config.HOPPER_MEMORY if target in ("cuda:90", "cuda:100") else 0
    known = {  # what the calls ask of a GPU; as kernels do not run, no value is checked
        tensor_checks.triton_can_run: None,
        target_checks.in_range: None,
        program_exchange.may_wait: v.processors == 1,
        config.processors: v.processors,
        config.memory: memory,
    }
    with recording() as launches, contextlib.ExitStack() as stack:
        for function, answer in known.items():
            stack.enter_context(replaced(function, lambda *_, answer=answer, **__: answer))
        stack.enter_context(ll.impl("triton"))
        for name in kernel_calls.CALLS:
            kernel_calls.run(name, given, finite=False)
    return launches


def profile_of(source, kernel, bound) -> dict:
    """The name and the bytes that a profiler shows for a launch."""
    return source.fn.launch_metadata((1, 1, 1), kernel.metadata, bound)


class Driver:
    """A Triton driver that reports the GPU for which kernels are compiled."""

    def __init__(self, target: GPUTarget):
        self.get_current_target = lambda: target


def key_of(source, options, variant, given):
    """What a kernel is compiled once for."""
    if given.all:
        return source.hash(), *sorted(options.items())
    if given.few:
        return source.name
    kinds = [value for value in source.constants.values() if type(value) is str]
    return source.name, *kinds, variant if given.target == "cuda:90" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="KERNEL")
    given = parser.parse_args()
    target = given.target
    triton.runtime.driver.set_active(Driver(TARGETS[target]))
    seen = set()
    for variant in FEW if given.few else VARIANTS:
        for source, options, bound in launches_of(variant, target):
            key = key_of(source, options, variant, given)
            if key in seen or (given.only and source.name not in given.only):
                continue
            seen.add(key)
            kernel = triton.compile(source, target=TARGETS[target], options=options)
            row = {"target": target, "kernel": f"{source.name} {variant}"}
            row |= {"compiled": kernel.metadata.name, "profile": profile_of(source, kernel, bound)}
            if target.startswith("cuda"):
                row |= resources(kernel.asm)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
