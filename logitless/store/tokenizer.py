import hashlib
import json
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns the hash of the vocabulary of a Transformers tokenizer, or of a dict {token: id}.

    >>> Writer("targets", tokenizer=tokenizer_hash(tokenizer), ...)
    >>> Store("targets", tokenizer=tokenizer_hash(tokenizer))  # refuses another tokenizer
    """
    vocabulary = tokenizer if isinstance(tokenizer, dict) else tokenizer.get_vocab()
    pairs = sorted((int(i), str(token)) for token, i in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:32]
