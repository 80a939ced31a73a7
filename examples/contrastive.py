"""Trains two towers as CLIP does, with the loss in plain PyTorch and with `ll.contrastive`.

    python examples/contrastive.py

The script needs neither a network nor a GPU. The script generates the data. Each pair of an image
and a text has a random topic vector. The image is a linear map of the topic plus noise. The text is
a list of words, which are drawn from a softmax over another linear map of the topic. The towers
learn to find the text of an image among all texts of a batch. Both runs start from the same weights
and use the same batches. The script prints the time, the memory of the loss, the last loss, and the
recall of both runs.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import logitless as ll
from demo.memory import extra_memory

TOPIC, PIXELS, WORDS, LENGTH, WIDTH = 16, 128, 512, 12, 64


class Towers(nn.Module):
    """Embeds images and texts. All embeddings have norm 1."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        self.words = nn.EmbeddingBag(WORDS, 128)
        self.text = nn.Sequential(nn.ReLU(), nn.Linear(128, WIDTH))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.image(images), self.text(self.words(texts))
        return F.normalize(a, dim=-1), F.normalize(b, dim=-1)


class Data:
    """Images (n, PIXELS) and texts (n, LENGTH) of the same random topics."""

    def __init__(self, device: str):
        random = torch.Generator().manual_seed(0)
        self.camera = torch.randn(TOPIC, PIXELS, generator=random).to(device)
        self.meanings = torch.randn(TOPIC, WORDS, generator=random).to(device)
        self.device = device

    def batch(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator(self.device).manual_seed(seed)
        topics = torch.randn(n, TOPIC, generator=random, device=self.device)
        images = topics @ self.camera
        images += torch.randn(n, PIXELS, generator=random, device=self.device)
        chances = (1.5 * topics @ self.meanings).softmax(-1)
        return images, torch.multinomial(chances, LENGTH, True, generator=random)


def plain_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Computes the loss of CLIP from materialised logits."""
    logits, pairs = scale * a @ b.T, torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def our_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return ll.contrastive(a, b, scale=scale)


def recall(model: Towers, data: Data) -> float:
    """Returns the share of 1,000 new images whose text is among the 10 nearest of 1,000 texts."""
    with torch.no_grad():
        a, b = model(*data.batch(1000, seed=10**6))
    found = ll.capture_topk(ll.LinearLogits(a, b), 10).ids
    return float((found == torch.arange(1000, device=a.device)[:, None]).any(-1).float().mean())


def train(loss: Callable, data: Data, pairs: int, steps: int) -> tuple[float, float, float, float]:
    """Returns seconds, MB of the loss, the last loss, and the recall."""
    torch.manual_seed(0)
    model, log_scale = Towers().to(data.device), torch.tensor(2.0, device=data.device)
    log_scale.requires_grad_()
    optimizer = torch.optim.AdamW([*model.parameters(), log_scale], lr=3e-3)
    value, start = torch.zeros(()), time.perf_counter()
    for step in range(steps):
        a, b = model(*data.batch(pairs, step))
        value = loss(a, b, log_scale.exp())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        with torch.no_grad():
            log_scale.clamp_(max=4.6)  # as in CLIP, the scale is at most 100
    last = float(value.detach())  # on a GPU, this line waits for all steps
    seconds = time.perf_counter() - start
    a, b = (t.detach().requires_grad_() for t in model(*data.batch(pairs, 0)))
    scale = log_scale.detach().exp()
    memory = extra_memory(data.device, None, lambda _: loss(a, b, scale).backward())
    return seconds, memory / 1e6, last, recall(model, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2048, help="pairs per batch")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Data(device)
    print(f"{args.steps} batches of {args.pairs:,} pairs on a {device} device")
    for name, loss in (("plain", plain_loss), ("logitless", our_loss)):
        seconds, memory, last, found = train(loss, data, args.pairs, args.steps)
        print(
            f"{name:>9}  {seconds:6.1f} s  {memory:8.1f} MB in the loss  "
            f"last loss {last:.4f}  recall at 10 {found:.3f}"
        )


if __name__ == "__main__":
    main()
