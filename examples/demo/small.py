"""The text of the demo, and a transformer that is small enough to train on any machine.

The text is the source code of Python's standard library.
"""

from __future__ import annotations

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

from .progress import bar

VOCAB = 32_768
UNKNOWN = 0
# A token is a word, several symbols, or whitespace. Words and symbols include one leading space.
TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\n\s*|\s+")
NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
MAX_CHARS = 12_000_000

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # tokens and next tokens, each of shape (batch, context)


class Scale(NamedTuple):
    """Sizes of a model and its batches. With the sizes in SCALES, training takes about a minute."""

    batch: int
    context: int
    width: int
    layers: int
    lr: float


SCALES = {
    "cpu": Scale(batch=4, context=32, width=64, layers=2, lr=3e-3),
    "cuda": Scale(batch=16, context=256, width=384, layers=4, lr=5e-4),
}


# Text


def read_sources(limit: int) -> str:
    """Returns the first `limit` characters of the standard library's files, sorted by path."""
    pieces, size = [], 0
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        pieces.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(pieces[-1])
        if size >= limit:
            break
    return "".join(pieces)[:limit]


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in NOT_SOURCES:
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def vocabulary(text: str, size: int = VOCAB) -> list[str]:
    """Returns the most frequent tokens, indexed by id. Other tokens get the id UNKNOWN."""
    return ["?"] + [token for token, _ in Counter(TOKEN.findall(text)).most_common(size - 1)]


def encode(text: str, words: list[str] | None = None) -> Tensor:
    """Returns the token ids (T,) of a text.

    If `words` is None, the vocabulary is computed from this text.
    """
    words = vocabulary(text) if words is None else words
    index = {token: i for i, token in enumerate(words) if i != UNKNOWN}
    return torch.tensor([index.get(token, UNKNOWN) for token in TOKEN.findall(text)])


def draw_batches(ids: Tensor, scale: Scale, device: str, seed: int) -> Iterator[Batch]:
    """Yields an infinite number of batches. Each row starts at a random place of the text."""
    random = torch.Generator().manual_seed(seed)
    window = torch.arange(scale.context + 1)
    while True:
        start = torch.randint(len(ids) - scale.context, (scale.batch, 1), generator=random)
        drawn = ids[start + window].to(device)  # (batch, context + 1)
        yield drawn[:, :-1], drawn[:, 1:]


# Model


class Transformer(nn.Module):
    """A causal decoder whose head shares its weight with the embedding."""

    def __init__(self, scale: Scale, vocab: int = VOCAB):
        super().__init__()
        self.token = nn.Embedding(vocab, scale.width)
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
        # The initial logits have unit variance. After the multiplication by `self.gain`, the
        # embedded tokens have unit variance too. With other variances, training would amplify
        # rounding errors, and two correct implementations of a loss would have different loss
        # curves.
        self.gain = scale.width**0.5
        nn.init.normal_(self.token.weight, std=1 / self.gain)
        self.head = nn.Linear(scale.width, vocab, bias=False, device="meta")
        self.head.weight = self.token.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """Maps tokens of shape (batch, context) to hidden states (batch, context, width)."""
        context = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(context, device=tokens.device)
        x = self.gain * self.token(tokens) + self.place[:context]
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens of shape (batch, context) to logits of shape (batch, context, vocabulary)."""
        return self.head(self.hidden(tokens))


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
        self.curve.append(loss.item())  # `item` waits for the device, so the whole step is timed
        self.seconds += time.perf_counter() - start


def train(learners: list[Learner], batches: Iterator[Batch], steps: int) -> Iterator[int]:
    """Trains all learners on the same batches, and yields the number of finished steps."""
    for done, batch in zip(range(1, steps + 1), batches, strict=False):
        for learner in learners:
            learner.step(batch)
        yield done


def largest_difference(learners: list[Learner]) -> float:
    """Returns the largest difference between the losses of two learners in the same step."""
    one, other = learners
    return max(abs(a - b) for a, b in zip(one.curve, other.curve, strict=True))


def train_with_progress(learners: list[Learner], batches: Iterator[Batch], steps: int) -> None:
    with bar("training", steps) as advance:
        for _ in train(learners, batches, steps):
            losses = "  ".join(f"{learner.name} {learner.curve[-1]:.4f}" for learner in learners)
            advance(1, losses)
