"""Which tokenizer a store was made with: ids mean nothing without it."""

import hashlib
import json
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """Of the tokens and their ids: a tokenizer of Transformers, or a dict from tokens to ids.

    >>> Writer("targets", tokenizer=tokenizer_hash(tokenizer), ...)
    >>> Store("targets", tokenizer=tokenizer_hash(tokenizer))  # refuses another
    """
    vocabulary = tokenizer if isinstance(tokenizer, dict) else tokenizer.get_vocab()
    pairs = sorted((int(i), str(token)) for token, i in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:32]
