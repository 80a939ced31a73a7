"""Calls with nothing wrong, and errors word for word."""

import re

import pytest
import torch

import logitless as ll

X = torch.zeros(2, 3, 5)
T = torch.zeros(2, 3, dtype=torch.int64)
BAD_IDS = [37, -1, 41, -7, 2**31 + 3, -(2**40)]  # of 37 classes
READERS = {  # every public function, called with the logits and nothing wrong
    "logsumexp": ll.logsumexp,
    "entropy": ll.entropy,
    "row_stats": ll.row_stats,
    "token_logprobs": lambda x, **how: ll.token_logprobs(x, T, **how),
    "score": lambda x, **how: ll.score(x, T, **how),
    "cross_entropy": lambda x, **how: ll.cross_entropy(x, T, **how),
}


def refuses(kind, message):
    """The whole message, word for word."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def refusal(f) -> str:
    """The words of the error that f raises."""
    with pytest.raises((TypeError, ValueError)) as refused:
        f()
    return str(refused.value)
