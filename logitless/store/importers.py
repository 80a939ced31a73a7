"""Documents whose teacher ran in an inference server: vLLM's prompt_logprobs, SGLang's JSON.

Both say, of each token of a prompt, what was expected *in its place*: nothing of the first, and of
token t the distribution after token t - 1. A store's row i is of the token after token i, so that
row i is their entry i + 1, and what follows the last token is known only if the server was asked
for the log-probabilities of the first token that it generated.

Where the prompt's own token is not among the k most probable, vLLM adds it to them. It is part of
each entry, so that an entry without it belongs to another token, or to another prompt.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets, unchecked
from . import checks as rules

Entry = Mapping[int, float] | None  # of a place: log-probabilities by id


def from_vllm(
    output: Any, tokens: Sequence[int] | None = None, *, k: int
) -> tuple[Tensor, SparseTargets]:
    """A document of vLLM, asked for prompt_logprobs=k: its tokens, and the k most probable of each.

    output is a RequestOutput, or the JSON of a server; tokens are its prompt_token_ids, unless they
    are in it.

    >>> for output in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=64)):
    ...     writer.add(*from_vllm(output, k=64))
    """
    choice = _get(output, "choices")
    inner = output if choice is None else choice[0]
    entries = _get(inner, "prompt_logprobs") or _get(output, "prompt_logprobs")
    if tokens is None:
        tokens = _get(inner, "prompt_token_ids") or _get(output, "prompt_token_ids")
    rules.server_output("vLLM", "prompt_logprobs", entries, tokens)
    found = [None if entry is None else _by_id(entry) for entry in entries]
    generated = _get(_first(_get(inner, "outputs")), "logprobs")
    after = _by_id(generated[0]) if generated and isinstance(generated[0], Mapping) else None
    return _document(tokens, found, after, k, "vLLM's prompt_logprobs")


def from_sglang(
    output: Any, tokens: Sequence[int] | None = None, *, k: int
) -> tuple[Tensor, SparseTargets]:
    """A document of SGLang, asked for return_logprob, logprob_start_len=0 and top_logprobs_num=k.

    output is its JSON; tokens are those of the prompt, unless input_token_logprobs has them.
    """
    about = _get(output, "meta_info") or output
    own, top = _get(about, "input_token_logprobs"), _get(about, "input_top_logprobs")
    if tokens is None and own is not None:
        tokens = [entry[1] for entry in own]
    rules.server_output("SGLang", "input_top_logprobs", top, tokens)
    found: list[Entry] = []
    for place, entry in enumerate(top):
        rows = {int(i): float(logprob) for logprob, i, *_ in entry} if entry else None
        if rows is not None and own is not None and own[place][0] is not None:
            rows.setdefault(int(own[place][1]), float(own[place][0]))
        found.append(rows)
    generated = _first(_get(about, "output_top_logprobs"))
    after = {int(i): float(logprob) for logprob, i, *_ in generated} if generated else None
    return _document(tokens, found, after, k, "SGLang's input_top_logprobs")


READERS = {"vllm": from_vllm, "sglang": from_sglang}


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _first(things: Any) -> Any:
    return things[0] if isinstance(things, Sequence) and things else None


def _by_id(entry: Mapping) -> dict[int, float]:
    """Of vLLM's: values are numbers, objects or JSON objects with a logprob."""
    found = {}
    for i, value in entry.items():
        number = value if isinstance(value, (int, float)) else _get(value, "logprob")
        found[int(i)] = float(number)
    return found


def _document(
    tokens: Sequence[int], entries: list[Entry], after: Entry, k: int, name: str
) -> tuple[Tensor, SparseTargets]:
    """The entry of a place becomes the row before it; what is not known is masked."""
    tokens = [int(t) for t in tokens]
    rules.entries(name, tokens, entries)
    rows = [*entries[1:], after]
    ids = torch.zeros(len(rows), k, dtype=torch.int64)
    logprobs = torch.full((len(rows), k), -torch.inf, dtype=torch.float64)
    mask = torch.zeros(len(rows), k, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row is None:
            continue
        best = sorted(row.items(), key=lambda pair: -pair[1])[:k]
        n = len(best)
        ids[i, :n] = torch.tensor([token for token, _ in best])
        logprobs[i, :n] = torch.tensor([max(p, -math.inf) for _, p in best], dtype=torch.float64)
        mask[i, :n] = True
    mass = logprobs.exp().sum(-1)
    rules.masses(name, mass)
    tail = torch.log1p(-mass.clamp_max(1 - 2.0**-40))
    targets = unchecked(ids, logprobs.float(), tail.float(), None if bool(mask.all()) else mask)
    return torch.tensor(tokens), targets
