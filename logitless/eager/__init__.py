"""The kernels' contracts in plain PyTorch: the CPU path, and fp64 anywhere."""

from .stats import can_visit, mean_nll, scale_rows_, stats_bwd, stats_fwd

__all__ = ["can_visit", "mean_nll", "scale_rows_", "stats_bwd", "stats_fwd"]
