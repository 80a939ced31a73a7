"""Trains a small SASRec over 100,000 items, with the full softmax and with the sampled softmax.

    python examples/recommender.py

The sequences are synthetic. Each user has one of 20 genres, and clicks only items of this genre.
Some items of a genre are much more popular than others. So a model must infer the genre from the
history, and learn which items of the genre are popular. Two models start with the same weights. One
model is trained with `ll.linear_cross_entropy` over all items. The other model is trained with
`ll.sampled_softmax`, with shared negatives and the logQ correction. For held-out users, the script
computes recall@10 and NDCG@10 from the rank of the clicked item among all items. "memory" is the
peak memory that one loss and its gradients allocate.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import logitless as ll
from demo.memory import extra_memory

GENRES = 20
LENGTH = 12  # clicks per user


class SASRec(nn.Module):
    """A causal transformer over the clicks of a user. The input and output tables are the same."""

    def __init__(self, items: int, width: int):
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        for table in (self.items, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, clicks: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        T, device = clicks.shape[1], clicks.device
        later = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
        x = self.items(clicks) * self.items.embedding_dim**0.5
        x = x + self.places(torch.arange(T, device=device))
        return self.norm(self.block(x, src_mask=later))


class Clicks:
    """Draws users. The item with popularity rank r in genre g is item r · GENRES + g."""

    def __init__(self, items: int, device: str, seed: int):
        self.generator, self.device = torch.Generator().manual_seed(seed), device
        share = torch.arange(1, items // GENRES + 1, dtype=torch.float64) ** -1.3
        self.share = share / share.sum()  # the probability of each item of a genre
        self.q = (self.share / GENRES).repeat_interleave(GENRES)  # the probability of each item

    def draw(self, users: int) -> tuple[Tensor, Tensor]:
        """Returns the clicks (users, LENGTH) and the next click of each position."""
        size, g = users * (LENGTH + 1), self.generator
        rank = torch.multinomial(self.share, size, True, generator=g).view(users, LENGTH + 1)
        genre = torch.randint(GENRES, (users, 1), generator=g)
        clicks = (rank * GENRES + genre).to(self.device)
        return clicks[:, :-1], clicks[:, 1:]

    def negatives(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns items drawn by popularity, and the log of their expected numbers of draws."""
        drawn = torch.multinomial(self.q, count, True, generator=self.generator)
        return drawn.to(self.device), (count * self.q).log()[drawn].to(self.device)


Loss = Callable[[Tensor, Tensor, Tensor, Clicks], Tensor]  # hidden, table, next clicks, data


def full(hidden: Tensor, table: Tensor, clicked: Tensor, data: Clicks) -> Tensor:
    return ll.linear_cross_entropy(hidden, table, clicked)


def sampled(count: int) -> Loss:
    def loss(hidden: Tensor, table: Tensor, clicked: Tensor, data: Clicks) -> Tensor:
        negatives, log_q = data.negatives(count)
        return ll.sampled_softmax(hidden, table, clicked, negatives, log_q=log_q)

    return loss


def train(model: SASRec, loss_of: Loss, data: Clicks, steps: int, users: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        clicks, clicked = data.draw(users)
        loss_of(model(clicks), model.items.weight, clicked, data).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def metrics(model: SASRec, data: Clicks, users: int) -> tuple[float, float]:
    """Returns NDCG@10 and recall@10 of the last click of new users, among all items."""
    clicks, clicked = data.draw(users)
    scores = ll.LinearLogits(model(clicks)[:, -1], model.items.weight)
    rank = ll.row_stats(scores, clicked[:, -1], rank=True).rank
    gain = (1 / torch.log2(2 + rank.float())).where(rank < 10, 0.0)
    return gain.mean().item(), (rank < 10).float().mean().item()


def memory_of(model: SASRec, loss_of: Loss, data: Clicks, users: int, device: str) -> float:
    """Returns the peak memory in MiB that one loss and its gradients allocate."""
    clicks, clicked = data.draw(users)
    hidden = model(clicks).detach().requires_grad_()
    table = model.items.weight.detach().requires_grad_()

    def step(hidden: Tensor) -> None:
        loss_of(hidden, table, clicked, data).backward()

    return extra_memory(device, hidden, step) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, what in (
        ("--steps", 60, "training steps of each model"),
        ("--items", 100_000, "items of the catalogue, a multiple of 20"),
        ("--negatives", 1024, "shared negatives of the sampled softmax"),
        ("--users", 16, "users per step"),
        ("--seed", 0, "seed of weights and sequences"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{what}; default: {default:,}")
    args = parser.parse_args()
    for name in ("steps", "items", "negatives", "users"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.items % GENRES:
        raise SystemExit(f"--items must be a multiple of {GENRES}, got {args.items}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = args.users * LENGTH
    print(f"{rows:,} rows × {args.items:,} items: the scores of a step take", end=" ")
    print(f"{rows * args.items * 4 / 2**20:,.0f} MiB\n", flush=True)
    print("| loss | NDCG@10 | recall@10 | memory, MiB | seconds |")
    print("|---|---|---|---|---|", flush=True)
    losses = {"full softmax": full, f"{args.negatives:,} negatives": sampled(args.negatives)}
    for name, loss_of in {"untrained": full, **losses}.items():
        torch.manual_seed(args.seed)
        model = SASRec(args.items, 32).to(device)
        data = Clicks(args.items, device, args.seed)
        start = time.perf_counter()
        if name != "untrained":
            train(model, loss_of, data, args.steps, args.users)
        seconds = time.perf_counter() - start
        ndcg, recall = metrics(model, Clicks(args.items, device, args.seed + 1), 512)
        memory = memory_of(model, loss_of, data, args.users, device)
        print(f"| {name} | {ndcg:.3f} | {recall:.3f} | {memory:,.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
