"""Checks and measures the losses and metrics of a recommender with a large catalogue, on a GPU.

    python -m benchmarks.recommender [--rivals .peers] [--out DIR] [--minutes 8]

The tables have the mean of the full softmax over all items, the sampled softmax with shared
negatives and with negatives per row, and the rank of the target, in bf16. A full or sampled softmax
is forward and backward. "gathered" is the same sampled softmax in plain PyTorch, which gathers the
rows of the table. Before the timing, the results of logitless and of the gathered formula are
compared with fp64 on a small shape, and a wrong result ends the script. The contenders of a row run
by turns, timed by CUDA events. The memory is the peak beyond the gradients. The output is Markdown.
With --out, the output is also written to DIR/recommender.md. Without a GPU, --trial runs small
shapes on a CPU, with the clock of the host, to try the script.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from benchmarks.bench import contenders
from logitless.cli import machine
from logitless.cli.report import short, table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = ((25_600, 128, 1 << 20), (4_096, 64, 10_000_000))
SAMPLED = (25_600, 128, 1 << 20)
SHARED, PER_ROW = 8_192, 512  # numbers of negatives
RANKED = ((4_096, None, 1 << 20), (25_600, 128, 1 << 20))  # logits in memory, and a head
TRIAL = 100  # a trial divides rows and items by this number
FITS = 100 << 30  # bytes that torch.compile may need
ROUNDS, LONGEST = 7, 12.0  # turns per contender; no new turn begins after LONGEST seconds

Step = Callable[[], object]


class Written:
    """Prints lines, and keeps them for a file."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, *lines: str) -> None:
        self.lines += lines
        print(*lines, sep="\n", flush=True)


def inputs(rows: int, width: int, items: int, dtype=torch.bfloat16) -> tuple[Tensor, ...]:
    """Returns hidden, table and target. The first two require gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=DEVICE).to(dtype)
    weight = (torch.randn(items, width, device=DEVICE) / width**0.5).to(dtype)
    target = torch.randint(0, items, (rows,), device=DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def sample(rows: int, items: int, shared: bool, count: int) -> tuple[Tensor, Tensor]:
    """Returns negatives and their log_q, for a uniform sampler."""
    shape = (count,) if shared else (rows, count)
    negatives = torch.randint(0, items, shape, device=DEVICE)
    return negatives, torch.full(shape, count / items, device=DEVICE).log()


def gathered(
    hidden: Tensor, weight: Tensor, target: Tensor, negatives: Tensor, log_q: Tensor
) -> Tensor:
    """The mean of the sampled softmax in plain PyTorch, with all scores in memory."""
    own = (hidden * weight[target]).sum(-1, keepdim=True)
    if negatives.dim() == 1:
        others = hidden @ weight[negatives].T
    else:
        others = torch.einsum("nd,nkd->nk", hidden, weight[negatives])
    others = (others - log_q).masked_fill(negatives == target.unsqueeze(-1), -torch.inf)
    scores = torch.cat((own.to(others.dtype), others), -1)
    return F.cross_entropy(scores, torch.zeros_like(target))


# --- clocks


def once(step: Step) -> float:
    """Milliseconds of one call."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def gradient_bytes(leaves: tuple[Tensor, ...]) -> int:
    total = 0
    for leaf in leaves:
        if leaf.grad is None:
            continue
        sparse = leaf.grad.is_sparse
        parts = (leaf.grad._values(), leaf.grad._indices()) if sparse else (leaf.grad,)
        total += sum(t.nbytes for t in parts)
    return total


def memory_of(step: Step, leaves: tuple[Tensor, ...]) -> float:
    """Peak MiB of one call, beyond the gradients of the leaves; 0 without a GPU."""
    for leaf in leaves:
        leaf.grad = None
    if DEVICE == "cpu":
        step()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - gradient_bytes(leaves)
    return peak / 2**20


