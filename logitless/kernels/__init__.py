"""What the GPU runs. Imports torch and triton, and nothing of ours above it."""

from .mean import mean_nll
from .scale import scale_rows_
from .stats_bwd import stats_bwd
from .stats_fwd import stats_fwd
from .visit import can_visit, visit

__all__ = ["can_visit", "mean_nll", "scale_rows_", "stats_bwd", "stats_fwd", "visit"]
