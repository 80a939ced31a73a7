"""Checks the output of an inference server."""

import math
from typing import Any, NoReturn

from torch import Tensor

from .checks import whole


def slots(k: Any) -> None:
    whole("k", k, 1, 2**16)


def is_choice(choice: Any, n: int) -> None:
    whole("choice", choice, 0, n - 1)


def completions(name: str, several: Any) -> None:
    if not isinstance(several, (list, tuple)) or not several:
        got = "none" if isinstance(several, (list, tuple)) else type(several).__name__
        raise ValueError(f"output must have a list of completions in its {name}, got {got}.")


def is_list(name: str, value: Any) -> Any:
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__getitem__"):
        raise ValueError(f"{name} must be a list, got {type(value).__name__}.")
    return value


def is_entry(name: str, place: int, value: Any) -> None:
    if not hasattr(value, "items"):
        got = f"{type(value).__name__} at position {place}"
        raise ValueError(f"{name} must map ids to log-probabilities, got {got}.")


def is_pair(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise ValueError(f"{name} must have lists of (logprob, id, text), got {value!r:.50}.")


def same_number(name: str, got: int, tokens: int) -> None:
    if got != tokens:
        raise ValueError(f"{name} must have an entry for each of {tokens} tokens, got {got}.")


def token_id(name: str, value: Any) -> int:
    if isinstance(value, str):
        raise ValueError(
            f"{name} must name tokens by their ids, got {value!r:.50}. A server returns ids if the"
            " request sets return_tokens_as_token_ids=True."
        )
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        raise ValueError(f"{name} must have whole numbers as token ids, got {value!r:.50}.")
    return int(value)


def below_2_63(name: str) -> NoReturn:
    raise ValueError(f"{name} must have token ids below 2^63, got a larger number.")


def logprob(name: str, place: int, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise ValueError(
            f"{name} must hold logarithms of probabilities, got {value!r:.50} at position {place}."
        )
    return float(value)


def server_output(prompt: Any, generated: Any, completion: bool) -> None:
    if completion and (generated.entries is None or generated.tokens is None):
        wanted = f"{generated.name} and the ids of its completion"
        wanted = wanted if prompt.entries is not None else f"{prompt.name}, or {wanted}"
        raise ValueError(
            f"output must have {wanted}, got an output without them. Request log-probabilities from"
            " the server. vLLM returns at most 20 log-probabilities per token, unless vLLM is"
            " started with max_logprobs=k."
        )
    if not completion and prompt.entries is None:
        raise ValueError(f"output must have {prompt.name} with completion=False, got none.")
    if prompt.tokens is None:
        raise ValueError(
            "output must have the prompt_token_ids of its prompt, got none. Pass the ids as"
            " `tokens`, or add prompt_token_ids to the JSON of the output."
        )


def entries(name: str, tokens: list[int], rows: list | None, is_prompt: bool) -> None:
    """Checks that every token has log-probabilities, except the first token of a prompt."""
    if rows is None:
        return
    if not tokens or len(rows) != len(tokens):
        raise ValueError(
            f"{name} must have an entry for each of {len(tokens)} tokens, got {len(rows)}."
            " Request entries for all tokens, starting with the first."
        )
    if is_prompt and rows[0] is not None:
        raise ValueError(
            f"{name} must begin with None, because the first token has no distribution, got a"
            " distribution. The entries are shifted by one token."
        )
    for place in range(int(is_prompt), len(tokens)):
        token, row = tokens[place], rows[place]
        if row is None:
            raise ValueError(f"{name} must have a distribution at position {place}, got None.")
        if token not in row:
            raise ValueError(
                f"{name} must include token {token}, the token of the text at position {place}, got"
                f" {list(row)[:5]}. The entries belong to another text, or the entries are shifted."
            )
        if max(row.values()) > 1e-3:
            raise ValueError(
                f"{name} must hold logarithms of probabilities, got {max(row.values())} at position"
                f" {place}."
            )


def masses(name: str, mass: Tensor) -> None:
    if bool((mass > 1.01).any()):
        place = int((mass > 1.01).nonzero()[0])
        raise ValueError(
            f"{name} must have probabilities that add up to at most 1 at each position, got"
            f" {float(mass[place]):.4g} after the token at position {place}. Are the entries"
            " probabilities instead of logarithms?"
        )
