"""The kernels' contracts in plain PyTorch: the CPU path, and fp64 anywhere."""

from .gather import gather, gather_gradient
from .pair import pair_gradient, pair_read
from .plain import can_accumulate, can_one_pass, plain, reduce, scale_
from .slots import slots
from .stats import finish, gradient, merge, partial, read
from .topk import topk

__all__ = [
    "can_accumulate",
    "can_one_pass",
    "finish",
    "gather",
    "gather_gradient",
    "gradient",
    "merge",
    "pair_gradient",
    "pair_read",
    "partial",
    "plain",
    "read",
    "reduce",
    "scale_",
    "slots",
    "topk",
]
