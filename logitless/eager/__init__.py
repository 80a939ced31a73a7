"""The kernels' contracts in plain PyTorch: the CPU path, and fp64 anywhere."""

from .pair import pair_bwd, pair_fwd
from .pick import pick, pick_bwd
from .slots import slots
from .stats import can_accumulate, can_visit, mean_nll, scale_rows_, stats_bwd, stats_fwd
from .topk import topk

__all__ = [
    "can_accumulate",
    "can_visit",
    "mean_nll",
    "pair_bwd",
    "pair_fwd",
    "pick",
    "pick_bwd",
    "scale_rows_",
    "slots",
    "stats_bwd",
    "stats_fwd",
    "topk",
]
