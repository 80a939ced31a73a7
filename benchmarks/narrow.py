"""Checks the results of narrow heads on a GPU, tunes the tiles, and measures time and memory.

    python -m benchmarks.narrow [--minutes 4] [--rows 8192] [--skip-tuning]

The heads have the widths 64 and 128, and vocabularies of 32,768 to 1,048,576 classes
(10,000,000 classes for width 64 and 2,048 rows), in bf16. The script times forward and backward of
a mean. The table has one column each for this library on the chip, this library with logits in
memory, cut_cross_entropy and Liger (if installed), torch.compile, and three GEMMs of cuBLAS. The
best tiles of each kernel are printed as entries of NARROW in logitless/kernels/config.py. Before
the tuning, helper processes compile the kernels for all tiles. The output is Markdown.
"""

import argparse
import contextlib
import importlib
import itertools
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import logitless as ll
from benchmarks.bench import contenders
from logitless import kernels
from logitless.contract import Reading
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from logitless.kernels import config

DEVICE = "cuda"
WIDTHS, VOCABS = (64, 128), (32768, 1 << 18, 1 << 20)
LARGEST = (2048, 64, 10_000_000)
HELPERS = 12  # processes that compile at the same time
TUNED_VOCAB = 1 << 20  # so many classes that the time of the host does not matter
# (rows, columns, warps, stages, and a limit of registers) of tiles to try.
TILES = {
    "fwd": {
        64: [(128, 64, 4, 4), (128, 128, 8, 4), (128, 64, 8, 4), (64, 128, 4, 4)],
        128: [(128, 64, 8, 4), (64, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 4)],
    },
    "fwd_expected": {
        64: [(128, 64, 4, 4), (128, 64, 8, 4, 128), (128, 128, 8, 3), (128, 128, 8, 3, 128),
             (64, 64, 4, 4, 128), (64, 128, 4, 3), (128, 64, 4, 3)],
        128: [(128, 64, 8, 3), (128, 64, 8, 3, 128), (128, 128, 8, 2), (128, 64, 4, 3),
              (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 4)],
    },
    "d_hidden": {
        64: [(128, 64, 4, 4), (128, 64, 4, 2), (64, 64, 4, 4), (128, 32, 4, 4, 128)],
        128: [(128, 64, 4, 3), (128, 64, 8, 3, 128), (64, 32, 4, 4), (128, 32, 4, 3)],
    },
    "d_weight": {
        64: [(128, 64, 4, 2, 128), (128, 64, 4, 3), (128, 64, 4, 4), (64, 64, 4, 3)],
        128: [(128, 64, 4, 2), (64, 64, 4, 2), (256, 128, 8, 2), (64, 64, 4, 4)],
    },
}  # fmt: skip
SPLITS = (2, 4, 6, 8, 12, 16)  # splits of the vocabulary to try, with the best tile


def inputs(rows: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=DEVICE).bfloat16()
    weight = (torch.randn(vocab, width, device=DEVICE) / width**0.5).bfloat16()
    return hidden, weight, torch.randint(0, vocab, (rows,), device=DEVICE)


