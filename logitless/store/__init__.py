"""Stores a teacher's distributions on disk: per token, the most probable ids or sampled ids.

`Writer` and `capture` write a store, the importers fill it from an inference server, `Store` reads
it, locally or at an address such as s3://bucket/targets, and `distill_loss` trains with its
targets. docs/store-format.md describes the files.
"""

from .capture import capture, share
from .documents import Documents, pad_documents
from .format import Header
from .importers import from_sglang, from_vllm
from .merge import merge
from .parquet import to_parquet
from .reader import Store
from .tokenizer import tokenizer_hash
from .training import Collator, DistillLosses, batch_targets, distill_loss
from .verify import Report
from .writer import Writer, recover

__all__ = [
    "Collator",
    "DistillLosses",
    "Documents",
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
    "pad_documents",
    "recover",
    "share",
    "to_parquet",
    "tokenizer_hash",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
