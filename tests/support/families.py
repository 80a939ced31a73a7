"""Compares fused and plain training of the language models of Transformers, tiny and random.

    make test-families                           all causal LMs; rewrites the table in docs/fuse.md,
                                                 and the names in benchmarks/results
    make test-families ARGS=--others             masked, seq2seq, speech and vision-language
                                                 models; prints a table
    make test-families ARGS="LlamaForCausalLM"   the named classes only

Each class has one of five outcomes:

- *fused*: loss and gradients equal those of the plain model, and no logits were materialised.

- *materialised*: loss and gradients are equal, but an operation materialised the logits.

- *refused*: `fuse` raises an error.

- *not built*: no tiny model of the class can be trained on this machine, even without `fuse`.

- *wrong*: any other outcome.

A class that is fused or materialised must also generate the same tokens as the plain model, in each
of the WAYS. The prompts are short, so `generate` runs with lazy logits only because the limit of
small logits is set to 0 bytes (LIMIT).
"""

import re
import sys
import textwrap
import warnings
from collections.abc import Iterable
from typing import NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import logitless as ll
from logitless.lazy import recipe, report
from logitless.lazy.fuse import named_head, names_of
from logitless.lazy.logits import LazyLogits
from tests.support.paths import ROOT
from tests.support.tiny_models import V, batch, build

