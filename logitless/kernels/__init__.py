"""The Triton backend, which imports only contract.py and eager/ from the rest of the package."""

from .blockfp_gemm import accumulate, can_accumulate, exponents
from .bwd_launch import gradient, stats_gradient
from .contrastive_bwd import contrastive_gradient
from .contrastive_fwd import contrastive_finish, contrastive_read
from .duplicate_ids import with_repeats
from .gather import gather, gather_gradient
from .host import one_pass, plan_total, read, scale_, scale_two_
from .narrow_bwd import narrow_gradients
from .narrow_fwd import narrow_partial
from .narrow_tile import is_narrow
from .pair_bwd import pair_gradient
from .pair_fwd import pair_finish, pair_partial, pair_read, pair_sums
from .reduce import reduce, share
from .row_gemm import row_gemm
from .sampled import sampled
from .sigmoid_contrastive import sigmoid_contrastive
from .slot_divergence import slots
from .smoothing_z_loss import cross_entropy, label_coefficients, label_mass, weighted_nll
from .stats_coefficients import coefficients
from .stats_merge import finish, merge
from .stats_split_fwd import above, partial
from .table_rows import row_dots, row_dots_gradients
from .tail_mass import outside
from .topk import topk
from .zero_ignored import zero_ignored

single_rows = False  # the split of a row depends on no other row

__all__ = [
    "above",
    "accumulate",
    "can_accumulate",
    "coefficients",
    "contrastive_finish",
    "contrastive_gradient",
    "contrastive_read",
    "cross_entropy",
    "exponents",
    "finish",
    "gather",
    "gather_gradient",
    "gradient",
    "is_narrow",
    "label_coefficients",
    "label_mass",
    "merge",
    "narrow_gradients",
    "narrow_partial",
    "one_pass",
    "outside",
    "pair_finish",
    "pair_gradient",
    "pair_partial",
    "pair_read",
    "pair_sums",
    "partial",
    "plan_total",
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
