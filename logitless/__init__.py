"""Every loss over a vocabulary, without paying for the vocabulary."""

from . import nn
from ._dispatch import impl
from .losses import Scores, cross_entropy, entropy, logsumexp, score, token_logprobs
from .stats import Partial, RowStats, merge, partial, row_stats

__version__ = "0.1.0"

__all__ = [
    "Partial",
    "RowStats",
    "Scores",
    "cross_entropy",
    "entropy",
    "impl",
    "logsumexp",
    "merge",
    "nn",
    "partial",
    "row_stats",
    "score",
    "token_logprobs",
]
