"""Distils a small student from the 32 most probable tokens of a larger teacher.

    python examples/distill.py

A teacher is trained on the sources of Python's standard library, as in `make demo`. The script
captures the teacher's 32 most probable tokens on a few windows of this text, with their
log-probabilities and the mass of all other tokens. The teacher itself is not needed afterwards. Two
students with the same initial weights are then trained on these windows. One student learns from
the text alone, and the other student from the text and the captured targets. The three models are
compared by their loss on held-out text.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import logitless as ll
from demo import Batch, Scale, Transformer, draw_batches, encode, read_sources

K = 32
TEACHER = Scale(batch=4, context=32, width=64, layers=2, lr=4e-3)
STUDENT = TEACHER._replace(width=32, layers=1, lr=1e-2)

Example = tuple[Tensor, Tensor, ll.SparseTargets]  # tokens, next tokens, the teacher's targets


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Splits tokens into training text and held-out text.

    The held-out text is every tenth piece of 1,024 tokens.
    """
    pieces = ids[: len(ids) // 1024 * 1024].view(-1, 1024)
    held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def train(
    name: str, model: Transformer, lr: float, batches: Iterable, steps: int, loss_of: Callable
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    start = time.perf_counter()
    for step, (tokens, *rest) in enumerate(itertools.islice(batches, steps), start=1):
        loss = loss_of(model(tokens), *rest)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(steps // 5, 1) == 0:
            seconds = time.perf_counter() - start
            print(f"{name:>24}  step {step:4}  loss {loss:.3f}  {seconds:5.1f} s", flush=True)


@torch.no_grad()
def capture(teacher: Transformer, batches: Iterable[Batch], temperature: float) -> list[Example]:
    """Adds the teacher's targets to each batch: 32 of 32,768 tokens per position, and the tail."""
    return [
        (tokens, labels, ll.capture_topk(teacher(tokens), K, temperature=temperature))
        for tokens, labels in batches
    ]


@torch.no_grad()
def held_out_loss(model: Transformer, batches: list[Batch]) -> float:
    losses = [ll.cross_entropy(model(tokens), labels) for tokens, labels in batches]
    return torch.stack(losses).mean().item()


def seeded(scale: Scale, device: str, seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(scale).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="training steps of each student; default: 200"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="default: 1, which is better here than 1.5 and 2",
    )
    args = parser.parse_args()
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def from_text(logits: Tensor, labels: Tensor, targets: ll.SparseTargets | None = None):
        return ll.cross_entropy(logits, labels)

    def from_teacher(logits: Tensor, labels: Tensor, targets: ll.SparseTargets):
        """0.2 · cross-entropy + 0.8 · KL divergence over the top K and one bucket for the rest."""
        return ll.topk_distill(
            logits, targets, divergence="forward_kl", support="tail",
            temperature=args.temperature, t_squared=True,
            labels=labels, ce_weight=0.2, kd_weight=0.8,
        )  # fmt: skip

    text, unseen = split(encode(read_sources(limit=4_000_000)))
    held_out = list(itertools.islice(draw_batches(unseen, TEACHER, device, args.seed + 1), 32))

    teacher = seeded(TEACHER, device, args.seed)
    batches = draw_batches(text, TEACHER, device, args.seed)
    train("teacher", teacher, TEACHER.lr, batches, 2 * args.steps, from_text)
    results = {"teacher": held_out_loss(teacher, held_out)}

    windows = itertools.islice(
        draw_batches(text, STUDENT, device, args.seed + 2), max(args.steps // 4, 1)
    )
    examples = capture(teacher, windows, args.temperature)
    for name, loss_of in (("student", from_text), ("student with the teacher", from_teacher)):
        student = seeded(STUDENT, device, args.seed)
        train(name, student, STUDENT.lr, itertools.cycle(examples), args.steps, loss_of)
        results[name] = held_out_loss(student, held_out)

    print("\nheld-out loss, nats per token")
    for name, loss in results.items():
        print(f"{name:>24}  {loss:.4f}")


if __name__ == "__main__":
    main()
