"""Runs every kernel under NVIDIA's compute-sanitizer, to find bad accesses and data races.

    make sanitize                    on a GPU, with the CUDA toolkit
    make sanitize PY=python3         with an interpreter that already has PyTorch

The command runs the calls of kernel_calls.py, forward and backward, at two small shapes in bf16 and
fp32. The calls run three times:

- The first run uses no tool. Several processes compile all kernels at the same time.

- The second run uses memcheck. Each tensor has its own allocation, so that memcheck sees accesses
  beyond the end of a tensor.

- The third run uses racecheck.

The tools check only kernels of this library. A kernel that writes out of bounds first tests that
memcheck works. The exit status is 1 if a tool finds an error, a kernel is not launched, or a run
takes too long.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tests.support import kernel_calls
from tests.support.launches import every_kernel, launched

SHAPES = ((5, 48), (1, 16411))  # rows with one split, and rows with several splits
DTYPES = (torch.bfloat16, torch.float32)
SIDE_BY_SIDE = 8
LIMIT = 1800  # seconds per tool, to end a hang
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TOOLS = {"memcheck": (NO_CACHE, ("--padding", "512")), "racecheck": ({}, ())}
# These calls run only in fp32, because cuBLAS fails under racecheck in some 16-bit GEMMs.
IN_FP32 = (
    "head",
    "head by columns",
    "head, fp32 logits",
    "fuse",
    "lazy_logits",
    "contrastive",
    "sigmoid_contrastive",
)
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards\b)")


@triton.jit
def logitless_beyond(X, N):
    """Writes one element past the end of X."""
    tl.store(X + N, 1.0)


def go_beyond() -> None:
    x = torch.zeros(1000, device="cuda")
    logitless_beyond[(1,)](x, x.numel())
    torch.cuda.synchronize()


def work(part: int, of: int, in_fp32: Sequence[str] = ()) -> set[str]:
    """Runs a part of the calls, prints their times, and returns the names of launched kernels."""
    with launched() as names:
        for name in [*kernel_calls.CALLS][part::of]:
            start = time.perf_counter()
            for dtype in DTYPES[1:] if name in in_fp32 else DTYPES:
                for shape in SHAPES:
                    kernel_calls.run(name, kernel_calls.make(*shape, dtype))
                    torch.cuda.synchronize()
            print(f"  {name:<32}{time.perf_counter() - start:6.1f} s", flush=True)
    return names


def work_whole(*in_fp32: str) -> int:
    names = work(0, 1, in_fp32)
    missing = sorted(every_kernel() - names)
    print(f"kernels launched: {len(names)}; not launched: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.support.sanitizer", *map(str, arguments)]


def compile_all() -> None:
    """Runs the calls without a tool, in several processes, to compile all kernels."""
    start = time.perf_counter()
    running = [
        subprocess.Popen(command("part", i, SIDE_BY_SIDE), stdout=subprocess.DEVNULL)
        for i in range(SIDE_BY_SIDE)
    ]
    codes = [process.wait() for process in running]
    print(f"plain: exit codes {codes}, {time.perf_counter() - start:.0f} s\n", flush=True)


def watch(tool: str, *what: str) -> tuple[bool, str]:
    """Whether the command succeeded under the tool, and the output of both."""
    environment, own = TOOLS[tool]
    ours = ["--kernel-name", "kernel_substring=logitless_"]  # see kernels/profiling.py
    options = ["--target-processes", "application-only", "--report-api-errors", "no", *ours]
    start = time.perf_counter()
    process = subprocess.Popen(
        ["compute-sanitizer", "--tool", tool, *own, *options, *command(*what)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the watched process keeps the pipe open too
        said = process.communicate()[0] + f"stopped after {LIMIT} s\n"
    print(f"{tool}, {what[0]}: {time.perf_counter() - start:.0f} s\n{said}", flush=True)
    return process.returncode == 0, said


def main() -> int:
    print("torch.cuda.is_available():", torch.cuda.is_available())
    os.environ["PATH"] += f"{os.pathsep}/usr/local/cuda/bin"
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        sys.exit("make sanitize must have a GPU and compute-sanitizer in PATH: one is missing.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    compile_all()
    _, said = watch("memcheck", "beyond")
    right = "Invalid __global__ write" in said
    for tool, in_fp32 in (("memcheck", ()), ("racecheck", IN_FP32)):
        ended, said = watch(tool, "work", *in_fp32)
        right &= ended and CLEAN.search(said) is not None
    print("all clean" if right else "NOT CLEAN: see above")
    return 0 if right else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["part", part, of]:
            work(int(part), int(of))
        case ["work", *in_fp32]:
            sys.exit(work_whole(*in_fp32))
        case ["beyond"]:
            go_beyond()
        case _:
            sys.exit(main())