def measured(steps: dict[str, Step | None], leaves: tuple[Tensor, ...]) -> dict[str, str]:
    """Returns "ms (MiB)" of each contender. The contenders run by turns."""
    cells, running = dict.fromkeys(steps, "–"), {}
    for name, step in steps.items():
        if step is None:
            continue
        try:
            step()  # compiles
            cells[name] = f"{memory_of(step, leaves):,.0f}"
            running[name] = step
        except Exception as error:  # a rival can raise anything, and memory can run out
            cells[name] = short(error)[:60]
    times: dict[str, list[float]] = {name: [] for name in running}
    until = time.monotonic() + LONGEST
    for turn in range(ROUNDS):
        if turn and time.monotonic() > until:
            break
        for name, step in running.items():
            for leaf in leaves:
                leaf.grad = None
            times[name].append(once(step))
    for leaf in leaves:
        leaf.grad = None
    return cells | {n: f"{statistics.median(t):.2f} ({cells[n]})" for n, t in times.items()}


# --- answers


def error(got: Tensor, want: Tensor) -> float:
    return ((got.detach().double() - want.double()).norm() / want.double().norm()).item()


def losses_of(name: str, target: Tensor, items: int, count: int) -> dict[str, Callable]:
    """Returns the losses of "truth", "PyTorch" and "ours", as functions of hidden and table."""
    if name == "full softmax":
        plain = lambda h, w: F.cross_entropy(h @ w.T, target)  # noqa: E731
        ours = lambda h, w: ll.linear_cross_entropy(h, w, target)  # noqa: E731
    else:
        negatives, log_q = sample(len(target), items, name == "shared negatives", count)
        plain = lambda h, w: gathered(h, w, target, negatives, log_q)  # noqa: E731
        ours = lambda h, w: ll.sampled_softmax(h, w, target, negatives, log_q=log_q)  # noqa: E731
    return {"truth": plain, "PyTorch": plain, "ours": ours}


def errors_of(name: str, rows: int, width: int, items: int, count: int) -> tuple[list, list]:
    """Returns the errors of loss, d_hidden and d_table against fp64, ours and PyTorch's."""
    hidden, weight, target = inputs(rows, width, items)
    found = {}
    for who, loss_of in losses_of(name, target, items, count).items():
        dtype = torch.float64 if who == "truth" else torch.bfloat16
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        loss = loss_of(*leaves)
        found[who] = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    ours, theirs = (
        [error(a, b) for a, b in zip(found[who], found["truth"], strict=True)]
        for who in ("ours", "PyTorch")
    )
    return ours, theirs


def check(write: Written) -> bool:
    """Compares losses, gradients and ranks with fp64. Returns whether all results are right."""
    shape, count, columns = (257, 64, 1009), 100, ("loss", "d_hidden", "d_table")
    lines, right = [], True
    for name in ("full softmax", "shared negatives", "negatives per row"):
        ours, theirs = errors_of(name, *shape, count)
        good = all(a <= 2 * b + 4e-3 for a, b in zip(ours, theirs, strict=True))
        right &= good
        cells = [f"{a:.1e} ({b:.1e})" for a, b in zip(ours, theirs, strict=True)]
        line = {"": name, **dict(zip(columns, cells, strict=True))}
        lines.append(line | {" ": "right" if good else "WRONG"})
    hidden, weight, target = inputs(*shape)
    z = (hidden @ weight.T).detach()
    want = (z > z.gather(1, target[:, None])).sum(1)
    good = torch.equal(ll.row_stats(z, target, rank=True).rank, want)
    right &= good
    lines.append({"": "rank", **dict.fromkeys(columns, ""), " ": "right" if good else "WRONG"})
    write("Relative errors against fp64, ours (PyTorch's own in bf16).\n", table(lines))
    return right


# --- tables


def rivals(path: str | None) -> dict[str, Callable]:
    if path:
        sys.path.append(path)
    found = {}
    try:
        module, ops = contenders.RIVALS["cce"]
        found["CCE"] = ops(importlib.import_module(module))["heads: cross_entropy"]
    except Exception as problem:  # an import can raise any error
        print(f"<!-- CCE: {short(problem)} -->")
    return found


