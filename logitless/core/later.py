"""Functions that a file calls and that are built on that file: set by the files that define them.

The package imports all of them, so that each is there before anybody calls it.
"""

from collections.abc import Callable
from typing import Any


class Later:
    evaluate_dtensor: Callable[..., Any]  # a loss over DTensor logits: parallel/dtensor.py
    source_of_dtensor: Callable[
        ..., Any
    ]  # what DTensor logits are on this rank: parallel/dtensor.py
    head_of_dtensor: Callable[..., Any]  # a LinearLogits of DTensors: parallel/dtensor.py
    evaluate_compiled: Callable[..., Any]  # a loss over a head, for a compiler: heads/operators.py
    lazy_logits: Callable[..., Any]  # of a head's parts: lazy/logits.py
    refuse_on_ranks: Callable[
        ..., Any
    ]  # says to the ranks of logits what one raises: parallel/same_call.py


later = Later()
