"""The backend in plain PyTorch: the default on a CPU, and for fp64 on every device.

Its functions, with their parameters, are the definition of a backend (core/backend.py). Logits x
have shape (..., V), with N rows and K ids per row; contract.py defines the structs. A backend can
offer what is None or False here: `one_pass`, `stats_gradient`, `can_accumulate` and `is_narrow`,
with the functions that they announce.
"""

from .contrastive import (
    contrastive_finish,
    contrastive_gradient,
    contrastive_read,
    sigmoid_contrastive,
)
from .gather import gather, gather_gradient
from .pair import (
    merge_pairs,
    pair_finish,
    pair_gradient,
    pair_partial,
    pair_read,
    pair_sums,
)
from .row_gemm import row_gemm
from .rows import reduce, scale_, scale_two_, share, zero_ignored
from .sampled import sampled
from .slot_divergence import slots
from .smoothing_z_loss import (
    can_accumulate,
    cross_entropy,
    is_narrow,
    label_coefficients,
    label_mass,
    one_pass,
    weighted_nll,
)
from .stats_bwd import gradient
from .stats_coefficients import coefficients, stats_gradient
from .stats_fwd import above, finish, merge, outside, partial, read, with_repeats
from .table_rows import row_dots, row_dots_gradients
from .topk import topk

# Whether `invariant` computes one row at a time: on a CPU, PyTorch can round a row differently at
# another position of the tensor.
single_rows = True

__all__ = [
    "above",
    "can_accumulate",
    "coefficients",
    "contrastive_finish",
    "contrastive_gradient",
    "contrastive_read",
    "cross_entropy",
    "finish",
    "gather",
    "gather_gradient",
    "gradient",
    "is_narrow",
    "label_coefficients",
    "label_mass",
    "merge",
    "merge_pairs",
    "one_pass",
    "outside",
    "pair_finish",
    "pair_gradient",
    "pair_partial",
    "pair_read",
    "pair_sums",
    "partial",
    "read",
    "reduce",
    "row_dots",
    "row_dots_gradients",
    "row_gemm",
    "sampled",
    "scale_",
    "scale_two_",
    "share",
    "sigmoid_contrastive",
    "single_rows",
    "slots",
    "stats_gradient",
    "topk",
    "weighted_nll",
    "with_repeats",
    "zero_ignored",
]
