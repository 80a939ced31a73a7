"""Documents whose teacher ran in an inference server: vLLM's prompt_logprobs, SGLang's JSON.

Both servers return, for each token of a prompt, the distribution of that token: entry t is the
distribution after token t - 1, and entry 0 is None. Row i of a store is the distribution after
token i, so row i is the server's entry i + 1. The row of the last token is known only if the
server also returned the log-probabilities of the first generated token.

If the prompt's own token is not among the k most probable, vLLM adds it to them. Every entry
therefore contains the prompt's own token. An entry without it belongs to another token or to
another prompt.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets, unchecked
from . import checks

Entry = Mapping[int, float] | None  # log-probabilities by id, of one token of the prompt


def from_vllm(
    output: Any, tokens: Sequence[int] | None = None, *, k: int
) -> tuple[Tensor, SparseTargets]:
    """The tokens of a prompt, and targets from vLLM's prompt_logprobs=k.

    output is a RequestOutput, or the JSON of a server. tokens are the prompt_token_ids, and may be
    omitted if the output contains them.

    >>> for output in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=64)):
    ...     writer.add(*from_vllm(output, k=64))
    """
    choice = _get(output, "choices")
    inner = output if choice is None else choice[0]
    entries = _get(inner, "prompt_logprobs") or _get(output, "prompt_logprobs")
    if tokens is None:
        tokens = _get(inner, "prompt_token_ids") or _get(output, "prompt_token_ids")
    checks.server_output("vLLM", "prompt_logprobs", entries, tokens)
    entries = [None if entry is None else _by_id(entry) for entry in entries]
    generated = _get(_first(_get(inner, "outputs")), "logprobs")
    after = _by_id(generated[0]) if generated and isinstance(generated[0], Mapping) else None
    return _document(tokens, entries, after, k, "vLLM's prompt_logprobs")


def from_sglang(
    output: Any, tokens: Sequence[int] | None = None, *, k: int
) -> tuple[Tensor, SparseTargets]:
    """The tokens of a prompt, and targets from the JSON of SGLang.

    The request needs return_logprob, logprob_start_len=0 and top_logprobs_num=k. tokens are the
    ids of the prompt, and may be omitted if the output has input_token_logprobs.
    """
    info = _get(output, "meta_info") or output
    prompt, top = _get(info, "input_token_logprobs"), _get(info, "input_top_logprobs")
    if tokens is None and prompt is not None:
        tokens = [entry[1] for entry in prompt]
    checks.server_output("SGLang", "input_top_logprobs", top, tokens)
    entries: list[Entry] = []
    for place, best in enumerate(top):
        entry = {int(i): float(logprob) for logprob, i, *_ in best} if best else None
        if entry is not None and prompt is not None and prompt[place][0] is not None:
            entry.setdefault(int(prompt[place][1]), float(prompt[place][0]))
        entries.append(entry)
    generated = _first(_get(info, "output_top_logprobs"))
    after = {int(i): float(logprob) for logprob, i, *_ in generated} if generated else None
    return _document(tokens, entries, after, k, "SGLang's input_top_logprobs")


READERS = {"vllm": from_vllm, "sglang": from_sglang}


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _first(things: Any) -> Any:
    return things[0] if isinstance(things, Sequence) and things else None


def _by_id(entry: Mapping) -> dict[int, float]:
    """An entry of vLLM, whose values are numbers, objects or JSON objects with a logprob."""
    logprobs = {}
    for i, value in entry.items():
        number = value if isinstance(value, (int, float)) else _get(value, "logprob")
        logprobs[int(i)] = float(number)
    return logprobs


def _document(
    tokens: Sequence[int], entries: list[Entry], after: Entry, k: int, name: str
) -> tuple[Tensor, SparseTargets]:
    """Moves each entry to the row before it, and masks empty slots and unknown rows."""
    tokens = [int(t) for t in tokens]
    checks.entries(name, tokens, entries)
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
    checks.masses(name, mass)
    tail = torch.log1p(-mass.clamp_max(1 - 2.0**-40))
    targets = unchecked(ids, logprobs.float(), tail.float(), None if bool(mask.all()) else mask)
    return torch.tensor(tokens), targets
