"""Compares heads of odd vocabularies, and small heads, with PyTorch and other libraries.

    python -m benchmarks.head_shapes --out benchmarks/results/h200      about five minutes on a GPU
    python -m benchmarks.head_shapes --only small

For an odd vocabulary, the script also measures the next multiple of 64, because aligned GEMMs are
the fastest. Small heads are measured in wall time, because the host takes longer than the GPU.
Every result is compared with fp64 before the timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench import clocks, contenders, runner
from benchmarks.bench.cases import COMPILED, EAGER, MIB, OURS, Case, Mode
from benchmarks.bench.results import Result
from logitless.cli import machine
from logitless.cli.report import table

ODD = (
    "8192×4096×128257", "16384×4096×32001", "8192×2048×151665", "32768×768×50257",
    "8192×2304×256001",
)  # fmt: skip
SMALL = (
    "64×64×1024", "512×768×50304", "512×768×50257", "2048×2048×32000", "1024×4096×50257",
    "8192×512×32768",
)  # fmt: skip
UNIT = 64
RIVALS = (EAGER, COMPILED, "liger", "cce")
BUDGET = 150.0  # milliseconds of timing per case and contender
GEMMS = {"cross_entropy": "3 GEMMs", "score": "4 GEMMs"}


def aligned(shape: str) -> str:
    """The same shape with the vocabulary rounded up to a multiple of UNIT."""
    *sizes, vocab = map(int, shape.split("×"))
    return "×".join(map(str, (*sizes, -(-vocab // UNIT) * UNIT)))


def odd_cases(shape: str, full: bool) -> Iterator[Case]:
    """Cases of an odd vocabulary and of the next multiple of UNIT."""
    variants = {"plain": ("cross_entropy", {})}
    if full:
        variants |= {
            "64 MiB": ("cross_entropy", {"workspace": 64 * MIB}),
            "per row": ("score", {}),
        }
    for variant, (op, options) in variants.items():
        for where in dict.fromkeys((shape, aligned(shape))):
            rivals = variant == "plain" and where == shape
            yield Case(
                "heads", op, Mode.BACKWARD, variant, options, shape=where, dtype="bf16",
                yardstick=GEMMS[op], alone=not rivals,
            )  # fmt: skip


def small_cases(shape: str) -> Iterator[Case]:
    """Cases of a small head: a mean, and results per row."""
    for op in GEMMS:
        yield Case("heads", op, Mode.WALL, "plain", {}, shape=shape, dtype="bf16")


def two_heads(shape: str, device: str) -> tuple[float, float]:
    """Returns the time of kl_div between two heads, in ms, and the largest error of some rows."""
    rows, width, vocab = map(int, shape.split("×"))
    torch.manual_seed(0)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    student = [normal(rows, width), normal(vocab, width) * (2 / width**0.5)]
    teacher = [normal(rows, width), normal(vocab, width) * (2 / width**0.5)]

    def leaves() -> list[Tensor]:
        return [t.detach().requires_grad_() for t in student]

    def run(leaves: list[Tensor], **options) -> Tensor:
        heads = ll.LinearLogits(*leaves), ll.LinearLogits(*teacher)
        return ll.kl_div(*heads, direction="forward", **options)

    q, p = ((h[:64].double() @ W.double().t()).log_softmax(-1) for h, W in (student, teacher))
    want = (p.exp() * (p - q)).sum(-1)
    got = run(student, reduction="none")[:64]
    ms = clocks.device_time(leaves, lambda leaves: run(leaves).backward(), BUDGET)
    return ms, float(((got - want) / want).abs().max())


def row(results: list[Result], neighbour: float | None) -> dict[str, str]:
    """One row of a table: our time, its ratio to the time of `neighbour`, and the rivals' times."""
    ours = next(r for r in results if r.contender == OURS)
    cells = {
        "rows × width × vocabulary": ours.shape,
        "case": ours.variant if ours.op == "cross_entropy" else f"{ours.op}, {ours.variant}",
        "ours, ms": "–" if ours.ms is None else f"{ours.ms:.3f}",
        "× the next multiple of 64": "",
        "MiB beyond gradients": "" if ours.spare_mib is None else f"{ours.spare_mib:.0f}",
        "error": "" if ours.grad_error is None else f"{ours.grad_error:.1e}",
    }
    if neighbour and ours.ms:
        cells["× the next multiple of 64"] = f"{ours.ms / neighbour:.3f}"
    for r in results:
        if r.contender != OURS:
            cells[f"{r.contender}, ms"] = f"{r.ms:.3f}" if r.ms else f"{r.status}: {r.note}"[:40]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the result files")
    parser.add_argument("--only", choices=("odd", "small"))
    parser.add_argument("--minutes", type=float, default=9.0, help="start no case after this time")
    parser.add_argument("--shape", action="append", help="measure this shape, on a CPU too")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="other libraries to measure")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.shape:
        sys.exit("This benchmark needs a GPU, or --shape with a small shape.")
    names = (OURS, *given.rivals.split(",")) if device == "cuda" else (OURS, EAGER)
    loaded, versions = contenders.load(names, device)
    cases = []
    if given.only != "odd":
        cases += [case for shape in given.shape or SMALL for case in small_cases(shape)]
    if given.only != "small":
        shapes = given.shape or ODD
        cases += [case for i, shape in enumerate(shapes) for case in odd_cases(shape, i == 0)]
    begin, found, done = time.monotonic(), [], {}
    for case in cases:
        if time.monotonic() - begin > 60 * given.minutes:
            print(f"not measured in {given.minutes} minutes: {case.name}")
            continue
        if device == "cpu":
            case = dataclasses.replace(case, mode=Mode.BACKWARD, yardstick="", compiled=False)
        results = runner.run_case(case, loaded, device, BUDGET)
        found.append(results)
        done[case.op, case.variant, case.mode, case.shape] = next(
            (r.ms for r in results if r.contender == OURS), None
        )
        print(case.name, {r.contender: r.ms for r in results}, flush=True)
    rows = []
    for results in found:
        first = results[0]
        other = aligned(first.shape)
        neighbour = (
            done.get((first.op, first.variant, first.mode, other)) if other != first.shape else None
        )
        rows.append(row(results, neighbour))
    if device == "cuda" and given.only != "small":
        shape = (given.shape or ODD)[0]
        (ms, error), (neighbour, _) = (two_heads(s, device) for s in (shape, aligned(shape)))
        cells = {"rows × width × vocabulary": shape, "case": "kl_div of two heads"}
        cells |= {"ours, ms": f"{ms:.3f}", "× the next multiple of 64": f"{ms / neighbour:.3f}"}
        rows.append(cells | {"error": f"{error:.1e}"})
    columns = list(dict.fromkeys(name for cells in rows for name in cells))
    text = "\n\n".join(
        (
            "# Heads of odd vocabularies, and small heads",
            f"{machine.device(device)['name']}, commit {machine.commit()}; "
            + ", ".join(f"{name} {version}" for name, version in versions.items()),
            table([{name: cells.get(name, "") for name in columns} for cells in rows]),
        )
    )
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "head-shapes.md").write_text(text + "\n")
        dumped = [dataclasses.asdict(r) for results in found for r in results]
        (given.out / "head-shapes.json").write_text(json.dumps(dumped, indent=1) + "\n")


if __name__ == "__main__":
    main()
