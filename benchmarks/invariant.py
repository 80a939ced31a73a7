"""Measures the cost of `ll.invariant()` on a GPU: times inside and outside of the block.

    python -m benchmarks.invariant [--tune]

The script first checks that results and gradients inside and outside of the block agree, and that
rows have the same bits in a smaller batch. Then the script measures three inputs in bf16:

- a head with 8192 rows, D = 4096 and V = 128,256
- a head with 16384 rows, D = 2048 and V = 128,256
- a tensor of logits (8192, 128256)

"mean" is forward and backward of a mean cross-entropy. "score" is `ll.score` without gradients.
"score, backward" is `ll.score` with the gradient of the hidden states or of the logits. At the end,
the script compares the GEMMs alone with cuBLAS. With --tune, the script instead measures other
tiles of the GEMM (ROW_GEMM in logitless/kernels/config.py). The output is Markdown.
"""

import argparse
import importlib
import itertools
import statistics
from unittest import mock

import torch
import triton

import logitless as ll
from logitless import kernels
from logitless.kernels import config

# `kernels.row_gemm` is the function of the same name.
row_gemm = importlib.import_module("logitless.kernels.gemms.row_gemm")

DEVICE, VOCAB = "cuda", 128256
HEADS = [(8192, 4096), (16384, 2048)]  # rows and D
LIMITS = {"head": 1.4, "logits": 1.1}
TILES = [
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 4), (128, 256, 32, 8, 4),
]  # fmt: skip
GROUPS = (8, 16, 32)


def milliseconds(*calls, reps: int = 7) -> list[float]:
    """Returns the median GPU time of each call. The calls alternate. Round 0 is not timed."""
    times: list[list[float]] = [[] for _ in calls]
    for rep in range(reps + 1):
        for f, own in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            f()
            end.record()
            end.synchronize()
            if rep:
                own.append(start.elapsed_time(end))
    return [statistics.median(own) for own in times]


def inside(f):
    def call():
        with ll.invariant():
            return f()

    return call


def head_of(rows: int, width: int):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB, width, device=DEVICE) * (2 / width**0.5)).bfloat16()
    return hidden, weight.requires_grad_(), torch.randint(VOCAB, (rows,), device=DEVICE)


def check(hidden, weight, target) -> None:
    """Raises if results differ by more than rounding, or if bits differ in a smaller batch."""
    h, some = hidden[:300].detach().requires_grad_(), slice(130, 160)

    def run(rows):
        scores = ll.score(ll.LinearLogits(h[rows], weight.detach()), target[:300][rows])
        (d,) = torch.autograd.grad(scores.logprob.sum(), h)
        return *scores[:3], d[rows]

    outside, (whole, part) = (
        run(slice(0, 300)),
        [inside(lambda r=r: run(r))() for r in (slice(0, 300), some)],
    )
    for a, b, c in zip(outside, whole, part, strict=True):
        error = (a.double() - b.double()).norm() / a.double().norm()
        assert error < 1e-2, f"a relative error of {error}"
        assert torch.equal(b[some], c), "a smaller batch has other bits"


def cases_of_head(hidden, weight, target):
    def mean():
        hidden.grad = weight.grad = None
        ll.cross_entropy(ll.LinearLogits(hidden, weight), target).backward()

    @torch.no_grad()
    def score():
        ll.score(ll.LinearLogits(hidden, weight), target)

    def score_backward():
        hidden.grad = None
        found = ll.score(ll.LinearLogits(hidden, weight.detach()), target)
        (found.logprob - 0.1 * found.entropy).sum().backward()

    return {"mean": mean, "score": score, "score, backward": score_backward}


def cases_of_logits(rows: int):
    logits = torch.randn(rows, VOCAB, device=DEVICE).bfloat16().requires_grad_()
    target = torch.randint(VOCAB, (rows,), device=DEVICE)

    def mean():
        logits.grad = None
        ll.cross_entropy(logits, target).backward()

    @torch.no_grad()
    def score():
        ll.score(logits, target)

    def score_backward():
        logits.grad = None
        found = ll.score(logits, target)
        (found.logprob - 0.1 * found.entropy).sum().backward()

    return {"mean": mean, "score": score, "score, backward": score_backward}


def report(kind: str, sizes: str, cases: dict) -> None:
    for name, f in cases.items():
        default, invariant = milliseconds(f, inside(f))
        ratio, limit = invariant / default, LIMITS[kind]
        verdict = "ok" if ratio <= limit else "MISSED"
        print(
            f"| {kind} {sizes} | {name} | {default:.2f} | {invariant:.2f} | {ratio:.2f} | {limit}"
            f" | {verdict} |",
            flush=True,
        )


def gemms(rows: int, width: int):
    """Yields (name, call of cuBLAS, call of row_gemm, FLOPs) for both GEMMs of a head."""
    h = torch.randn(rows, width, device=DEVICE).bfloat16()
    weight = torch.randn(VOCAB, width, device=DEVICE).bfloat16()
    dz = torch.empty(rows, VOCAB, device=DEVICE, dtype=torch.bfloat16)
    d = torch.empty_like(h)
    flops = 2.0 * rows * width * VOCAB
    yield (
        "logits", lambda: torch.mm(h, weight.t(), out=dz),
        lambda: kernels.row_gemm(h, weight, dz, None, True), flops,
    )  # fmt: skip
    yield (
        "d_hidden", lambda: torch.mm(dz, weight, out=d), lambda: kernels.row_gemm(dz, weight, d),
        flops,
    )  # fmt: skip


def compare_gemms() -> None:
    print("\n| GEMM | M, D, V | cuBLAS TFLOP/s | row_gemm TFLOP/s |\n|---|---|---|---|")
    for rows, width in ((4096, 4096), (4096, 2048)):
        for name, theirs, ours, flops in gemms(rows, width):
            a, b = (flops / ms / 1e9 for ms in milliseconds(theirs, ours, reps=5))
            print(f"| {name} | {rows}, {width}, {VOCAB} | {a:.0f} | {b:.0f} |", flush=True)


def tune() -> None:
    print("| tile, warps, stages | group | GEMM | M, D | TFLOP/s |\n|---|---|---|---|---|")
    for tile, group in itertools.product(TILES, GROUPS):
        for rows, width in ((4096, 4096), (4096, 2048)):
            with (
                mock.patch.dict(config.ROW_GEMM, {(2, True): tile}),
                mock.patch.object(row_gemm, "GROUP", group),
            ):
                for name, _, ours, flops in gemms(rows, width):
                    try:
                        (ms,) = milliseconds(ours, reps=3)
                    except (triton.runtime.errors.OutOfResources, triton.CompilationError) as error:
                        print(f"| {tile} | {group} | {name} | {rows}, {width} | {error} |")
                        break
                    rate = flops / ms / 1e9
                    print(
                        f"| {tile} | {group} | {name} | {rows}, {width} | {rate:.0f} |", flush=True
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try other tiles of the GEMM")
    tuning = parser.parse_args().tune
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if tuning:
        tune()
        return
    print("\n| logits | call | default ms | invariant ms | ratio | limit | |")
    print("|---|---|---|---|---|---|---|")
    for rows, width in HEADS:
        head = head_of(rows, width)
        check(*head)
        report("head", f"({rows}, {width}, {VOCAB})", cases_of_head(*head))
    report("logits", f"(8192, {VOCAB})", cases_of_logits(8192))
    compare_gemms()


if __name__ == "__main__":
    main()
