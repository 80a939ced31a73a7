"""Measures contrastive losses, beside PyTorch and beside their GEMMs, on a GPU.

    python -m benchmarks.contrastive [--rows 32768 65536] [--large 262144] [--out DIR]
    python -m benchmarks.contrastive --sweep        tile sizes of the kernels, instead of losses

Every contender's loss and gradients are first compared with fp64, at a small size. Then forward and
backward are timed in bf16 with embeddings of width 512, by CUDA events. The contenders take turns,
so that a change of the GPU's clock affects all of them. A row is the median of all turns.

"GEMMs" are the GEMMs of a loss alone: four for InfoNCE in both directions, three for the sigmoid
loss. Their similarities are computed in chunks of 1 GiB, as in our losses. InfoNCE computes the
similarities twice, but keeps the last chunk of the first pass for the second pass. "two heads" are
two calls of `ll.linear_cross_entropy`, one for each direction. A contender that does not fit into
the memory of the GPU has no time. The output is Markdown. With --out, the tables are written to
DIR/contrastive.md.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from logitless.cli import machine
from logitless.cli.report import short, table
from logitless.eager.contrastive import Block
from logitless.kernels import config, contrastive_gradient, contrastive_read, sigmoid_contrastive

WIDTH, SCALE, BIAS, CHECKED = 512, 20.0, -10.0, 1000
WORKSPACE, TURNS = 1 << 30, 9
BOUND = 3e-2  # allowed relative error, in the norm; d_scale is a sum of terms that cancel

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    z, pairs = scale.to(a.dtype) * a @ b.T, torch.arange(len(a), device=a.device)
    return (F.cross_entropy(z, pairs) + F.cross_entropy(z.T, pairs)) / 2


def plain_sigmoid(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    z = scale.to(a.dtype) * a @ b.T + BIAS
    y = 2 * torch.eye(len(a), device=a.device, dtype=a.dtype) - 1
    return -F.logsigmoid(y * z).sum() / len(a)


def two_heads(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    pairs = torch.arange(len(a), device=a.device)
    scale = scale.to(a.dtype)
    one, other = ((scale * x, y) for x, y in ((a, b), (b, a)))
    return (ll.linear_cross_entropy(*one, pairs) + ll.linear_cross_entropy(*other, pairs)) / 2


def ours(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return ll.contrastive(a, b, scale=scale)


def ours_sigmoid(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return ll.sigmoid_contrastive(a, b, scale=scale, bias=BIAS)


CONTENDERS: dict[str, dict[str, Loss]] = {
    "InfoNCE, both directions": {
        "logitless": ours,
        "two heads": two_heads,
        "eager": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
    },
    "sigmoid": {
        "logitless": ours_sigmoid,
        "eager": plain_sigmoid,
        "torch.compile": torch.compile(plain_sigmoid, dynamic=False),
    },
}
GEMMS = {"InfoNCE, both directions": 2, "sigmoid": 1}  # GEMMs of similarities
EXACT = {"InfoNCE, both directions": plain, "sigmoid": plain_sigmoid}


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    a, b = (torch.randn(rows, WIDTH, device="cuda") for _ in range(2))
    a, b = (F.normalize(t, dim=-1).bfloat16().requires_grad_() for t in (a, b + 0.3 * a))
    return a, b, torch.tensor(SCALE, device="cuda", requires_grad=True)


def errors_of(loss: Loss, exact: Loss) -> dict[str, float]:
    """Returns the relative errors of the loss and of each gradient against fp64."""
    leaves = inputs(CHECKED)
    found = loss(*leaves)
    got = (found, *torch.autograd.grad(found, leaves))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right = exact(*wide)
    truth = (right, *torch.autograd.grad(right, wide))
    pairs = zip(("loss", "d_a", "d_b", "d_scale"), got, truth, strict=True)
    return {name: ((x.double() - y).norm() / y.norm()).item() for name, x, y in pairs}


def gemms(a: Tensor, b: Tensor, products: int) -> None:
    """The GEMMs of a loss: `products` times the similarities, and the gradients of a and b."""
    a, b = a.detach(), b.detach()
    step = max(min(WORKSPACE // (2 * len(b)), len(a)), 1)
    x = torch.empty(step, len(b), device="cuda", dtype=a.dtype)
    d_a, d_b = torch.empty_like(a), torch.zeros_like(b)
    for start in range(0, len(a), step):
        rows = slice(start, min(start + step, len(a)))
        n = rows.stop - start
        for _ in range(products):
            torch.mm(a[rows], b.T, out=x[:n])
        torch.mm(x[:n], b, out=d_a[rows])
        torch.addmm(d_b, x[:n].T, a[rows], out=d_b)


def once(run: Callable[[], None]) -> float:
    """Milliseconds of one call, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def memory_of(run: Callable[[], None], leaves: tuple[Tensor, ...]) -> float:
    """Peak GiB of a call, beyond what was allocated before, and beyond the gradients."""
    for t in leaves:
        t.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    gradients = sum(t.grad.nbytes for t in leaves if t.grad is not None)
    return (torch.cuda.max_memory_allocated() - before - gradients) / 2**30


