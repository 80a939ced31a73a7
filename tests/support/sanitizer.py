"""Every kernel under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory.

    make sanitize                    on a GPU, with the CUDA toolkit
    make sanitize PY=python3         with an interpreter that has PyTorch already

The work is what `logitless doctor` checks, forward and backward, at two small shapes in bf16 and in
fp32. It runs three times: plain, in processes side by side, so that every kernel is compiled before
a tool watches; under memcheck, each tensor in an allocation of its own so that its ends are seen;
and under racecheck. The tools look at our kernels alone. That they do is seen first, from a kernel
that writes out of bounds. Exit status 1 if anything is found, is not run, or takes too long.
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

from logitless.cli.selfcheck import CHECKS, Check
from tests.support.launches import every_kernel, launched

SHAPES = ((5, 48), (1, 16411))  # a row in one part, and a row in several
DTYPES = (torch.bfloat16, torch.float32)
SIDE_BY_SIDE = 8
LIMIT = 1800  # seconds for each tool, which ends a hang
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TOOLS = {"memcheck": (NO_CACHE, ("--padding", "512")), "racecheck": ({}, ())}
# Under racecheck cuBLAS itself fails in some products of 16 bits: these checks, in fp32 alone.
IN_FP32 = ("linear_cross_entropy, columns", "linear_cross_entropy, fp32", "fuse", "lazy_logits")
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards\b)")


@triton.jit
def logitless_beyond(X, N):
    """One element past the end."""
    tl.store(X + N, 1.0)


def go_beyond() -> None:
    x = torch.zeros(1000, device="cuda")
    logitless_beyond[(1,)](x, x.numel())
    torch.cuda.synchronize()


def run_once(check: Check, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Forward and backward, on inputs made by the CPU."""
    generator = torch.Generator().manual_seed(shape[1])
    x, other = (torch.randn(shape, generator=generator).to("cuda", dtype) for _ in range(2))
    ids = torch.randint(shape[1], shape[:1], generator=generator).cuda()
    found = check.ours(x.requires_grad_(), ids, other)
    if check.differentiable:
        torch.autograd.grad(found, x, torch.ones_like(found))
    torch.cuda.synchronize()


def work(part: int, of: int, in_fp32: Sequence[str] = ()) -> set[str]:
    """Do a part of the checks, say what is done as it is done, and name the kernels launched."""
    with launched() as names:
        for check in CHECKS[part::of]:
            start = time.perf_counter()
            for dtype in DTYPES[1:] if check.name in in_fp32 else DTYPES:
                for shape in SHAPES:
                    run_once(check, shape, dtype)
            print(f"  {check.name:<32}{time.perf_counter() - start:6.1f} s", flush=True)
    return names


def work_whole(*in_fp32: str) -> int:
    names = work(0, 1, in_fp32)
    missing = sorted(every_kernel() - names)
    print(f"kernels launched: {len(names)}; not launched: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.support.sanitizer", *map(str, arguments)]


def compile_all() -> None:
    """The work without a tool, in processes that compile side by side."""
    start = time.perf_counter()
    running = [
        subprocess.Popen(command("part", i, SIDE_BY_SIDE), stdout=subprocess.DEVNULL)
        for i in range(SIDE_BY_SIDE)
    ]
    codes = [process.wait() for process in running]
    print(f"plain: exit codes {codes}, {time.perf_counter() - start:.0f} s\n", flush=True)


def watch(tool: str, *what: str) -> tuple[bool, str]:
    """Whether the command ended well under the tool, and what both said."""
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
        os.killpg(process.pid, signal.SIGKILL)  # what it watches holds the pipe open too
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
