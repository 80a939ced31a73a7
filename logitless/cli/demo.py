"""`logitless demo`: one small transformer, trained twice, alike in everything but its loss.

Two learners start from one seed and see the same batches; one uses PyTorch's cross-entropy, the
other ours. They take turns step by step, so whatever slows the machine down slows both alike. What
is left between their curves is the rounding of the two losses.

The text is one that every Python brings along: the sources of its own standard library.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll
from logitless.cli import chosen_device, require
from logitless.cli._memory import extra_memory

VOCAB = 32_768
UNKNOWN = 0
TOKEN = re.compile(
    r" ?\w+| ?[^\w\s]+|\n\s*|\s+"
)  # a word or symbol with its space; a line's indent
NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
MAX_CHARS = 12_000_000

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # tokens and the tokens that follow them, (batch, context) each


class Scale(NamedTuple):
    """How large a model and a batch the device trains in a minute or so."""

    batch: int
    context: int
    width: int
    layers: int
    lr: float
    loss_rows: int  # of logits, where the memory of the loss alone is measured


SCALES = {
    "cpu": Scale(batch=4, context=32, width=64, layers=2, lr=3e-3, loss_rows=1024),
    "cuda": Scale(batch=16, context=256, width=384, layers=4, lr=5e-4, loss_rows=8192),
}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small model with PyTorch's loss and with ours: same curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--device", choices=tuple(SCALES), help="default: a GPU where there is one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("logitless-demo.png"), help="the plot")


def run(args: argparse.Namespace) -> None:
    require("demo", "rich", "matplotlib")
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    device = chosen_device(args.device)
    scale = SCALES[device]
    args.out.parent.mkdir(parents=True, exist_ok=True)

    ids = encode(read_sources(MAX_CHARS))
    learners = [
        Learner("PyTorch", F.cross_entropy, scale, device, args.seed),
        Learner("logitless", ll.cross_entropy, scale, device, args.seed),
    ]
    memory = [loss_memory(learner.loss, scale.loss_rows, device) for learner in learners]
    train_with_progress(learners, draw_batches(ids, scale, device, args.seed), args.steps)
    show_table(learners, memory, scale, device)
    save_plot(learners, args.out)
    print(f"plot: {args.out}")


# Text


def read_sources(limit: int) -> str:
    """The standard library's own sources, in the order of their paths, up to `limit` characters."""
    root = Path(sysconfig.get_path("stdlib"))
    pieces, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if NOT_SOURCES.isdisjoint(path.relative_to(root).parts) and size < limit:
            pieces.append(path.read_text(encoding="utf-8", errors="ignore"))
            size += len(pieces[-1])
    return "".join(pieces)[:limit]


def encode(text: str) -> Tensor:
    """Token ids of a text, (T,), in a vocabulary of its own most frequent tokens and UNKNOWN."""
    tokens = TOKEN.findall(text)
    frequent = Counter(tokens).most_common(VOCAB - 1)
    index = {token: i for i, (token, _) in enumerate(frequent, start=UNKNOWN + 1)}
    return torch.tensor([index.get(token, UNKNOWN) for token in tokens])


def draw_batches(ids: Tensor, scale: Scale, device: str, seed: int) -> Iterator[Batch]:
    """Windows at random places of the text, without end."""
    random = torch.Generator().manual_seed(seed)
    window = torch.arange(scale.context + 1)
    while True:
        start = torch.randint(len(ids) - scale.context, (scale.batch, 1), generator=random)
        drawn = ids[start + window].to(device)  # (batch, context + 1)
        yield drawn[:, :-1], drawn[:, 1:]


# Model


