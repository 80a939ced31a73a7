"""Compares what a student learns from stored targets of equal size: top-k, samples, whole logits.

    python -m benchmarks.teacher_choice --out FOLDER              on a CPU, in some minutes
    python -m benchmarks.teacher_choice --out FOLDER --large      on a GPU, with larger sizes

A teacher is trained on the text of `make demo`. Students of another width then learn from the
teacher's targets alone, by the forward KL divergence. All kinds of targets take the same number of
bytes in total. A slot takes an id of two bytes and a value of two bytes. A tail takes four bytes. A
whole row takes two bytes per token of the vocabulary, so whole rows exist for a few windows of the
text only. `sampled` draws tokens from the teacher, and its number of draws is chosen so that a row
has k distinct tokens on average. Two more students show the range: one student learns from the text
alone, and one student learns from the teacher's whole rows of all windows, at any size.

Each student is trained with several seeds, which choose its weights, its windows and its samples.
The table shows the mean over the seeds, and the standard deviation. The script writes
teacher-choice.md and teacher-choice.png.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import logitless as ll
from examples.demo import (
    Batch,
    Scale,
    Transformer,
    draw_batches,
    encode,
    read_sources,
    vocabulary,
)
from logitless.cli import machine
from logitless.cli.report import table

SLOT, TAIL, LOGIT = 4, 4, 2  # bytes
BINS = 15  # of the calibration error


class Sizes(NamedTuple):
    vocab: int
    chars: int
    teacher: Scale
    student: Scale
    teacher_steps: int
    steps: int
    windows: int  # batches of windows with targets
    ks: tuple[int, ...]
    held_out: int  # batches


SMALL = Sizes(
    vocab=4096, chars=2_000_000,
    teacher=Scale(batch=16, context=32, width=96, layers=2, lr=5e-3),
    student=Scale(batch=16, context=32, width=32, layers=1, lr=1e-2),
    teacher_steps=800, steps=240, windows=60, ks=(4, 16), held_out=40,
)  # fmt: skip
LARGE = Sizes(
    vocab=32_768, chars=12_000_000,
    teacher=Scale(batch=32, context=256, width=512, layers=6, lr=1e-3),
    student=Scale(batch=32, context=256, width=192, layers=2, lr=2e-3),
    teacher_steps=3000, steps=1500, windows=200, ks=(8, 32), held_out=30,
)  # fmt: skip


class Example(NamedTuple):
    """A batch of windows, and the teacher's targets or hidden states if there are any."""

    tokens: Tensor  # (batch, context)
    labels: Tensor  # (batch, context)
    targets: ll.SparseTargets | None = None
    hidden: Tensor | None = None  # (batch, context, width); whole rows are computed from these


class Metrics(NamedTuple):
    loss: float  # held-out cross-entropy, nats per token
    calibration: float  # expected calibration error of the most probable token
    agreement: float  # how often student and teacher have the same most probable token


# Targets


