"""What computes losses: a module with the functions of `eager`, which is their definition.

`kernels` has all of them, in Triton. Another module can start with a few: `Completed` takes every
other function from eager. `pair_*` belong together, and so do `contrastive_*`, because each backend
has its own units for what they save; contract.py defines all other states. ColumnBackend
(parallel/rank_merge.py), BlockBackend (heads/blocks.py) and OnChipBackend (heads/on_chip.py) wrap a
backend, and merge the partial statistics of several sets of columns.
"""

from typing import Any, TypeAlias

from .. import eager

Backend: TypeAlias = Any


class Completed:
    """The functions of `module`, and those of eager that it lacks."""

    def __init__(self, module: Any):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module if hasattr(self.module, name) else eager, name)