def full_softmax(shape: tuple[int, int, int], others: dict[str, Callable]) -> dict[str, str]:
    rows, _, items = shape
    hidden, weight, target = inputs(*shape)
    compiled = torch.compile(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), dynamic=False)
    losses = {"ours": ll.linear_cross_entropy, **others}
    if 6 * rows * items <= FITS:
        losses["torch.compile"] = compiled
    steps: dict[str, Step | None] = {
        name: lambda loss=loss: loss(hidden, weight, target).backward()
        for name, loss in losses.items()
    }
    cells = measured({"torch.compile": None, **steps}, (hidden, weight))
    order = ("ours", *others, "torch.compile")
    return {"rows × D × items": named(shape)} | {name: cells[name] for name in order}


def sampled(shape: tuple[int, int, int], shared: bool, count: int) -> dict[str, str]:
    rows, _, items = shape
    hidden, weight, target = inputs(*shape)
    negatives, log_q = sample(rows, items, shared, count)

    def ours(sparse: bool) -> None:
        ll.sampled_softmax(
            hidden, weight, target, negatives, log_q=log_q, sparse_grad=sparse
        ).backward()

    cells = measured(
        {
            "ours": lambda: ours(False),
            "ours, sparse gradient": lambda: ours(True),
            "gathered": lambda: gathered(hidden, weight, target, negatives, log_q).backward(),
        },
        (hidden, weight),
    )
    kind = "shared" if shared else "per row"
    return {"rows × D × items": named(shape), "negatives": f"{count:,} {kind}", **cells}


@torch.no_grad()
def ranks(shape: tuple[int, int | None, int]) -> dict[str, str]:
    rows, width, items = shape
    if width is None:
        source = torch.randn(rows, items, device=DEVICE, dtype=torch.bfloat16)
        target = torch.randint(0, items, (rows,), device=DEVICE)
    else:
        hidden, weight, target = inputs(rows, width, items)
        source = ll.LinearLogits(hidden, weight)
    cells = measured(
        {
            "log p": lambda: ll.token_logprobs(source, target),
            "log p and argmax": lambda: ll.row_stats(source, target, argmax=True),
            "log p and rank": lambda: ll.row_stats(source, target, rank=True),
            "log p, argmax and rank": lambda: ll.row_stats(source, target, argmax=True, rank=True),
        },
        (),
    )
    what = "logits in memory" if width is None else "head"
    return {"rows × D × items": named(shape), "source": what, **cells}


def named(shape: tuple) -> str:
    return " × ".join(f"{n:,}" for n in shape if n is not None)


def smaller(shape: tuple) -> tuple:
    rows, width, items = shape
    return max(rows // TRIAL, 8), width, max(items // TRIAL, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rivals", help="a folder with other libraries, such as .peers")
    parser.add_argument("--out", type=Path, help="a folder for recommender.md")
    parser.add_argument("--minutes", type=float, default=8.0, help="no table begins after this")
    parser.add_argument("--trial", action="store_true", help="small shapes, on any device")
    args = parser.parse_args()
    if DEVICE == "cpu" and not args.trial:
        raise SystemExit("benchmarks.recommender must have a GPU, or the option --trial")
    until, write = time.monotonic() + 60 * args.minutes, Written()
    size = smaller if args.trial else tuple
    negatives = (SHARED // TRIAL, PER_ROW // TRIAL) if args.trial else (SHARED, PER_ROW)
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    write(f"{machine.device(DEVICE)['name']}; {versions}; bf16\n")
    right, others = check(write), rivals(args.rivals)
    pieces = {
        "Full softmax, forward and backward of a mean": [
            lambda shape=shape: full_softmax(size(shape), others) for shape in FULL
        ],
        "Sampled softmax, forward and backward of a mean": [
            lambda: sampled(size(SAMPLED), True, negatives[0]),
            lambda: sampled(size(SAMPLED), False, negatives[1]),
        ],
        "Statistics of the target, without gradients": [
            lambda shape=shape: ranks(size(shape)) for shape in RANKED
        ],
    }
    for title, rows in pieces.items() if right else ():
        lines = []
        for row in rows:
            if time.monotonic() > until:
                break
            lines.append(row())
            print(f"<!-- {lines[-1]} -->", flush=True)
        if lines:
            write(f"\n{title}, ms (MiB beyond the gradients).\n", table(lines))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "recommender.md").write_text("\n".join(write.lines) + "\n")
    if not right:
        raise SystemExit("a result is wrong")


if __name__ == "__main__":
    main()
