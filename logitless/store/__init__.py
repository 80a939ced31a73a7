"""What a teacher says of documents, kept on disk: made once, found by tokens, read as slices."""

from ._format import Header
from .merge import merge
from .reader import Store
from .verify import Report
from .writer import Writer

__all__ = ["Header", "Report", "Store", "Writer", "merge"]
