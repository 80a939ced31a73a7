"""The hash of a tokenizer: a store keeps it, because ids mean nothing without their tokenizer."""

import hashlib
import json
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of a vocabulary, given by a Transformers tokenizer or by a dict from tokens to ids.

    >>> Writer("targets", tokenizer=tokenizer_hash(tokenizer), ...)
    >>> Store("targets", tokenizer=tokenizer_hash(tokenizer))  # refuses another tokenizer
    """
    vocabulary = tokenizer if isinstance(tokenizer, dict) else tokenizer.get_vocab()
    pairs = sorted((int(i), str(token)) for token, i in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:32]
