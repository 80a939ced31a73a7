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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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


class Document(NamedTuple):
    name: str  # name of the entries in error messages
    tokens: list[int]
    rows: list[Entry]


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
    return _read(vllm_document, k, output, tokens, completion, choice)


def vllm_document(output: Any, tokens: Any, completion: bool | None, choice: int) -> Document:
    inner = _chosen(output, choice)
    name = "vLLM's prompt_logprobs"
    entries = _get(inner, "prompt_logprobs") or _get(output, "prompt_logprobs") or None
    if tokens is None:
        tokens = _get(inner, "prompt_token_ids") or _get(output, "prompt_token_ids") or None
    prompt = Part(name, tokens, _entries_of_vllm(name, entries))
    name = "vLLM's logprobs"
    texts, entries = _of_api(_get(inner, "logprobs"))
    entries, ids = _entries_of_vllm(name, entries), _get(inner, "token_ids")
    if ids is None and entries is not None:
        ids = texts and [_id(name, text) for text in texts]
    return _document(prompt, Part(name, ids, entries), completion)


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
    return _read(sglang_document, k, output, tokens, completion, choice)


def sglang_document(output: Any, tokens: Any, completion: bool | None, choice: int) -> Document:
    checks.whole("choice", choice, 0, 0)
    info = _get(output, "meta_info") or output
    prompt = _part_of_sglang(info, "input", tokens)
    return _document(prompt, _part_of_sglang(info, "output", None), completion)


READERS = {"vllm": vllm_document, "sglang": sglang_document}


def choices_of(output: Any) -> int:
    """The number of completions in an output, or 1."""
    several = _get(output, "choices") or _get(output, "outputs")
    return max(1, len(several)) if isinstance(several, Sequence) else 1


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _chosen(output: Any, choice: int) -> Any:
    name = "choices" if _get(output, "choices") is not None else "outputs"
    several = _get(output, name)
    if several is None:
        return output
    if not isinstance(several, (list, tuple)) or not several:
        got = "none" if isinstance(several, (list, tuple)) else type(several).__name__
        checks.refuse("output", f"have a list of completions in its {name}", got)
    checks.whole("choice", choice, 0, len(several) - 1)
    return several[choice]


def _of_api(logprobs: Any) -> tuple[Any, Any]:
    """The tokens and the entries in `logprobs`, of which an OpenAI-compatible server has two forms.

    In vLLM's objects, `logprobs` are the entries alone.
    """
    if not isinstance(logprobs, Mapping):
        return None, logprobs
    content = logprobs.get("content")
    if content is None:
        return logprobs.get("tokens"), logprobs.get("top_logprobs")
    entries = [
        {_get(c, "token"): _get(c, "logprob") for c in [own, *(_get(own, "top_logprobs") or [])]}
        for own in content
    ]
    return [_get(own, "token") for own in content], entries


def _entries_of_vllm(name: str, entries: Any) -> list[Entry] | None:
    if entries is None or (isinstance(entries, Sequence) and not entries):
        return None
    checks.is_list(name, entries)
    return [None if e is None else _of_vllm(name, place, e) for place, e in enumerate(entries)]


def _of_vllm(name: str, place: int, entry: Any) -> dict[int, float]:
    """An entry of vLLM maps each id to a number, or to an object or dict with `logprob`."""
    if not hasattr(entry, "items"):
        got = f"{type(entry).__name__} at position {place}"
        checks.refuse(name, "map ids to log-probabilities", got)
    if type(entry) is dict:
        # The usual forms of JSON are checked at once, several times as fast as number by number.
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            ids: list[Any] = list(entry)
            logprobs: list[Any] = list(entry.values())
            if ids and ids[0].startswith(VLLM_ID):
                ids = [i.removeprefix(VLLM_ID) for i in ids]
            if logprobs and type(logprobs[0]) is dict:
                logprobs = [value["logprob"] for value in logprobs]
            if "".join(ids).isdecimal() and _are_logprobs(logprobs):
                return dict(zip(map(int, ids), logprobs, strict=True))
    found = {}
    for i, value in entry.items():
        p = value.get("logprob") if type(value) is dict else getattr(value, "logprob", value)
        found[_id(name, i)] = checks.logprob(name, place, p)
    return found


def _are_logprobs(values: list) -> bool:
    """Whether all values are floats and their sum is not NaN (a NaN, or both inf and -inf)."""
    return set(map(type, values)) == {float} and not math.isnan(sum(values))


def _are_ids(values: list) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0


def _id(name: str, value: Any) -> int:
    if isinstance(value, str):
        value = value.removeprefix(VLLM_ID)
        value = int(value) if value.isdecimal() else value
    return checks.token_id(name, value)


def _part_of_sglang(info: Any, side: str, tokens: Sequence[int] | None) -> Part:
    name = f"SGLang's {side}_top_logprobs"
    own, top = _get(info, f"{side}_token_logprobs"), _get(info, f"{side}_top_logprobs")
    if tokens is None and own:
        tokens = _columns(name, own)[1]
    if not top:
        return Part(name, tokens, None)
    checks.is_list(name, top)
    if own is not None and len(own) != len(top):
        checks.refuse(name, f"have an entry for each of {len(own)} tokens", len(top))
    entries = [_of_sglang(name, place, best, own) for place, best in enumerate(top)]
    return Part(name, tokens, entries)


