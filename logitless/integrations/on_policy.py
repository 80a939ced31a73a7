"""Samples completions from a student model, for on-policy distillation."""

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core import call as _call
from ..core import tensor_checks as _checks

IGNORED = -100  # the label of tokens that the loss does not count
COLUMNS = ("input_ids", "attention_mask", "labels", "position_ids")


@_call.named()
def sample(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    generation_config: Any = None,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Samples a completion of each prompt, and returns `input_ids`, `attention_mask` and `labels`.

    `model` is a causal model of Transformers, fused or not, with or without an adapter of PEFT.
    `inputs` is a batch with `input_ids` of shape (B, T). The prompt of a row is everything before
    its first label that is not -100, or the whole row without such a label. Tokens whose
    `attention_mask` is 0 are padding, possibly on both sides.

    The result holds tensors of shape (B, T'), each row the prompt, the completion and padding. The
    labels are the tokens of the completion, and -100 elsewhere. A completion ends at its first
    end-of-text token, which is the last label of the row, so `model(**batch)` and `distill_loss`
    count exactly the tokens that the model sampled.

    `generation_config` is a `GenerationConfig` with `do_sample=True` and `max_new_tokens`, by
    default 128. What it sets holds, and apart from that the tokens are drawn from the model's own
    distribution: of the model's `generation_config`, only token ids are used. With
    `num_return_sequences=n`, the result has n rows per prompt. The model samples in eval mode and
    without gradients, and each module returns to its mode. With a `seed`, the samples depend on it
    alone and PyTorch's random state stays as it is; without one, they depend on that state.

    >>> batch = sample(student, {"input_ids": prompts}, seed=step)
    >>> with torch.no_grad(), ll.lazy_logits():
    ...     wanted = teacher(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    >>> logits = student(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    >>> counts = batch["labels"][:, 1:] != -100
    >>> ll.kl_div(logits[:, :-1], wanted[:, :-1], direction="reverse", mask=counts).backward()
    """
    check_model(model)
    check_seed(seed)
    config = _complete(checked_config(generation_config), model)
    device = next(model.parameters()).device
    prompts, is_prompt = _prompts(inputs, config.pad_token_id)
    prompts, is_prompt = prompts.to(device), is_prompt.to(device)
    with torch.no_grad(), _in_eval_mode(model), _with_config(model, config), _seeded(seed, model):
        texts = model.generate(  # type: ignore
            input_ids=prompts, attention_mask=is_prompt.long(), generation_config=config
        )
    texts = getattr(texts, "sequences", texts)
    is_prompt = is_prompt.repeat_interleave(len(texts) // len(is_prompt), 0)
    return _batch(texts, is_prompt, _ids(config.eos_token_id), config.pad_token_id)


def draws_on_policy(share: float, seed: int, step: int, batch: int) -> bool:
    """Whether the student samples this batch, with the probability `share`.

    Depends only on the arguments, so that all ranks and a resumed run agree.
    """
    return random.Random(f"on_policy {seed} {step} {batch}").random() < share


def seed_of(seed: int, step: int, batch: int, rank: int) -> int:
    """The seed of the samples of a batch. Each rank has its own."""
    return random.Random(f"sample {seed} {step} {batch} {rank}").getrandbits(63)


def checked_config(config: Any) -> Any:
    from transformers import GenerationConfig

    if config is None:
        return GenerationConfig(do_sample=True, max_new_tokens=128)
    if not isinstance(config, GenerationConfig):
        raise TypeError(
            f"generation_config must be a GenerationConfig, got {type(config).__name__}."
        )
    if not config.do_sample:
        raise ValueError(
            "generation_config must have do_sample=True, because on-policy distillation trains on"
            f" samples, got do_sample={config.do_sample}."
        )
    if not config.max_new_tokens:
        raise ValueError(
            "generation_config must have max_new_tokens, the largest number of tokens of a"
            f" completion, got max_new_tokens={config.max_new_tokens}."
        )
    if config.temperature == 0:  # Transformers 4 would decode greedily
        raise ValueError(
            "generation_config must have a temperature above 0, because a greedy completion is no"
            f" sample, got temperature={config.temperature}."
        )
    if config.num_beams not in (None, 1):
        raise ValueError(
            "generation_config must have num_beams=1, because a beam search does not draw from the"
            f" student's distribution, got num_beams={config.num_beams}."
        )
    if config.stop_strings is not None:
        raise ValueError(
            "generation_config must have stop_strings=None, because only the tokens in"
            f" eos_token_id end a completion, got stop_strings={config.stop_strings!r:.50}."
        )
    return config


def check_model(model: Any) -> None:
    if not callable(getattr(model, "generate", None)):
        raise TypeError(
            "model must have the method generate of Transformers' models, got"
            f" {type(model).__name__}."
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            "model must be a causal model, because a completion continues its prompt, got the"
            f" encoder-decoder {type(model).__name__}."
        )


def check_seed(seed: Any) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int or None, got {seed!r}.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2^63), got {seed}.")


def _complete(config: Any, model: Any) -> Any:
    """A copy of the config, with the token ids and the `top_k` that it lacks.

    Token ids are the model's. Without a `pad_token_id`, rows are padded with the first end-of-text
    token, or with the token 0.
    """
    from transformers import GenerationConfig

    config = copy.deepcopy(config)
    for module in _owners(model)[:1]:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(module.generation_config, name, None))
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(_ids(config.eos_token_id)), 0)
    # the only default that changes the distribution: 50, in Transformers 5 added by `generate`
    if config.top_k == GenerationConfig().top_k:
        config.top_k = 0
    return config


def _owners(model: nn.Module) -> list[Any]:
    """The modules with a GenerationConfig, which are inside a wrapper such as PEFT's."""
    return [m for m in model.modules() if "generation_config" in vars(m)]


def _ids(eos: Any) -> list[int]:
    if eos is None:
        return []
    return torch.as_tensor(eos).flatten().tolist()


def _prompts(inputs: Mapping[str, Any], pad: int) -> tuple[Tensor, Tensor]:
    """The prompts of a batch, padded on the left, and a mask that is False at padding."""
    ids, is_token, labels = _checked_columns(inputs)
    has_label = torch.zeros_like(is_token) if labels is None else (labels != IGNORED) & is_token
    is_prompt = is_token & (has_label.cumsum(-1) == 0)
    lengths = is_prompt.sum(-1)
    if not bool((lengths > 0).all()):
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(
            "labels must be -100 for the tokens of the prompt at the beginning of each row, got no"
            f" prompt in row {row}. The collator must set these labels to -100."
        )
    order = torch.sort(is_prompt, dim=-1, stable=True).indices  # moves the prompt to the end
    width = int(lengths.max())
    order = order[:, ids.shape[1] - width :]
    is_prompt = is_prompt.gather(-1, order)
    return ids.gather(-1, order).masked_fill(~is_prompt, pad), is_prompt


def _checked_columns(inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The token ids, a mask that is False at padding, and the labels or None."""
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), Tensor):
        got = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise TypeError(f"inputs must be a batch with the tensor input_ids, got {got}.")
    unknown = sorted(inputs.keys() - {*COLUMNS})
    if unknown:
        raise ValueError(
            f"inputs must have only the columns {', '.join(COLUMNS)}, because a sampled text has no"
            f" other columns, got {', '.join(unknown)}."
        )
    ids = inputs["input_ids"]
    _checks._integer("input_ids", ids)
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(
            "input_ids must have shape (B, T) with at least one token,"
            f" got shape {tuple(ids.shape)}."
        )
    for name in COLUMNS[1:3]:
        t = inputs.get(name)
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}.")
        if t is not None and t.shape != ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids, {tuple(ids.shape)},"
                f" got {tuple(t.shape)}."
            )
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    _one_text_per_row(inputs.get("position_ids"), is_token)
    return ids, is_token, labels


def _one_text_per_row(positions: Tensor | None, is_token: Tensor) -> None:
    if positions is None:
        return
    begins = ((positions.expand_as(is_token) == 0) & is_token).sum(-1)
    if int(begins.max()) > 1:
        row = int(begins.argmax())
        raise ValueError(
            "position_ids must be 0 only once per row, because each row has one prompt, got"
            f" {int(begins[row])} texts in row {row}. Use a collator that does not pack texts."
        )


def _batch(texts: Tensor, is_prompt: Tensor, eos: list[int], pad: int) -> dict[str, Tensor]:
    """The sampled texts as a batch whose rows are padded on the right."""
    answer = texts[:, is_prompt.shape[1] :]
    ends = torch.isin(answer, torch.tensor(eos, dtype=answer.dtype, device=answer.device)).int()
    is_answer = ends.cumsum(-1) - ends == 0  # True up to and including the first end-of-text token
    is_token = torch.cat((is_prompt, is_answer), -1)
    order = torch.sort(~is_token, dim=-1, stable=True).indices  # places padding last
    order = order[:, : int(is_token.sum(-1).max())]
    has_label = torch.cat((torch.zeros_like(is_prompt), is_answer), -1).gather(-1, order)
    is_token, texts = is_token.gather(-1, order), texts.gather(-1, order)
    return {
        "input_ids": texts.masked_fill(~is_token, pad),
        "attention_mask": is_token.long(),
        "labels": texts.masked_fill(~has_label, IGNORED),
    }


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


@contextlib.contextmanager
def _with_config(model: nn.Module, config: Any) -> Iterator[None]:
    """Replaces the model's own GenerationConfig, which `generate` lays under the given one."""
    own = [(module, module.generation_config) for module in _owners(model)]
    try:
        for module, _ in own:
            module.generation_config = config
        yield
    finally:
        for module, kept in own:
            module.generation_config = kept


@contextlib.contextmanager
def _seeded(seed: int | None, model: nn.Module) -> Iterator[None]:
    """Seeds the CPU and the model's devices, and restores their states at the end.

    `torch.manual_seed` would also seed all other devices.
    """
    if seed is None:
        yield
        return
    devices = sorted({p.device for p in model.parameters() if p.device.type != "cpu"}, key=str)
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            getattr(torch, kind).default_generators[device.index].manual_seed(seed)
        yield
