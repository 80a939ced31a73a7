"""Compile every kernel variant for a GPU that isn't here, and say what each one costs.

    python tests/aot.py cuda:90      (TRITON_INTERPRET unset)

Launches are recorded from the real launchers, on CPU tensors, and compiled instead of run, so what is
compiled is what a GPU would be given. Prints one JSON line a kernel variant.
"""

import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from logitless import kernels
from logitless.kernels import config

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


def source_of(kernel, args, kwargs):
    """What Triton would specialise a launch to: None and 1 are constants, 16-divisibility is kept."""
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
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not frozen:
                attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attrs), options


@contextlib.contextmanager
def recording():
    """Launches made in this block, recorded and not run."""
    launches = []
    run = triton.runtime.JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        launches.append(source_of(self, args, kwargs))

    triton.runtime.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.runtime.JITFunction.run = run


def variants():
    """(name, launch) over dtypes, alignments, few and many rows, and every option."""
    readings = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "temperature": {"row_temperature": torch.ones(2)},
        "all": {"softcap": 30.0, "row_temperature": torch.ones(2), "everything": True},
    }
    for dtype, V, splits, (name, how) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), (32768, 50257), (1, 4), readings.items()
    ):
        how = dict(how)
        everything = how.pop("everything", False)
        x = torch.zeros(2, V, dtype=dtype)
        for K in (1, 8):
            if K > 1 and not everything:
                continue
            ids = torch.zeros((2, K) if K > 1 else 2, dtype=torch.int64)
            reading = {
                "ids": ids,
                "weight": torch.ones(V) if everything else None,
                "row_temperature": how.get("row_temperature"),
                "temperature": 1.0,
                "softcap": how.get("softcap"),
                "ignore_index": -100 if K == 1 else None,
            }
            # The table a GPU would use: many rows on 132 processors, or few.
            cut = config.forward(10000 if splits == 1 else 2, V, x.element_size(), 132)
            row = torch.zeros(2)
            with recording() as launches, config.override(**cut._asdict()):
                kernels.stats_fwd(
                    x, **reading, want_entropy=everything, want_total=everything,
                    want_argmax=everything,
                )  # fmt: skip
            with recording() as backward:
                if splits == 1:
                    kernels.stats_bwd(
                        x, **reading, shift=row, log_s=row, picked=torch.zeros(ids.shape), a=row,
                        b=row if everything else None, g_id=torch.zeros(ids.shape),
                        g_c=row if everything else None,
                    )  # fmt: skip
                    kernels.scale_rows_(x, row)
            for launch in launches + backward:
                dt = str(dtype).removeprefix("torch.")
                yield f"{launch[0].name} {dt} V={V} K={K} {name}", launch


def resources(binary: bytes) -> dict:
    """Registers and spills of a cubin, from the compiler's own record in it."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True,
                              text=True, check=True).stdout  # fmt: skip
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {name.lower(): int(value) for name, value in found.items()}


def main(target: str) -> None:
    for name, (source, options) in variants():
        kernel = triton.compile(source, target=TARGETS[target], options=options)
        row = {"target": target, "kernel": name}
        if "cubin" in kernel.asm:
            row |= resources(kernel.asm["cubin"])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
