"""What the GPU runs. Of the package it imports contract.py and eager/, and nothing above them."""

from .finish import finish, merge
from .gather import gather, gather_gradient
from .host import gradient, one_pass, read, reduce, scale_, share
from .partial import partial
from .plain import cross_entropy, label_coefficients, label_mass, weighted_nll
from .slots import slots

# After those above, whose modules these import.
from .accumulate import accumulate, can_accumulate, exponents  # isort: skip
from .pair_gradient import pair_gradient  # isort: skip
from .pair_read import pair_finish, pair_partial, pair_read  # isort: skip
from .tail import outside  # isort: skip
from .topk import topk  # isort: skip

__all__ = [
    "accumulate",
    "can_accumulate",
    "cross_entropy",
    "exponents",
    "finish",
    "gather",
    "gather_gradient",
    "gradient",
    "label_coefficients",
    "label_mass",
    "merge",
    "one_pass",
    "outside",
    "pair_finish",
    "pair_gradient",
    "pair_partial",
    "pair_read",
    "partial",
    "read",
    "reduce",
    "scale_",
    "share",
    "slots",
    "topk",
    "weighted_nll",
]
