"""Curves of on-policy distillation beside distillation on text, for the models of the example.

    python -m benchmarks.on_policy --out FOLDER

The models and the text are those of examples/on_policy.py. Students with the same initial weights
are trained in three ways: on text alone, by the forward KL from the teacher on text, and by the
reverse KL from the teacher on the student's own samples. During the training, the script measures
the teacher's log-probability of completions that the student samples. The prompts of these
completions are held-out text. The script also measures the student's loss on held-out text. The
script writes on-policy.md and on-policy.png, with mean and standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from logitless.cli import machine
from logitless.cli.report import table

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # examples import `demo`
from examples.on_policy import (
    NEW,
    PROMPT,
    corpus,
    generation,
    llama,
    teacher_logprob,
    train_on_text,
    windows,
)

WAYS = {
    "text": "text alone",
    "off": "forward KL on text",
    "on": "reverse KL on own samples",
}


def batch_of(way: str, student, tokens: Tensor, seed: int) -> dict[str, Tensor]:
    """A window of the text, or the student's completion of the beginning of this window."""
    if way == "on":
        prompts = {"input_ids": tokens[:, :PROMPT]}
        return ll.hf.sample(student, prompts, generation_config=generation(), seed=seed)
    labels = tokens.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def loss_of(way: str, student, teacher, batch: dict[str, Tensor]) -> Tensor:
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits, labels = student(**given).logits[:, :-1], batch["labels"][:, 1:]
    if way == "text":
        return ll.cross_entropy(logits, labels)
    with torch.no_grad(), ll.lazy_logits():
        wanted = teacher(**given).logits[:, :-1]
    direction = "reverse" if way == "on" else "forward"
    return ll.kl_div(logits, wanted, direction=direction, mask=labels != -100)


@torch.no_grad()
def held_out_loss(student, batches: list[Tensor]) -> float:
    losses = [ll.cross_entropy(student(t).logits[:, :-1], t[:, 1:]) for t in batches]
    return torch.stack(losses).mean().item()


def curves(way: str, student, teacher, data: dict, steps: int, seed: int) -> list[tuple]:
    """(step, teacher's log-probability of own samples, held-out loss), during the training."""
    learner = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(learner.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    found, every = [], max(steps // 5, 1)
    tokens = windows(data["text"], PROMPT + NEW, 50 + seed, str(learner.device))
    for step, window in enumerate(itertools.islice(tokens, steps + 1)):
        if step % every == 0 or step == steps:
            own = teacher_logprob(learner, teacher, data["prompts"])
            found.append((step, own, held_out_loss(learner, data["unseen"])))
        if step < steps:
            batch = batch_of(way, learner, window, 1000 * seed + step)
            loss_of(way, learner, teacher, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return found


def summary(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def save_plot(results: dict[str, list[list[tuple]]], own: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = (
        "the teacher's log-probability of own samples, nats per token",
        "loss on held-out text, nats per token",
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6))
    for column, (axis, title) in enumerate(zip(axes, titles, strict=True), start=1):
        for way, runs in results.items():
            steps = [point[0] for point in runs[0]]
            points = [summary([run[i][column] for run in runs]) for i in range(len(steps))]
            means, deviations = zip(*points, strict=True)
            axis.errorbar(steps, means, yerr=deviations, capsize=3, marker="o", label=WAYS[way])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].axhline(own, color="gray", linestyle=":", label="the teacher's own samples")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--steps", type=int, default=80, help="default: 80")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, unseen, ends = corpus(2_000_000)
    teacher = llama(64, 2, 1, ends, device)
    train_on_text(teacher, text, 400, 5e-3, 0)
    teacher.requires_grad_(False).eval()
    data = {
        "text": text,
        "prompts": torch.cat([*itertools.islice(windows(unseen, PROMPT, 9, device), 8)]),
        "unseen": [*itertools.islice(windows(unseen, PROMPT + NEW, 10, device), 16)],
    }
    own = teacher_logprob(teacher, teacher, data["prompts"])
    results: dict[str, list[list[tuple]]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        student = llama(32, 1, seed, ends, device)
        train_on_text(student, text[: len(text) // 10], 160, 5e-3, seed + 1)
        for way, runs in results.items():
            runs.append(curves(way, student, teacher, data, args.steps, seed))
            print(seed, way, runs[-1][0], runs[-1][-1], flush=True)

    rows = []
    for i, (step, *_) in enumerate(results["on"][0]):
        row = {"step": str(step)}
        for column, what in ((1, "own samples"), (2, "held-out loss")):
            for way, runs in results.items():
                shown = "{:.3f} ± {:.3f}".format(*summary([run[i][column] for run in runs]))
                row[f"{what}: {WAYS[way]}"] = shown
        rows.append(row)
    about = (
        f"{machine.device(device)['name']}, torch {torch.__version__}, commit {machine.commit()};"
        f" {args.seeds} seeds, mean ± standard deviation.\n\n"
        "`own samples` is the teacher's log-probability of completions that the student samples, in"
        f" nats per token. For the teacher's own samples, this log-probability is {own:.3f}."
        " `held-out loss` is the student's loss on held-out text, in nats per token."
    )
    picture = "![curves of both measures](on-policy.png)"
    content = "\n\n".join(("# On-policy distillation", about, table(rows), picture)) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "on-policy.md").write_text(content)
    save_plot(results, own, args.out / "on-policy.png")
    print(content)


if __name__ == "__main__":
    main()