def _of_sglang(name: str, place: int, best: Any, own: Any) -> Entry:
    """An entry of SGLang lists the most probable ids.

    `own[place]` has the log-probability and the id of the token, and is added if it is missing.
    """
    if not best:
        return None
    logprobs, ids = _columns(name, checks.is_list(name, best))
    pairs = zip(ids, logprobs, strict=True)
    if _are_ids(ids) and _are_logprobs(logprobs):
        entry = dict(pairs)
    else:
        entry = {checks.token_id(name, i): checks.logprob(name, place, p) for i, p in pairs}
    if own is not None:
        [p], [i] = _columns(name, [own[place]])
        if p is not None:
            entry.setdefault(checks.token_id(name, i), checks.logprob(name, place, p))
    return entry


def _columns(name: str, pairs: Any) -> tuple[list, list]:
    """The log-probabilities and the ids in lists of (logprob, id, text)."""
    pairs = list(pairs)
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) < 2:
            checks.refuse(name, "have lists of (logprob, id, text)", f"{pair!r:.50}")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _document(prompt: Part, generated: Part, completion: bool | None) -> Document:
    completion = prompt.entries is None if completion is None else completion
    if completion and (generated.entries is None or generated.tokens is None):
        alternative = f"{prompt.name}, or " if prompt.entries is None else ""
        rule = f"have {alternative}{generated.name} and the ids of its completion"
        got = (
            "an output without them. Request log-probabilities from the server. vLLM returns at"
            " most 20 log-probabilities per token, unless vLLM is started with max_logprobs=k"
        )
        checks.refuse("output", rule, got)
    if not completion and prompt.entries is None:
        checks.refuse("output", f"have {prompt.name} with completion=False", "none")
    if prompt.tokens is None:
        got = "none. Pass the ids as `tokens`, or add prompt_token_ids to the JSON of the output"
        checks.refuse("output", "have the prompt_token_ids of its prompt", got)
    tokens, rows = _checked(prompt, "prompt_token_ids", first=1)
    after = next(iter(generated.entries or ()), None)
    if completion:
        more, others = _checked(generated, "token_ids", first=0)
        tokens, rows, after = tokens + more, rows + others, None
    return Document(prompt.name, tokens, [*rows[1:], after])


def _checked(part: Part, ids: str, first: int) -> tuple[list[int], list[Entry]]:
    """Returns the token ids, named `ids` in errors, and the entries of a part.

    Every token must have an entry from token `first` on, which is 1 for a prompt.
    """
    name, entries, tokens = part.name, part.entries, list(part.tokens or ())
    if not _are_ids(tokens):
        tokens = [checks.token_id(ids, token) for token in tokens]
    if entries is None:
        return tokens, [None] * len(tokens)
    if not tokens or len(entries) != len(tokens):
        got = f"{len(entries)}. Request entries for all tokens, starting with the first"
        checks.refuse(name, f"have an entry for each of {len(tokens)} tokens", got)
    if first and entries[0] is not None:
        got = "a distribution. The entries are shifted by one token"
        checks.refuse(name, "begin with None, because the first token has no distribution", got)
    for place in range(first, len(tokens)):
        token, entry = tokens[place], entries[place]
        if entry is None:
            checks.refuse(name, f"have a distribution at position {place}", "None")
        if token not in entry:
            rule = f"include token {token}, the token of the text at position {place}"
            advice = "The entries belong to another text, or the entries are shifted"
            checks.refuse(name, rule, f"{list(entry)[:5]}. {advice}")
        checks.logprob(name, place, max(entry.values()), most=1e-3)
    return tokens, entries


def _read(form: Callable[..., Document], k: int, *output: Any) -> tuple[Tensor, SparseTargets]:
    checks.whole("k", k, 1, 2**16)
    tokens, _, targets = tensors_of([form(*output)], k)
    return tokens, targets


def tensors_of(documents: Sequence[Document], k: int) -> tuple[Tensor, list[int], SparseTargets]:
    """The arguments of `Writer.extend` for several documents: tokens, starts and targets.

    Slots beyond the ids of an entry are masked, and all slots of a row without an entry.
    """
    tokens, starts, ids, logprobs = array("q"), [0], array("q"), array("d")
    try:
        for document in documents:
            tokens.extend(document.tokens)
            starts.append(len(tokens))
            for row in document.rows:
                row = row or {}
                best = sorted(row, key=row.__getitem__, reverse=True)[:k]
                ids.extend(best)
                ids.extend([-1] * (k - len(best)))
                logprobs.extend(map(row.__getitem__, best))
                logprobs.extend([-math.inf] * (k - len(best)))
    except OverflowError:
        checks.refuse(documents[0].name, "have token ids below 2^63", "a larger number")
    id_ = torch.frombuffer(ids, dtype=torch.int64).view(-1, k)
    logprob = torch.frombuffer(logprobs, dtype=torch.float64).view(-1, k)
    mass = logprob.exp().sum(-1)
    checks.masses(documents[0].name, mass)
    tail = torch.log1p(-mass.clamp_max(1 - 2.0**-40))
    mask = None if bool((id_ >= 0).all()) else id_ >= 0
    targets = unchecked(id_.clamp_min(0), logprob.float(), tail.float(), mask)
    return torch.frombuffer(tokens, dtype=torch.int64), starts, targets