PAGE = ROOT / "docs/fuse.md"
NAMES = ROOT / "benchmarks/results/x86_64-cpu/families.md"
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
OTHERS = {  # a class counts in the first mapping that has it
    "masked LM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "vision-language": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
BLOCK = re.compile(r"(<!-- families -->\n).*?(<!-- end -->)", re.DOTALL)
LOSS, GRADIENT = 2e-6, 1e-5  # the largest allowed relative errors in fp32
CALLS: tuple[dict, ...] = ({}, {"num_items_in_batch": torch.tensor(7)})
WORKSPACE = 5 * V * 4  # bytes of five rows of logits, so that each batch has several chunks
WAYS: dict[str, dict] = {  # the options of `generate`
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beam search": {"do_sample": False, "num_beams": 2},
}
LIMIT = 0  # without gradients, logits of more bytes than LIMIT are lazy
PROMPT, NEW = 4, 5  # tokens
KINDS = {
    "fused": "the same loss, gradients and generated tokens; no logits in training",
    "materialised": "the same, but the logits are made",
    "refused": "`fuse` raises an error",
    "not built": "no small random model of the class can be trained, fused or not",
    "wrong": "another loss, gradient or token",
}


class Outcome(NamedTuple):
    """The outcome of one class of models, and the cause."""

    kind: str  # one of KINDS
    cause: str = ""
    generates: tuple[str, ...] = ()  # the WAYS in which fused and plain model gave the same tokens
    silence: str = ""  # the first error of `generate` of the plain model


def trained(model: nn.Module, **given):
    """The loss and the gradients of all parameters."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch(model), **given).loss
    loss.backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def apart(got, want) -> str:
    """A text about the first difference of two steps that is too large, or ""."""
    (loss, grads), (plain, others) = got, want
    far = float((loss - plain).abs() / plain.abs().clamp(min=1))
    if not far <= LOSS:
        return f"loss {far:.1e} apart"
    if grads.keys() != others.keys():
        return f"gradients of other parameters: {sorted(grads.keys() ^ others.keys())}"
    others = {name: g for name, g in others.items() if g.numel()}
    top = max([torch.tensor(0.0), *(g.abs().max() for g in others.values())])
    for name, want in others.items():
        far = float((grads[name] - want).abs().max() / max(want.abs().max(), top / 1000))
        if not far <= GRADIENT:
            return f"gradient of {name} {far:.1e} apart"
    return ""


def prompt(model: nn.Module) -> dict:
    """The inputs of `generate`. Inputs with one number per token are cut to the prompt's length."""
    given = {name: t for name, t in batch(model).items() if name != "labels"}
    length = given["input_ids"].shape[1] if "input_ids" in given else None
    return {name: t[:, :PROMPT] if t.shape[1] == length else t for name, t in given.items()}


def answers(model: nn.Module, ways: Iterable[str] = WAYS) -> dict[str, Tensor | str]:
    """The tokens that a model generates in each way, or the text of its error."""
    found: dict[str, Tensor | str] = {}
    for way in ways:
        torch.manual_seed(5)
        try:
            with torch.no_grad():
                # Musicgen's `generate` needs num_return_sequences.
                options = {"max_new_tokens": NEW, "num_return_sequences": 1, **WAYS[way]}
                found[way] = model.eval().generate(**prompt(model), **options)  # pyright: ignore
        except Exception as error:
            found[way] = f"{type(error).__name__}: {error}"
        finally:
            model.train()
    return found


def said_otherwise(model: nn.Module, want: dict[str, Tensor | str]) -> str:
    """A text about the first way in which a fused model generates other tokens, or "".

    One greedy run has plain logits, because the logits of each step are small. All other runs have
    lazy logits.
    """
    if not same(answers(model, ["greedy"])["greedy"], want["greedy"]):
        return "generates other tokens with plain logits"
    with patch.object(recipe, "SMALL", LIMIT):
        logits = kept_logits(model, training=False)
        for way, plain in want.items():
            del logits[:]
            if not same(answers(model, [way])[way], plain):
                return f"generates other tokens by {way}"
            if torch.is_tensor(plain) and not any(type(z) is LazyLogits for z in logits):
                return f"has no lazy logits in {way}"
    return ""


def refused(model: nn.Module) -> str:
    """The error that `fuse` raises for a model, or ""."""
    try:
        ll.unfuse(ll.fuse(model))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def checked(name: str) -> Outcome:
    """Builds a model of the class, trains it plain and fused, and compares the results."""
    try:
        model = build(name)
        if refusal := refused(model):
            return Outcome("refused", refusal)
        want = [trained(model, **call) for call in CALLS]
    except Exception as error:
        return Outcome("not built", f"{type(error).__name__}: {error}")
    said = answers(model)
    logits = kept_logits(ll.fuse(model, workspace=WORKSPACE))
    report._warned.clear()  # so that warnings are given again, which are given once per process
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got = [trained(model, **call) for call in CALLS]
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    differences = [apart(found, plain) for found, plain in zip(got, want, strict=True)]
    if any(differences):
        return Outcome("wrong", "; ".join(filter(None, differences)))
    if other := said_otherwise(model, said):
        return Outcome("wrong", other)
    generates = tuple(way for way, tokens in said.items() if torch.is_tensor(tokens))
    silence = next((t for t in said.values() if isinstance(t, str)), "")
    made = [re.search("materialised by (.+?), at ", str(w.message)) for w in seen]
    by = sorted({m[1] for m in made if m})
    if by or not logits or any(type(z) is not LazyLogits or z.known for z in logits):
        cause = ", ".join(by) or "the head is not called"
        return Outcome("materialised", cause, generates, silence)
    return Outcome("fused", "", generates, silence)


def kept_logits(model: nn.Module, training: bool = True) -> list:
    """A list to which every later forward of a head appends its logits.

    If `training` is true, only forwards with gradients count, otherwise only those without.
    """
    found = []
    for name in names_of(model, None):
        named_head(model, name).register_forward_hook(
            lambda head, given, z: found.append(z) if torch.is_grad_enabled() == training else None
        )
    return found


def same(a, b) -> bool:
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b


def table(found: dict[str, Outcome]) -> str:
    """Markdown tables of the outcomes, and of the classes that are not fused."""
    count = {kind: sum(o.kind == kind for o in found.values()) for kind in KINDS}
    lines = [f"| of {len(found)} classes | | |", "|---|---|---|"]
    lines += [f"| {kind} | {count[kind]} | {KINDS[kind]} |" for kind in KINDS if count[kind]]
    return "\n".join([*lines, "", *not_fused(found), ""])


def details(found: dict[str, Outcome]) -> str:
    """How many classes generate the same tokens, which do not, and the names of all fused ones."""
    fused = [re.sub("ForCausalLM$", "", name) for name, o in found.items() if o.kind == "fused"]
    lines = ["# Causal language models of Transformers, fused", "", *tokens(found), ""]
    lines += [*not_generating(found), "", *textwrap.wrap(f"Fused: {', '.join(fused)}.", 100), ""]
    return "\n".join(lines)


def tokens(found: dict[str, Outcome]) -> list[str]:
    """The lines of a Markdown table of the number of classes that generate the same tokens."""
    lines = ["| the same tokens from `generate` | classes |", "|---|---|"]
    return lines + [
        f"| {way} | {sum(way in o.generates for o in found.values())} |" for way in WAYS
    ]


def not_generating(found: dict[str, Outcome]) -> list[str]:
    """The lines of a Markdown table of the classes with a `generate` that raises an error."""
    lines = ["| plain model does not generate | by | error |", "|---|---|---|"]
    for name, o in found.items():
        if o.silence and hasattr(getattr(transformers, name), "generate"):
            ways = ", ".join(way for way in WAYS if way not in o.generates)
            lines.append(f"| {name} | {ways} | {first_sentence(o.silence)} |")
    return lines


def first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def not_fused(found: dict[str, Outcome]) -> list[str]:
    """The lines of a Markdown table of the classes that are not fused, and why."""
    return ["| not fused | | cause |", "|---|---|---|"] + [
        f"| {name} | {o.kind} | {first_sentence(o.cause)} |"
        for name, o in found.items()
        if o.kind != "fused"
    ]


def counted(found: dict[str, dict[str, Outcome]]) -> str:
    """A Markdown table of the number of outcomes per mapping, and tables of the exceptions."""
    columns = [*KINDS, *WAYS]
    lines = [f"| mapping | classes | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for mapping, outcomes in found.items():
        count = [sum(o.kind == kind for o in outcomes.values()) for kind in KINDS]
        count += [sum(way in o.generates for o in outcomes.values()) for way in WAYS]
        lines.append(f"| {mapping} | {len(outcomes)} | {' | '.join(map(str, count))} |")
    both = {name: o for outcomes in found.values() for name, o in outcomes.items()}
    return "\n".join([*lines, "", *not_generating(both), "", *not_fused(both)])


def checked_all(names: Iterable[str]) -> dict[str, Outcome]:
    found = {}
    for name in names:
        found[name] = checked(name)
        kind, cause, generates, silence = found[name]
        how = f"generates by {', '.join(generates)}" if generates else ""
        print(f"{name:50} {kind:13} {how:45} {(cause or silence)[:200]}", flush=True)
    return found


def in_order(mapping: dict) -> list[str]:
    return sorted(set(mapping.values()), key=str.lower)


def write(found: dict[str, Outcome]) -> None:
    """Replaces the table of docs/fuse.md, and the file of names."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}."
    text = f"{table(found)}\n{versions}\n"
    PAGE.write_text(BLOCK.sub(lambda m: f"{m[1]}{text}{m[2]}", PAGE.read_text()))
    NAMES.write_text(f"{details(found)}\n{versions} Written by `make test-families`.\n")


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    found = {}
    if names == ["--others"]:
        of_mapping, seen = {}, set(CAUSAL.values())
        for mapping, classes in OTHERS.items():
            of_mapping[mapping] = checked_all(c for c in in_order(classes) if c not in seen)
            found |= of_mapping[mapping]
            seen |= set(found)
        print(counted(of_mapping))
    else:
        found = checked_all(names or in_order(CAUSAL))
        if not names:
            write(found)
    return int(any(o.kind == "wrong" for o in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