class Transformer(nn.Module):
    """A causal decoder whose head is its embedding."""

    def __init__(self, scale: Scale):
        super().__init__()
        self.token = nn.Embedding(VOCAB, scale.width)
        self.place = nn.Parameter(0.2 * torch.randn(scale.context, scale.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                scale.width,
                nhead=scale.width // 32,
                dim_feedforward=4 * scale.width,
                dropout=0.0,
                activation=F.gelu,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(scale.layers)
        )
        self.norm = nn.LayerNorm(scale.width)
        # Unit variance to begin with, of the logits and (by `gain`) of the inputs. In a model less
        # well conditioned training is chaotic: it amplifies rounding until the curves part.
        self.gain = scale.width**0.5
        nn.init.normal_(self.token.weight, std=1 / self.gain)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, context) to hidden states (batch, context, width)."""
        context = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(context, device=tokens.device)
        x = self.gain * self.token(tokens) + self.place[:context]
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, context) to logits (batch, context, VOCAB)."""
        return F.linear(self.hidden(tokens), self.token.weight)


class Learner:
    """A model, its loss, and the record of its training."""

    def __init__(self, name: str, loss: Loss, scale: Scale, device: str, seed: int):
        torch.manual_seed(seed)
        self.name, self.loss = name, loss
        self.model = Transformer(scale).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), scale.lr, fused=True)
        self.curve: list[float] = []
        self.seconds = 0.0

    def loss_of(self, tokens: Tensor, target: Tensor) -> Tensor:
        logits = self.model(tokens)
        return self.loss(logits.flatten(0, 1), target.flatten())

    def step(self, batch: Batch) -> None:
        start = time.perf_counter()
        loss = self.loss_of(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.curve.append(loss.item())  # waits for the device, so the clock sees all of the step
        self.seconds += time.perf_counter() - start


def train(learners: list[Learner], batches: Iterator[Batch], steps: int) -> Iterator[int]:
    """Each learner takes each step; yields the number of steps done."""
    for done, batch in zip(range(1, steps + 1), batches, strict=False):
        for learner in learners:
            learner.step(batch)
        yield done


def largest_difference(learners: list[Learner]) -> float:
    theirs, ours = learners
    return max(abs(a - b) for a, b in zip(theirs.curve, ours.curve, strict=True))


def loss_memory(loss: Loss, rows: int, device: str) -> int:
    """Most bytes alive at once, beyond the logits, during the loss's forward and backward."""
    logits = torch.randn(rows, VOCAB, device=device, requires_grad=True)
    target = torch.randint(VOCAB, (rows,), device=device)
    return extra_memory(device, logits, lambda z: loss(z, target).backward())


# What is shown


def train_with_progress(learners: list[Learner], batches: Iterator[Batch], steps: int) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=steps)
        for done in train(learners, batches, steps):
            losses = "  ".join(f"{learner.name} {learner.curve[-1]:.4f}" for learner in learners)
            progress.update(bar, completed=done, description=losses)


def show_table(learners: list[Learner], memory: list[int], scale: Scale, device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    tokens = scale.batch * scale.context
    table = Table("", title=f"{len(learners[0].curve)} steps of {tokens:,} tokens on {device}")
    for learner in learners:
        table.add_column(learner.name, justify="right")
    table.add_row("final loss", *(f"{learner.curve[-1]:.6f}" for learner in learners))
    table.add_row("largest difference of the curves", "", f"{largest_difference(learners):.1e}")
    table.add_row("training time", *(f"{learner.seconds:.1f} s" for learner in learners))
    table.add_row(
        f"peak memory of the loss, beyond its\nlogits of {scale.loss_rows:,} × {VOCAB:,} fp32",
        *(f"{bytes_ / 2**20:,.1f} MiB" for bytes_ in memory),
    )
    Console().print(table)


def save_plot(learners: list[Learner], out: Path) -> None:
    """Both curves above, their difference below."""
    from matplotlib.figure import Figure

    theirs, ours = learners
    steps = range(1, len(ours.curve) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(steps, theirs.curve, color="0.7", linewidth=4, label=theirs.name)
    above.plot(steps, ours.curve, color="C0", linewidth=1, label=ours.name)
    above.set(ylabel="cross-entropy, nats a token", title="One model, one seed, two losses")
    above.legend()
    below.plot(steps, [b - a for a, b in zip(theirs.curve, ours.curve, strict=True)], color="C3")
    below.set(xlabel="step", ylabel=f"{ours.name} - {theirs.name}")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figure.savefig(out, format="png", dpi=150)