def sampled(logits: Tensor, n: int) -> ll.SparseTargets:
    """Distinct tokens of n draws per row, weighted by how often each token was drawn."""
    if hasattr(ll, "capture_sampled"):
        return ll.capture_sampled(logits, n)  # type: ignore
    rows = logits.flatten(0, -2).softmax(-1)
    drawn = rows.multinomial(n, replacement=True).sort(-1).values
    first = torch.ones_like(drawn, dtype=torch.bool)
    first[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    # Equal tokens are neighbours, so a token's count is the distance to the next different token.
    place = torch.arange(n, device=drawn.device)
    starts = torch.where(first, place, n)
    later = starts.flip(-1).cummin(-1).values.flip(-1)[:, 1:]
    counts = torch.nn.functional.pad(later, (0, 1), value=n) - place
    order = torch.sort(~first, dim=-1, stable=True).indices[:, : int(first.sum(-1).max())]
    weights = (counts / n).log()
    targets = ll.SparseTargets(
        drawn.gather(-1, order), weights.gather(-1, order), None, first.gather(-1, order)
    )
    return targets.reshape(*logits.shape[:-1])


def slots_of(targets: ll.SparseTargets) -> float:
    """The mean number of slots per row."""
    if targets.mask is None:
        return targets.k
    return targets.mask.sum(-1).double().mean().item()


def draws_for(k: int, logits: Tensor) -> int:
    """The number of draws whose number of distinct tokens is about k on average."""
    low, high = 1, 64 * k
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slots_of(sampled(logits, middle)) <= k else (low, middle)
    return low


class Study:
    """A teacher, its text, and the students that learn from it."""

    def __init__(self, sizes: Sizes, device: str):
        self.sizes, self.device = sizes, device
        text = read_sources(limit=sizes.chars)
        ids = encode(text, vocabulary(text, sizes.vocab))
        cut = len(ids) * 9 // 10
        self.text = ids[:cut]
        unseen = draw_batches(ids[cut:], sizes.teacher, device, 1)
        self.held_out = list(itertools.islice(unseen, sizes.held_out))
        self.teacher = self.model(sizes.teacher, 0)
        batches = draw_batches(self.text, sizes.teacher, device, 0)
        examples = (Example(*batch) for batch in batches)
        self.train(self.teacher, sizes.teacher, examples, sizes.teacher_steps, "text")
        self.teacher.requires_grad_(False)

    def model(self, scale: Scale, seed: int) -> Transformer:
        torch.manual_seed(seed)
        return Transformer(scale, self.sizes.vocab).to(self.device)

    def train(self, model, scale: Scale, examples: Iterator[Example], steps, kind) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), scale.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, scale.lr, total_steps=steps + 1)
        for example in itertools.islice(examples, steps):
            logits = ll.LinearLogits(model.hidden(example.tokens), model.head.weight)
            self.loss(logits, example, kind).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def loss(self, logits: ll.LinearLogits, example: Example, kind: str) -> Tensor:
        if kind == "text":
            return ll.cross_entropy(logits, example.labels)
        if example.hidden is not None:
            whole = ll.LinearLogits(example.hidden, self.teacher.head.weight)
            return ll.kl_div(logits, whole, direction="forward")
        # The weights of samples sum to 1, so `truncate` is the forward KL of the samples.
        support = {"top-k": "renorm_teacher", "top-k and tail": "tail", "sampled": "truncate"}[kind]
        how = {"divergence": "forward_kl", "support": support}
        return ll.topk_distill(logits, example.targets, **how)

    @torch.no_grad()
    def examples(self, kind: str, k: int, seed: int) -> tuple[list[Example], float]:
        """The windows with their targets, and the bytes of all targets."""
        batches = draw_batches(self.text, self.sizes.student, self.device, 100 + seed)
        windows: list[Batch] = list(itertools.islice(batches, self.sizes.windows))
        rows = len(windows) * windows[0][0].numel()
        budget = rows * SLOT * k
        if kind == "text":
            return [Example(*window) for window in windows], 0
        if kind.startswith("whole"):
            row = LOGIT * self.sizes.vocab
            tokens, labels = (torch.cat(t) for t in zip(*windows, strict=True))
            n = len(tokens) if k == 0 else max(1, round(budget / (row * tokens.shape[1])))
            size = self.sizes.student.batch
            parts = zip(tokens[:n].split(size), labels[:n].split(size), strict=True)
            found = [Example(t, t_next, None, self.teacher.hidden(t)) for t, t_next in parts]
            return found, n * tokens.shape[1] * row
        logits = [self.teacher.head(self.teacher.hidden(tokens)) for tokens, _ in windows[:2]]
        torch.manual_seed(1000 + seed)
        n = draws_for(k, torch.cat(logits)) if kind == "sampled" else 0
        found, size = [], 0.0
        for tokens, labels in windows:
            z = self.teacher.head(self.teacher.hidden(tokens))
            # A tail takes the bytes of one slot.
            slots = k - TAIL // SLOT if kind == "top-k and tail" else k
            targets = sampled(z, n) if kind == "sampled" else ll.capture_topk(z, slots)
            size += tokens.numel() * SLOT * slots_of(targets)
            size += tokens.numel() * TAIL * (kind == "top-k and tail")
            found.append(Example(tokens, labels, targets))
        return found, size

    @torch.no_grad()
    def measured(self, model: Transformer) -> Metrics:
        loss, sure, right, same = [], [], [], []
        for tokens, labels in self.held_out:
            logits = ll.LinearLogits(model.hidden(tokens), model.head.weight)
            loss.append(ll.cross_entropy(logits, labels))
            scores = ll.score(logits, labels)
            top = ll.token_logprobs(logits, scores.argmax)
            wanted = ll.LinearLogits(self.teacher.hidden(tokens), self.teacher.head.weight)
            same.append(scores.argmax == ll.score(wanted, labels).argmax)
            sure.append(top.exp())
            right.append(scores.argmax == labels)
        p, hit = torch.cat(sure).flatten(), torch.cat(right).flatten().float()
        bins = (p * BINS).long().clamp(max=BINS - 1)
        gap = torch.zeros(BINS, device=p.device).index_add_(0, bins, p - hit)
        agreement = torch.cat(same).float().mean().item()
        return Metrics(torch.stack(loss).mean().item(), gap.abs().sum().item() / len(p), agreement)

    def student(self, kind: str, k: int, seed: int) -> tuple[Metrics, float]:
        """Trains a student, and returns its metrics and the bytes of its targets."""
        found, size = self.examples(kind, k, seed)
        model = self.model(self.sizes.student, 10 + seed)
        examples = itertools.cycle(found)
        self.train(model, self.sizes.student, examples, self.sizes.steps, kind)
        return self.measured(model), size


