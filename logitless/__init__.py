"""Losses of language models, computed without storing all logits."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import nn
from .contrastive.info_nce import contrastive
from .contrastive.sigmoid import sigmoid_contrastive
from .core.choose_backend import impl
from .core.invariant import invariant
from .lazy.fuse import fuse, is_fused, unfuse
from .lazy.fused_head import lazy_logits
from .lazy.linear_logits import LinearLogits
from .lazy.report import report
from .losses.capture import capture_sampled, capture_topk
from .losses.cross_entropy import (
    cross_entropy,
    cross_entropy_and_scores,
    linear_cross_entropy,
)
from .losses.dense_teacher import jsd, kl_div, soft_cross_entropy, tvd
from .losses.group_loss import group_loss
from .losses.kept_scores import KeptScores, kept_scores
from .losses.row_loss import row_loss
from .losses.sampled_softmax import sampled_softmax
from .losses.slot_loss import slot_loss
from .losses.sparse_teacher import gathered_kl, topk_distill
from .losses.statistics import (
    Partial,
    RowStats,
    Scores,
    entropy,
    logsumexp,
    merge,
    partial,
    row_stats,
    score,
    token_logprobs,
)
from .parallel import dtensor as _dtensor  # noqa: F401 - registers DTensors as logits
from .parallel.mean import global_mean
from .parallel.shard import VocabShard
from .targets.sparse import SparseTargets

if TYPE_CHECKING:
    from . import store

__version__ = "0.2.0"

__all__ = [
    "KeptScores",
    "LinearLogits",
    "Partial",
    "RowStats",
    "Scores",
    "SparseTargets",
    "VocabShard",
    "capture_sampled",
    "capture_topk",
    "contrastive",
    "cross_entropy",
    "cross_entropy_and_scores",
    "entropy",
    "fuse",
    "gathered_kl",
    "global_mean",
    "group_loss",
    "impl",
    "invariant",
    "is_fused",
    "jsd",
    "kept_scores",
    "kl_div",
    "lazy_logits",
    "linear_cross_entropy",
    "logsumexp",
    "merge",
    "nn",
    "partial",
    "report",
    "row_loss",
    "row_stats",
    "sampled_softmax",
    "score",
    "sigmoid_contrastive",
    "slot_loss",
    "soft_cross_entropy",
    "store",
    "token_logprobs",
    "topk_distill",
    "tvd",
    "unfuse",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__version__", "hf"])


def __getattr__(name: str):
    """Imports `logitless.hf` and `logitless.store` at first use.

    `logitless.hf` cannot be imported without the package transformers.
    """
    if name in ("hf", "store"):
        return import_module(f"logitless.{name}")
    raise AttributeError(f"module 'logitless' has no attribute {name!r}")
