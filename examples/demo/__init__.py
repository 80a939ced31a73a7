"""The demo (`python -m examples.demo`), and the small model and text that examples share."""

from .small import (
    MAX_CHARS,
    SCALES,
    VOCAB,
    Batch,
    Learner,
    Scale,
    Transformer,
    draw_batches,
    encode,
    largest_difference,
    read_sources,
    train,
    train_with_progress,
    vocabulary,
)

__all__ = [
    "MAX_CHARS",
    "SCALES",
    "VOCAB",
    "Batch",
    "Learner",
    "Scale",
    "Transformer",
    "draw_batches",
    "encode",
    "largest_difference",
    "read_sources",
    "train",
    "train_with_progress",
    "vocabulary",
]
