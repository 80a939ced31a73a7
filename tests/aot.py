"""Compile every kernel variant for a GPU that isn't here, and say what each one costs.

    python tests/aot.py cuda:90      (TRITON_INTERPRET unset)

Launches are recorded from the real launchers, on CPU tensors, and compiled instead of run, so what
is compiled is what a GPU would be given. Prints one JSON line a kernel variant.
"""

import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from logitless import kernels
from logitless.kernels import config, pair

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
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def source_of(kernel, args, kwargs):
    """What Triton would specialise a launch to: None and 1 are constants."""
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


class Variant(NamedTuple):
    """One way to call the launchers."""

    dtype: torch.dtype
    V: int = 32768  # 50257: rows that are not 16-byte aligned
    rows: int = 10_000  # on 132 processors; 2: split
    K: int = 1
    softcap: float | None = None
    everything: bool = False  # every statistic, class weights, a temperature a row

    def __str__(self) -> str:
        extras = " softcap" * bool(self.softcap) + " everything" * self.everything
        return f"{str(self.dtype)[6:]} V={self.V} rows={self.rows} K={self.K}{extras}"


def variants() -> list[Variant]:
    """Every dtype by alignment and splits; every option at the extremes of both."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    plain = [Variant(*v) for v in itertools.product(dtypes, (32768, 50257), (10_000, 2))]
    capped = [Variant(dtype, softcap=30.0) for dtype in dtypes]
    full = [
        Variant(dtype, V, rows, K, cap, True)
        for dtype, V, rows, K, cap in (
            (torch.bfloat16, 32768, 10_000, 1, 30.0),
            (torch.bfloat16, 50257, 10_000, 8, 30.0),
            (torch.bfloat16, 50257, 2, 8, None),
            (torch.float32, 32768, 10_000, 8, 30.0),
            (torch.bfloat16, 32768, 10_000, 512, None),
            (torch.float32, 50257, 2, 1, 30.0),
            (torch.float16, 50257, 10_000, 1, None),
        )
    ]
    sparse = [
        Variant(torch.bfloat16, K=512),
        Variant(torch.bfloat16, 50257, K=64, softcap=30.0),
        Variant(torch.float32, 50257, K=8),
        Variant(torch.bfloat16, V=1, K=2),
    ]
    return plain + capped + full + sparse


def launches_of(v: Variant):
    """What the launchers launch for a variant, on tensors of two rows."""
    x, row, full = torch.zeros(2, v.V, dtype=v.dtype), torch.zeros(2), v.everything
    ids = torch.zeros((2, v.K) if v.K > 1 else 2, dtype=torch.int64)
    like_ids = torch.zeros(ids.shape)
    reading = {
        "ids": ids,
        "weight": torch.ones(v.V) if full else None,
        "row_temperature": torch.ones(2) if full else None,
        "temperature": 1.0,
        "softcap": v.softcap,
        "ignore_index": -100,
        "normalised": True,
        "outside": int(full) if v.K > 1 else None,
        "plain": full and v.K > 1,
    }
    cut = config.forward(v.rows, v.V, x.element_size(), 132, heavy=full or v.softcap is not None)
    with recording() as launches:
        with config.override(**cut._asdict()):
            kernels.stats_fwd(x, **reading, want_entropy=full, want_total=full, want_argmax=full)
        if v.rows > 2:
            for inplace in (False, True):
                kernels.stats_bwd(
                    x, **reading, shift=row, log_s=row, log_s1=row,
                    a=row, b=row if full else None, g_id=like_ids, g_c=row if full else None,
                    a_ids=row if v.K > 1 else None, d_label=row if reading["plain"] else None,
                    gain=row[0] if v.K > 1 else None, inplace=inplace,
                    repeats=row.to(torch.int8) if v.K > 1 and not full else None,
                )  # fmt: skip
            if v.K > 1:
                y = kernels.pick(x, ids, v.softcap)
                kernels.pick_bwd(x, ids, y, v.softcap, y)
                kernels.slots(y, y, row.bool(), row, None, "jsd", "tail", 0.5)
            kernels.scale_rows_(x, row)
            kernels.mean_nll(ids.reshape(-1)[:2], row, -100, mean=True)
            if v.K == 1:
                kernels.visit(x, **reading | {"weight": None}, g_id=row)
            if v.K == 1 and not full:
                launch_pairs(x, v.softcap)
            if v == Variant(torch.bfloat16):
                launch_sums(x)
    return launches


def launch_pairs(x: torch.Tensor, softcap: float | None) -> None:
    """Every loss against a dense teacher, and JSD's long rows as a GPU shares them out."""
    how, stats, row = (None, None, None, 1.0, softcap, 0.5), torch.zeros(2, 5), torch.zeros(2)
    for kind in pair.KINDS:
        kernels.pair_fwd(x, x, *how, kind)
        kernels.pair_bwd(x, x, *how, kind, stats, row)
    with mock.patch.object(pair, "_parts", return_value=32):
        kernels.pair_fwd(x, x, *how, "jsd")


def launch_sums(dz: torch.Tensor) -> None:
    """A weight's gradient over three chunks."""
    h, total = torch.zeros(2, 512, dtype=dz.dtype), torch.zeros(dz.shape[1], 512, dtype=dz.dtype)
    exponents = kernels.exponents(total)
    for chunk in range(3):
        kernels.accumulate(dz, h, total, exponents, chunk == 0, chunk == 2)


def resources(ptx: str, arch: str) -> dict:
    """Registers and spilled bytes, from the assembler."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        report = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={arch}", str(source),
             "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill", report)
    assert registers is not None
    assert spills, report
    return {"registers": int(registers[1]), "spills": sum(map(int, spills))}


class Driver:
    """What kernels ask about the GPU they are compiled for."""

    def __init__(self, target: GPUTarget):
        self.get_current_target = lambda: target


def main(target: str) -> None:
    triton.runtime.driver.set_active(Driver(TARGETS[target]))
    for variant in variants():
        for source, options in launches_of(variant):
            kernel = triton.compile(source, target=TARGETS[target], options=options)
            row = {"target": target, "kernel": f"{source.name} {variant}"}
            if target == "cuda:90":
                row |= resources(kernel.asm["ptx"], "sm_90a")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
