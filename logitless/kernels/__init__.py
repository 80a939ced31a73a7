"""What the GPU runs. Imports torch, triton and the eager twins, and nothing of ours above it."""

from .accumulate import accumulate, can_accumulate, exponents
from .mean import mean_nll
from .pair import pair_bwd, pair_fwd
from .pick import pick, pick_bwd
from .scale import scale_rows_
from .slots import slots
from .stats_bwd import stats_bwd
from .stats_fwd import stats_fwd
from .topk import topk
from .visit import can_visit, visit

__all__ = [
    "accumulate",
    "can_accumulate",
    "can_visit",
    "exponents",
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
    "visit",
]