def measured(kind: str, rows: int, names: list[str]) -> list[dict[str, str]]:
    """One line per contender: the median time, the time relative to the GEMMs, and the memory."""
    leaves = inputs(rows)

    def step(loss: Loss) -> Callable[[], None]:
        def run() -> None:
            for t in leaves:
                t.grad = None
            loss(*leaves).backward()

        return run

    runs = {name: step(CONTENDERS[kind][name]) for name in names}
    runs["GEMMs"] = lambda: gemms(leaves[0], leaves[1], GEMMS[kind])
    memory, times = {}, {}
    for name, run in list(runs.items()):
        try:
            run()
            run()
            memory[name] = memory_of(run, leaves)
            times[name] = []
        except torch.OutOfMemoryError:
            del runs[name]
            times[name] = None
        torch.cuda.empty_cache()
    for _ in range(TURNS):
        for name, run in runs.items():
            run()  # the allocator's blocks of this contender are warm
            times[name].append(once(run))
    floor = statistics.median(times["GEMMs"])
    lines = []
    for name, found in times.items():
        ms = statistics.median(found) if found else None
        lines.append({
            "loss": kind, "rows": f"{rows:,}", "contender": name,
            "ms": "out of memory" if ms is None else f"{ms:.2f}",
            "relative to GEMMs": "" if ms is None else f"{ms / floor:.2f}",
            "GiB beyond the gradients": f"{memory[name]:.2f}" if name in memory else "",
        })  # fmt: skip
        print(*lines[-1].values(), sep=" | ", flush=True)
    return lines


def sweep() -> list[dict[str, str]]:
    """Times each kernel alone over one chunk of 16,384 × 32,768 similarities."""
    n, m = 16384, 32768
    x, scale = torch.randn(n, m, device="cuda", dtype=torch.bfloat16), torch.ones((), device="cuda")
    block, bias = Block(scale, diagonal=0), torch.full((), BIAS, device="cuda")
    rows, columns = (torch.zeros(size, 2, device="cuda") for size in (n, m))
    lse = [torch.tensor([[20.0, 0.0]], device="cuda").repeat(size, 1) for size in (n, m)]
    runs = {
        "contrastive_fwd": lambda: contrastive_read(x, block, rows, columns),
        "contrastive_bwd": lambda: contrastive_gradient(x, block, *lse, d_scale=True),
        "sigmoid_contrastive": lambda: sigmoid_contrastive(x, block, bias, True),
    }
    tiles = itertools.product((256, 512), (8, 16, 32, 64), (64, 512), (4, 8))
    lines = []
    for (name, run), tile in itertools.product(runs.items(), list(tiles)):
        fields = dict(zip(("block_v", "block_n", "span", "num_warps"), tile, strict=True))
        with config.override(**fields):
            try:
                run()
                ms = statistics.median(once(run) for _ in range(5))
            except Exception as error:  # Triton raises if a tile does not fit on the chip
                print(name, fields, short(error), flush=True)
                continue
        moved = x.nbytes * (1 if name == "contrastive_fwd" else 2)
        lines.append({
            "kernel": name, **{k: str(v) for k, v in fields.items()}, "ms": f"{ms:.3f}",
            "TB/s": f"{moved / ms / 1e9:.2f}",
        })  # fmt: skip
    lines.sort(key=lambda line: (line["kernel"], float(line["ms"])))
    return [line for _, some in itertools.groupby(lines, lambda line: line["kernel"])
            for line in itertools.islice(some, 8)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[32768, 65536])
    parser.add_argument("--large", type=int, default=262144, help="a size for our losses alone")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    args = parser.parse_args()
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    text = [f"{machine.device('cuda')['name']}; {versions}; bf16, width {WIDTH}"]
    if args.sweep:
        text.append(table(sweep()))
    else:
        errors = []
        for kind, losses in CONTENDERS.items():
            for name, loss in losses.items():
                found = errors_of(loss, EXACT[kind])
                line = {"kind": kind, "contender": name}
                errors.append(line | {key: f"{error:.1e}" for key, error in found.items()})
                assert name != "logitless" or max(found.values()) < BOUND, errors[-1]
        text += [f"Errors against fp64 with {CHECKED:,} pairs:", table(errors)]
        lines = []
        for kind, losses in CONTENDERS.items():
            for rows in args.rows:
                lines += measured(kind, rows, list(losses))
            if args.large:
                lines += measured(kind, args.large, ["logitless"])
        text += ["Forward and backward:", table(lines)]
    page = "\n\n".join(text) + "\n"
    print(f"\n{page}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "contrastive-sweep.md" if args.sweep else "contrastive.md"
        (args.out / name).write_text(page)


if __name__ == "__main__":
    main()
