"""What a teacher says of documents, kept on disk: made once, found by tokens, read as slices."""

from .capture import capture, share
from .format import Header
from .importers import from_sglang, from_vllm
from .merge import merge
from .reader import Store
from .tokenizer import tokenizer_hash
from .training import Collator, DistillLosses, batch_targets, distill_loss
from .verify import Report
from .writer import Writer, recover

__all__ = [
    "Collator",
    "DistillLosses",
    "Header",
    "Report",
    "Store",
    "Writer",
    "batch_targets",
    "capture",
    "distill_loss",
    "from_sglang",
    "from_vllm",
    "merge",
    "recover",
    "share",
    "tokenizer_hash",
]
