"""Measures `ll.tvd` beside `ll.jsd`, and `ll.slot_loss` beside `ll.topk_distill`, on a GPU.

    python -m benchmarks.teacher_ratios --out FOLDER

The logits of student and teacher have 8,192 rows and V = 128,256 in bf16, and a sparse teacher has
K = 64 ids per row. The formula of `ll.slot_loss` is the forward KL with a tail. Before the timing,
the script compares `ll.slot_loss` with `ll.topk_distill`, and `ll.tvd` with its definition in fp64.
All calls are forward and backward, in device time without the host. The targets are 1.15 for
`ll.tvd` and 1.3 for `ll.slot_loss`. The script prints a Markdown table, and writes
teacher-ratios.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.clocks import device_time, wall_times
from logitless.cli import machine
from logitless.cli.report import table

CHECKED = 64  # rows of the comparison with definitions
READS = 20  # about 5 ms; on a slow host, queueing `ll.slot_loss` takes longer than its kernels


def forward_kl(slots: ll.SlotProbs) -> Tensor:
    """The forward KL over the slots and the tail."""
    inside = (slots.teacher.exp() * (slots.teacher - slots.student)).sum(-1)
    assert slots.student_tail is not None
    assert slots.teacher_tail is not None
    return inside + slots.teacher_tail.exp() * (slots.teacher_tail - slots.student_tail)


def check(student: Tensor, teacher: Tensor, k: int) -> None:
    """Raises if a loss of a few rows is wrong."""
    x, y = student[:CHECKED], teacher[:CHECKED]
    exact = (x.double().softmax(-1) - y.double().softmax(-1)).abs().sum(-1) / 2
    torch.testing.assert_close(ll.tvd(x, y, reduction="none").double(), exact, rtol=1e-4, atol=1e-5)
    targets = ll.capture_topk(y, k)
    found = ll.slot_loss(forward_kl, x, targets, tail=True, reduction="none")
    want = ll.topk_distill(x, targets, divergence="forward_kl", support="tail", reduction="none")
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--budget", type=float, default=300.0, help="milliseconds per call")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    size = (args.rows, args.vocab)
    student, teacher = (torch.randn(size, device=device).bfloat16() for _ in range(2))
    check(student, teacher, args.k)
    targets = ll.capture_topk(teacher, args.k)
    student.requires_grad_()

    def time(loss: Callable[[], Tensor]) -> float:
        def run(_: None) -> None:
            student.grad = None
            loss().backward()

        if device == "cuda":
            return device_time(lambda: None, run, args.budget, READS)
        return wall_times(device, [(lambda: None, run)], args.budget)[0]

    def sparse() -> Tensor:
        return ll.topk_distill(student, targets, divergence="forward_kl", support="tail")

    calls = {
        "ll.jsd": (lambda: ll.jsd(student, teacher), "ll.jsd"),
        "ll.tvd": (lambda: ll.tvd(student, teacher), "ll.jsd"),
        "ll.topk_distill": (sparse, "ll.topk_distill"),
        "ll.slot_loss": (
            lambda: ll.slot_loss(forward_kl, student, targets, tail=True), "ll.topk_distill",
        ),
    }  # fmt: skip
    times, rows = {}, []
    for name, (loss, other) in calls.items():
        times[name] = time(loss)
        ratio = times[name] / times[other]
        cells = {"call": name, "time": f"{times[name]:.3f} ms"}
        rows.append(cells | {"relative to": other, "ratio": f"{ratio:.3f}"})
    about = (
        f"{machine.device(device)['name']}, torch {torch.__version__}, commit {machine.commit()}"
    )
    text = f"# Teachers, relative to each other\n\n{about}; forward and backward of {args.rows:,} ×"
    text += f" {args.vocab:,} logits in bf16, K = {args.k}.\n\n{table(rows)}\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "teacher-ratios.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