def milliseconds(f, reps: int = 7) -> float:
    """The median time of f on the GPU, after a call that compiles."""
    f()
    times = []
    for _ in range(reps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        if sum(times) > 1500:
            break
    return sorted(times)[len(times) // 2]


def on_chip(work) -> Cut:
    return Cut(work.rows, on_chip=work.narrow and work.merges)


def in_memory(work) -> Cut:
    return choose_cut.choose(work._replace(narrow=False), None, "cuda")


def step(hidden, weight, target, way) -> torch.Tensor:
    """Runs forward and backward of a mean. `way` chooses the Cut; None for the library's choice."""
    hidden.grad = weight.grad = None
    with contextlib.nullcontext() if way is None else choose_cut.override(way):
        loss = ll.cross_entropy(ll.LinearLogits(hidden, weight), target)
    loss.backward()
    return loss.detach()


def check(width: int) -> str:
    """Returns the errors of loss and gradients against fp64, for this library and for PyTorch."""
    hidden, weight, target = inputs(1000, width, 5003)
    target[::7] = -100
    found = {}
    for name, dtype in (("truth", torch.float64), ("PyTorch", torch.bfloat16), ("ours", None)):
        h, w = (t.to(dtype or t.dtype).requires_grad_() for t in (hidden.clone(), weight.clone()))
        if name == "ours":
            loss = step(h, w, target, on_chip)
        else:
            loss = F.cross_entropy(F.linear(h, w), target)
            loss.backward()
        found[name] = [t.detach().double() for t in (loss, h.grad, w.grad)]
    ours, theirs = (
        [((a - c).norm() / c.norm()).item() for a, c in zip(found[n], found["truth"], strict=True)]
        for n in ("ours", "PyTorch")
    )
    right = all(a <= 2 * b + 2e-3 for a, b in zip(ours, theirs, strict=True))
    texts = [f"{a:.1e} ({b:.1e})" for a, b in zip(ours, theirs, strict=True)]
    return f"| {width} | {' | '.join(texts)} | {'right' if right else 'WRONG'} |"


def kernel_call(kernel: str, hidden, weight, target):
    """Returns a function that launches one kernel, and the small kernels that it depends on."""
    reading = Reading(len(weight), label=target, ignore_index=-100, wants=("nll",))
    if kernel in ("fwd", "fwd_expected"):
        expects = kernel == "fwd_expected"
        return lambda: kernels.narrow_partial(hidden, weight, None, reading, expects)
    found = kernels.finish(kernels.narrow_partial(hidden, weight, None, reading)[0], reading)
    coefficients = kernels.label_coefficients(reading, torch.float32)
    share = torch.full((), 1 / len(hidden), device=DEVICE)
    d_hidden = torch.empty_like(hidden) if kernel == "d_hidden" else None
    d_weight = torch.empty_like(weight) if kernel == "d_weight" else None
    return lambda: kernels.narrow_gradients(
        hidden, weight, None, reading, found.state, coefficients, share, None, d_hidden, d_weight,
        None,
    )  # fmt: skip


def candidates(kernels: str) -> list[tuple[str, int, tuple[int, ...]]]:
    return [
        (kernel, width, tile)
        for kernel, by_width in TILES.items()
        if kernel in kernels.split(",")
        for width, tiles in by_width.items()
        for tile in tiles
    ]


def tried(kernel: str, width: int, tile, data, **more) -> float:
    """The time of a kernel with a tile; infinite if the tile does not fit."""
    rows, columns, warps, stages, *limit = tile
    how = {"block_n": rows, "block_v": columns, "num_warps": warps, "stages": stages}
    how |= {"registers": limit[0]} if limit else {}
    call = kernel_call(kernel, *data)
    try:
        with config.override(**how, **more):
            return milliseconds(call, 5)
    except Exception as error:  # too much shared memory, or a bug of the compiler
        print(f"<!-- {kernel} {width} {tile}: {type(error).__name__} -->")
        return float("inf")


def compile_part(tuned: str, part: int, of: int) -> None:
    """Compiles some of the candidates, on small inputs, into Triton's cache on disk."""
    for kernel, width, tile in candidates(tuned)[part::of]:
        tried(kernel, width, tile, inputs(256, width, 4096))


def compile_all(tuned: str) -> float:
    start, command = time.monotonic(), [sys.executable, "-m", "benchmarks.narrow"]
    command += ["--tuned", tuned, "--compile"]
    running = [
        subprocess.Popen([*command, f"{part}/{HELPERS}"], stdout=subprocess.DEVNULL)
        for part in range(HELPERS)
    ]
    for process in running:
        process.wait()
    return time.monotonic() - start


def tune(tuned: str, rows: int, until: float) -> None:
    """Prints the time of every tile, and puts the best tiles into config.NARROW."""
    print(f"\nTiles at {rows} rows and {TUNED_VOCAB} classes, ms per kernel; the best first.\n")
    print("| kernel | D | tiles (rows, columns, warps, stages) | splits |\n|---|---|---|---|")
    for width in WIDTHS:
        data = inputs(rows, width, TUNED_VOCAB)
        for kernel, by_width in TILES.items():
            if kernel not in tuned.split(","):
                continue
            if time.monotonic() > until:
                return
            times = {tile: tried(kernel, width, tile, data) for tile in by_width[width]}
            ranked = sorted(times, key=lambda tile: times[tile])
            best, by_splits = ranked[0], {}
            if kernel != "d_weight":
                by_splits = {s: tried(kernel, width, best, data, splits=s) for s in SPLITS}
            if times[best] < float("inf"):
                config.NARROW[kernel, 2][width] = best
                config.forget()
            texts = ", ".join(f"{tile} {times[tile]:.2f}" for tile in ranked)
            splits = ", ".join(f"{s}: {t:.2f}" for s, t in by_splits.items())
            print(f"| {kernel} | {width} | {texts} | {splits} |", flush=True)
    print(f"\n```\nNARROW = {config.NARROW}\n```")


def gemms(hidden, weight) -> float:
    """The time of three GEMMs, over chunks of rows whose logits take 2 GiB."""
    rows = max(min(len(hidden), (2 << 30) // (2 * len(weight)) // 8 * 8), 8)
    h, share = hidden[:rows], len(hidden) / rows
    z = torch.empty(rows, len(weight), device=DEVICE, dtype=hidden.dtype)
    dw, dh = torch.empty_like(weight), torch.empty_like(h)

    def three():
        torch.mm(h, weight.T, out=z)
        torch.mm(z, weight, out=dh)
        torch.mm(z.T, h, out=dw)

    return milliseconds(three) * share


def rivals() -> dict:
    """Returns a dict from names to functions of (hidden, weight, target) that return a mean."""
    found = {}
    for name in ("cce", "liger"):
        module, ops = contenders.RIVALS[name]
        with contextlib.suppress(ImportError):
            found[name] = ops(importlib.import_module(module))["heads: cross_entropy"]
    compiled = torch.compile(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), dynamic=False)
    return found | {"compile": compiled}


def extra_memory(f, gradients: int) -> float:
    """The peak MiB that f allocates, without the gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return (torch.cuda.max_memory_allocated() - before - gradients) / 2**20


def measure(shape: tuple[int, int, int], others: dict, until: float) -> str:
    """Returns one row of the table."""
    rows, width, vocab = shape
    hidden, weight, target = inputs(rows, width, vocab)
    hidden.requires_grad_()
    weight.requires_grad_()
    gradients = 2 * (hidden.numel() + weight.numel())

    def ours(way):
        return lambda: step(hidden, weight, target, way)

    def theirs(f):
        hidden.grad = weight.grad = None
        f(hidden, weight, target).backward()

    cells = []
    for way in (None, on_chip, in_memory):
        ms = milliseconds(ours(way))
        hidden.grad = weight.grad = None
        cells.append(f"{ms:.2f} ({extra_memory(ours(way), gradients):.0f})")
    hidden.grad = weight.grad = None
    for name, f in others.items():
        too_large = name == "compile" and 6 * rows * vocab > 100 << 30
        if too_large or time.monotonic() > until:
            cells.append("–")
            continue
        try:
            cells.append(f"{milliseconds(lambda f=f: theirs(f)):.2f}")
        except Exception as error:
            cells.append(type(error).__name__)
    hidden.grad = weight.grad = None
    with torch.no_grad():
        cells.append(f"{gemms(hidden, weight):.2f}")
    way = ll.LinearLogits(hidden, weight).explain().way
    return f"| {rows} × {width} × {vocab} | {' | '.join(cells)} | {way} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="time limit of the whole run")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--skip-tuning", action="store_true")
    parser.add_argument("--alone", action="store_true", help="leave out the other libraries")
    parser.add_argument("--tuned", default=",".join(TILES), help="kernels to tune")
    parser.add_argument("--compile", metavar="PART/OF", help="used by the helper processes")
    options = parser.parse_args()
    if options.compile:
        compile_part(options.tuned, *map(int, options.compile.split("/")))
        return
    until = time.monotonic() + 60 * options.minutes - 15
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"config of logitless {ll.__version__}\n")  # fmt: skip
    print("Relative errors against fp64, ours (PyTorch's own).\n")
    print("| D | loss | d_hidden | d_weight | |\n|---|---|---|---|---|")
    for width in WIDTHS:
        print(check(width), flush=True)
    if not options.skip_tuning:
        print(f"\nHelper processes compiled in {compile_all(options.tuned):.0f} s.", flush=True)
        tune(options.tuned, options.rows, until - 60)
    others = {} if options.alone else rivals()
    print("\nForward and backward of a mean, ms (MiB beyond the gradients).\n")
    names = ["ours", "on the chip", "in memory", *others, "3 GEMMs", "way of ours"]
    print(f"| N × D × V | {' | '.join(names)} |\n|---|{'---|' * len(names)}", flush=True)
    shapes = [LARGEST, *((options.rows, d, v) for v, d in itertools.product(VOCABS[::-1], WIDTHS))]
    for shape in shapes:
        if time.monotonic() > until:
            print("\nThe time is up.")
            break
        print(measure(shape, others, until), flush=True)


if __name__ == "__main__":
    main()
