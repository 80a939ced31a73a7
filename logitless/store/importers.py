"""Reads documents and targets from the output of the inference servers vLLM and SGLang.

In both outputs, entry t is the predicted distribution of token t, and entry 0 of a prompt is None.
Row i of a store is the distribution of token i + 1, so it is the server's entry i + 1. A row
without an entry is masked, usually the row of the last token. If the log-probabilities of the
prompt were not requested, its rows are masked too, except the last, which is entry 0 of the
completion.

vLLM adds token t to entry t if it is not among the k most probable tokens. An entry without its
token therefore belongs to another token or another prompt, and raises an error.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets, unchecked
from . import checks
from .device import on_cpu

# Entry of one token in a server's output: {id: log-probability}, or None if there is no entry.
Entry = Mapping[int, float] | None
# With `return_tokens_as_token_ids`, vLLM's JSON writes the id 7 as "token_id:7".
VLLM_ID = "token_id:"


class Part(NamedTuple):
    """A prompt or a completion. What the output does not contain is None."""

    name: str  # name of the entries in error messages
    tokens: Sequence[Any] | None
    entries: list[Entry] | None


@on_cpu
def from_vllm(
    output: Any,
    tokens: Sequence[int] | None = None,
    *,
    k: int,
    completion: bool | None = None,
    choice: int = 0,
) -> tuple[Tensor, SparseTargets]:
    """Returns the tokens and targets of a document from vLLM's output.

    `output` is a RequestOutput, or the JSON of a server. `tokens` are the token ids of the prompt,
    and can be omitted if the output contains `prompt_token_ids`.

    If the output has `prompt_logprobs`, the document is the prompt. Otherwise it is the prompt
    followed by the completion, and the rows of the prompt are masked, except the last, which
    describes the first token of the completion. `completion=True` always includes the completion,
    and `completion=False` never does. `choice` is the number of the completion, if there are
    several.

    vLLM returns at most 20 log-probabilities per token, unless it is started with
    `max_logprobs=k`.

    >>> for output in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=64)):
    ...     writer.add(*from_vllm(output, k=64))
    >>> for output in llm.generate(prompts, SamplingParams(max_tokens=500, logprobs=64)):
    ...     writer.add(*from_vllm(output, k=64))
    """
    checks.slots(k)
    return _tensors(vllm_document(output, tokens, completion, choice), k)


def vllm_document(
    output: Any, tokens: Sequence[int] | None, completion: bool | None, choice: int
) -> "Document":
    inner = _chosen(output, choice)
    entries = _first_of("prompt_logprobs", inner, output)
    if tokens is None:
        tokens = _first_of("prompt_token_ids", inner, output)
    prompt = Part("vLLM's prompt_logprobs", tokens, _entries("vLLM's prompt_logprobs", entries))
    name = "vLLM's logprobs"
    generated = _entries(name, _of_api(_get(inner, "logprobs")))
    ids = _get(inner, "token_ids")
    if ids is None and generated is not None:
        ids = _ids_of_api(_get(inner, "logprobs"))
    return _document(prompt, Part(name, ids, generated), completion)


@on_cpu
def from_sglang(
    output: Any,
    tokens: Sequence[int] | None = None,
    *,
    k: int,
    completion: bool | None = None,
    choice: int = 0,
) -> tuple[Tensor, SparseTargets]:
    """Returns the tokens and targets of a document from SGLang's JSON, like `from_vllm`.

    The request must set `return_logprob` and `top_logprobs_num=k`, and `logprob_start_len=0` to
    store rows of the prompt. `tokens` are the ids of the prompt, and can be omitted if the output
    has `input_token_logprobs`. The completion's entries are in `output_top_logprobs`. `choice` must
    be 0, because SGLang returns several completions as several outputs.
    """
    checks.slots(k)
    return _tensors(sglang_document(output, tokens, completion, choice), k)


def sglang_document(
    output: Any, tokens: Sequence[int] | None, completion: bool | None, choice: int
) -> "Document":
    checks.is_choice(choice, 1)
    info = _get(output, "meta_info") or output
    own, top = _get(info, "input_token_logprobs"), _get(info, "input_top_logprobs")
    name = "SGLang's input_top_logprobs"
    if tokens is None and own:
        tokens = [_own(name, entry)[1] for entry in own]
    prompt = Part(name, tokens, _of_sglang(name, own, top or None))
    own, top = _get(info, "output_token_logprobs"), _get(info, "output_top_logprobs")
    name = "SGLang's output_top_logprobs"
    ids = [_own(name, entry)[1] for entry in own] if own else None
    return _document(prompt, Part(name, ids, _of_sglang(name, own, top or None)), completion)


READERS = {"vllm": vllm_document, "sglang": sglang_document}


def choices_of(output: Any) -> int:
    """The number of completions in an output, or 1."""
    several = _get(output, "choices") or _get(output, "outputs")
    return max(1, len(several)) if isinstance(several, Sequence) else 1


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _first_of(name: str, *things: Any) -> Any:
    return next((value for t in things if (value := _get(t, name))), None)


def _chosen(output: Any, choice: int) -> Any:
    name = "choices" if _get(output, "choices") is not None else "outputs"
    several = _get(output, name)
    if several is None:
        return output
    checks.completions(name, several)
    checks.is_choice(choice, len(several))
    return several[choice]


def _of_api(logprobs: Any) -> Any:
    """The entries in the field `logprobs` of an OpenAI-compatible server, in both forms."""
    if not isinstance(logprobs, Mapping):
        return logprobs
    content = logprobs.get("content")
    if content is None:
        return logprobs.get("top_logprobs")
    return [
        {
            _get(c, "token"): _get(c, "logprob")
            for c in [entry, *(_get(entry, "top_logprobs") or [])]
        }
        for entry in content
    ]


def _ids_of_api(logprobs: Any) -> list[int] | None:
    if not isinstance(logprobs, Mapping):
        return None
    content = logprobs.get("content")
    tokens = logprobs.get("tokens") if content is None else [_get(c, "token") for c in content]
    return tokens and [_id("vLLM's logprobs", token) for token in tokens]


def _entries(name: str, entries: Any) -> list[Entry] | None:
    """vLLM's entries as {id: logprob}.

    An entry maps each id to a number, or to an object or dict with `logprob`.
    """
    if entries is None or (isinstance(entries, Sequence) and not entries):
        return None
    checks.is_list(name, entries)
    return [None if e is None else _by_id(name, place, e) for place, e in enumerate(entries)]


def _by_id(name: str, place: int, entry: Any) -> dict[int, float]:
    checks.is_entry(name, place, entry)
    logprobs = _by_id_in_json(entry) if type(entry) is dict else None
    if logprobs is not None:
        return logprobs
    logprobs = {}
    for i, value in entry.items():
        p = value.get("logprob") if type(value) is dict else getattr(value, "logprob", value)
        logprobs[_id(name, i)] = checks.logprob(name, place, p)
    return logprobs


def _by_id_in_json(entry: dict) -> dict[int, float] | None:
    """{id: log-probability} of an entry in the usual JSON form, or None if it has another form.

    All numbers are checked at once, which is several times as fast as one by one.
    """
    try:
        ids, logprobs = list(entry), list(entry.values())
        if ids and ids[0].startswith(VLLM_ID):
            ids = [i.removeprefix(VLLM_ID) for i in ids]
        if logprobs and type(logprobs[0]) is dict:
            logprobs = [value["logprob"] for value in logprobs]
        if not "".join(ids).isdecimal() or not _are_logprobs(logprobs):
            return None
        return dict(zip(map(int, ids), logprobs, strict=True))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _are_logprobs(values: list) -> bool:
    """Whether all values are floats and their sum is not NaN (a NaN, or both inf and -inf)."""
    return set(map(type, values)) == {float} and not math.isnan(sum(values))


def _are_ids(values: Any) -> bool:
    return type(values) is list and set(map(type, values)) == {int} and min(values) >= 0


def _id(name: str, value: Any) -> int:
    if isinstance(value, str):
        value = value.removeprefix(VLLM_ID)
        value = int(value) if value.isdecimal() else value
    return checks.token_id(name, value)


def _of_sglang(name: str, own: Any, top: Any) -> list[Entry] | None:
    """SGLang's entries, lists of (logprob, id, text), as {id: logprob}.

    `own[t]` holds the log-probability and the id of token t. It is added to entry t if missing.
    """
    if top is None:
        return None
    checks.is_list(name, top)
    if own is not None:
        checks.same_number(name, len(top), len(own))
    entries: list[Entry] = []
    for place, best in enumerate(top):
        if not best:
            entries.append(None)
            continue
        pairs = [_own(name, pair) for pair in checks.is_list(name, best)]
        if _are_ids([i for _, i in pairs]) and _are_logprobs([p for p, _ in pairs]):
            entry = {i: p for p, i in pairs}
        else:
            entry = {checks.token_id(name, i): checks.logprob(name, place, p) for p, i in pairs}
        if own is not None and (p := _own(name, own[place]))[0] is not None:
            entry.setdefault(checks.token_id(name, p[1]), checks.logprob(name, place, p[0]))
        entries.append(entry)
    return entries


def _own(name: str, pair: Any) -> tuple[Any, Any]:
    checks.is_pair(name, pair)
    return pair[0], pair[1]


class Document(NamedTuple):
    name: str  # name of the entries in error messages
    tokens: list[int]
    rows: list[Entry]


def _document(prompt: Part, generated: Part, completion: bool | None) -> Document:
    completion = prompt.entries is None if completion is None else completion
    checks.server_output(prompt, generated, completion)
    tokens = _ids("prompt_token_ids", prompt.tokens)
    checks.entries(prompt.name, tokens, prompt.entries, is_prompt=True)
    entries = list(prompt.entries or [None] * len(tokens))
    if completion:
        more = _ids("token_ids", generated.tokens)
        checks.entries(generated.name, more, generated.entries, is_prompt=False)
        tokens, entries = tokens + more, entries + list(generated.entries or ())
    after = None if completion else next(iter(generated.entries or ()), None)
    return Document(prompt.name, tokens, [*entries[1:], after])


def _ids(name: str, tokens: Sequence[Any] | None) -> list[int]:
    if isinstance(tokens, list) and _are_ids(tokens):
        return tokens
    return [checks.token_id(name, t) for t in tokens or ()]


def _tensors(document: Document, k: int) -> tuple[Tensor, SparseTargets]:
    tokens, _, targets = tensors_of([document], k)
    return tokens, targets


def tensors_of(documents: Sequence[Document], k: int) -> tuple[Tensor, list[int], SparseTargets]:
    """The arguments of `Writer.extend` for several documents: tokens, starts and targets.

    Slots beyond the ids of an entry are masked, and all slots of a row without an entry.
    """
    tokens, ids, logprobs = array("q"), array("q"), array("d")
    try:
        for document in documents:
            tokens.extend(document.tokens)
            for row in document.rows:
                row = row or {}
                best = sorted(row, key=row.__getitem__, reverse=True)[:k]
                ids.extend(best)
                logprobs.extend([row[i] for i in best])
                if empty := k - len(best):
                    ids.extend([-1] * empty)
                    logprobs.extend([-math.inf] * empty)
    except OverflowError:
        checks.below_2_63(documents[0].name)
    id_ = torch.frombuffer(ids, dtype=torch.int64).view(-1, k)
    logprob = torch.frombuffer(logprobs, dtype=torch.float64).view(-1, k)
    mask = id_ >= 0
    mass = logprob.exp().sum(-1)
    checks.masses(documents[0].name, mass)
    tail = torch.log1p(-mass.clamp_max(1 - 2.0**-40))
    mask = None if bool(mask.all()) else mask
    starts = list(accumulate((len(document.tokens) for document in documents), initial=0))
    targets = unchecked(id_.clamp_min(0), logprob.float(), tail.float(), mask)
    return torch.frombuffer(tokens, dtype=torch.int64), starts, targets
