"""Stores a teacher's distributions on disk: per token, the most probable ids or sampled ids.

- writer.py writes documents and their distributions.
- capture.py computes distributions with a model.
- importers.py reads distributions from the output of an inference server.
- reader.py reads a store.
- lookup.py finds documents by their tokens.
- training.py computes a student's loss.
- documents.py iterates over a store.
- format.py describes the layout on disk.
- remote.py reads a store at an address, such as s3://bucket/targets.
- cache.py keeps the fetched files of remote stores.
- upload.py uploads a store.
- parquet.py converts a store to parquet files and back.
"""

from .capture import capture, share
from .documents import Documents, pad_documents
from .format import Header
from .importers import from_sglang, from_vllm
from .merge import merge
from .parquet import from_parquet, to_parquet
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
    "from_parquet",
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
