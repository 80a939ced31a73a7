"""The Triton backend, which imports only contract.py and eager/ from the rest of the package."""

from .at_ids.duplicate_ids import with_repeats
from .at_ids.gather import gather, gather_gradient
from .at_ids.slot_divergence import slots
from .at_ids.tail_mass import outside
from .at_ids.topk import topk
from .contrastive.forward import contrastive_finish, contrastive_read
from .contrastive.gradient import contrastive_gradient, sigmoid_contrastive
from .cross_entropy.one_pass import one_pass, plan_total
from .cross_entropy.smoothing_z_loss import (
    cross_entropy,
    label_coefficients,
    label_mass,
    weighted_nll,
)
from .gemms.blockfp_gemm import accumulate, can_accumulate, exponents
from .gemms.row_gemm import row_gemm
from .narrow.backward import narrow_gradients
from .narrow.forward import narrow_partial
from .narrow.tile import is_narrow
from .pairs.backward import pair_gradient
from .pairs.forward import pair_finish, pair_partial, pair_read, pair_sums
from .reduce import reduce, share
from .sampled_softmax.columns import sampled
from .sampled_softmax.table_rows import row_dots, row_dots_gradients
from .scale import scale_, scale_two_
from .statistics.backward import gradient, stats_gradient
from .statistics.coefficients import coefficients
from .statistics.forward import above, partial
from .statistics.merge import finish, merge
from .statistics.read import read
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