# Results


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values: list[float]) -> str:
    return "{:.3f} ± {:.3f}".format(*mean_and_deviation(values))


def save_plot(results: dict[str, list[Metrics]], teacher: Metrics, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = ("held-out loss, nats per token", "calibration error", "agreement with the teacher")
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 0.35 * len(results) + 1.4), sharey=True)
    for axis, title, name in zip(axes, titles, Metrics._fields, strict=True):
        points = [mean_and_deviation([getattr(m, name) for m in ms]) for ms in results.values()]
        means, deviations = zip(*points, strict=True)
        axis.errorbar(means, range(len(results)), xerr=deviations, fmt="o", capsize=3)
        if name != "agreement":
            axis.axvline(getattr(teacher, name), color="gray", linestyle=":", label="teacher")
            axis.legend()
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(results)), list(results))
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--large", action="store_true", help="sizes for a GPU")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--steps", type=int, help="training steps of each student")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = LARGE if args.large else SMALL
    sizes = sizes if args.steps is None else sizes._replace(steps=args.steps)
    start = time.perf_counter()
    study = Study(sizes, device)
    kinds = [("text", 0), ("whole rows, all windows", 0)]
    for k in sizes.ks:
        kinds += [(kind, k) for kind in ("whole rows", "top-k", "top-k and tail", "sampled")]
    rows, results, teacher = [], {}, study.measured(study.teacher)
    rows.append({
        "targets": "the teacher itself", "k": "", "bytes per token": "",
        "held-out loss": f"{teacher.loss:.3f}", "calibration error": f"{teacher.calibration:.3f}",
        "agreement": "",
    })  # fmt: skip
    tokens = sizes.windows * sizes.student.batch * sizes.student.context
    for kind, k in kinds:
        runs = [study.student(kind, k, seed) for seed in range(args.seeds)]
        metrics = [m for m, _ in runs]
        size = statistics.mean(b for _, b in runs) / tokens
        name = f"{kind}, k = {k}" if k else kind
        results[name] = metrics
        row = {"targets": kind, "k": str(k or ""), "bytes per token": f"{size:,.0f}"}
        columns = ("held-out loss", "calibration error", "agreement")
        row |= {c: shown([m[i] for m in metrics]) for i, c in enumerate(columns)}
        rows.append(row)
        print(f"{time.perf_counter() - start:6.0f} s  {row}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = "`ll.capture_sampled`" if hasattr(ll, "capture_sampled") else "`torch.multinomial`"
    about = (
        f"{machine.device(device)['name']}, torch {torch.__version__}, commit {machine.commit()};"
        f" {args.seeds} seeds, mean ± standard deviation; samples by {drawn}.\n\n"
        f"Vocabulary {sizes.vocab:,}; teacher of width {sizes.teacher.width}, students of width"
        f" {sizes.student.width}; {tokens:,} tokens with targets; {sizes.steps} steps of"
        f" {sizes.student.batch} windows of {sizes.student.context} tokens. A row of whole logits"
        f" has {LOGIT * sizes.vocab:,} bytes, so at equal bytes only a few windows have targets."
    )
    title = "What a student learns from targets of equal size"
    picture = "![held-out loss, calibration error and agreement](teacher-choice.png)"
    content = "\n\n".join((f"# {title}", about, table(rows), picture)) + "\n"
    (args.out / "teacher-choice.md").write_text(content)
    save_plot(results, teacher, args.out / "teacher-choice.png")
    print(content)


if __name__ == "__main__":
    main()
