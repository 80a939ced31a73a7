"""Valid calls of public functions, and assertions on the exact text of errors."""

import re

import pytest
import torch

import logitless as ll

X = torch.zeros(2, 3, 5)
T = torch.zeros(2, 3, dtype=torch.int64)
BAD_IDS = [37, -1, 41, -7, 2**31 + 3, -(2**40)]  # out of range for 37 classes
READERS = {  # valid calls of public functions, for tests that add one invalid argument
    "logsumexp": ll.logsumexp,
    "entropy": ll.entropy,
    "row_stats": ll.row_stats,
    "token_logprobs": lambda x, **how: ll.token_logprobs(x, T, **how),
    "score": lambda x, **how: ll.score(x, T, **how),
    "kept_scores": lambda x, **how: ll.kept_scores(x, T, T[..., None], **how),
    "cross_entropy": lambda x, **how: ll.cross_entropy(x, T, **how),
}


def refuses(kind, message):
    """Asserts that an error is raised, and that its whole message equals `message`."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def refusal(f) -> str:
    """The message of the error that f raises."""
    with pytest.raises((TypeError, ValueError)) as refused:
        f()
    return str(refused.value)
