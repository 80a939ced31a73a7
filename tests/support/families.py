"""Compares fused and plain training of the language models of Transformers, tiny and random.

    make test-families                           all causal LMs; rewrites the table in docs/fuse.md
    make test-families ARGS=--others             masked, seq2seq, speech and vision-language
                                                 models; rewrites the tables in
                                                 tests/clients/results.md
    make test-families ARGS="LlamaForCausalLM"   the named classes only

Each class has one of five outcomes:

- *fused*: loss and gradients equal those of the plain model, and no logits were materialised.

- *materialised*: loss and gradients are equal, but an operation materialised the logits.

- *refused*: `fuse` raises an error.

- *not built*: no tiny model of the class can be trained on this machine, even without `fuse`.

- *wrong*: any other outcome.
"""

import re
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import logitless as ll
from logitless.lazy import report
from logitless.lazy.fuse import head_of
from logitless.lazy.logits import LazyLogits
from tests.support.paths import ROOT, TESTS
from tests.support.tiny_models import V, batch, build

PAGE, OTHERS_PAGE = ROOT / "docs/fuse.md", TESTS / "clients/results.md"
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


def answers(model: nn.Module):
    """The tokens that a model generates, or the text of its error."""
    try:
        with torch.no_grad():
            given = {name: t for name, t in batch(model).items() if name != "labels"}
            if "input_ids" in given:
                given["input_ids"] = given["input_ids"][:, :4]
            return model.eval().generate(**given, max_new_tokens=4, do_sample=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.train()


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
    if not same(answers(model), said):
        return Outcome("wrong", "generates something else")
    made = [re.search("materialised by (.+?), at ", str(w.message)) for w in seen]
    by = sorted({m[1] for m in made if m})
    if (
        by
        or not logits
        or any(type(z) is not LazyLogits or z.known_values is not None for z in logits)
    ):
        return Outcome("materialised", ", ".join(by) or "the head is not called")
    return Outcome("fused", "" if torch.is_tensor(said) else f"does not generate: {said}")


def kept_logits(model: nn.Module) -> list:
    """A list to which every later training forward of the head appends its logits."""
    found = []
    head_of(model, None).register_forward_hook(
        lambda head, given, z: found.append(z) if torch.is_grad_enabled() else None
    )
    return found


def same(a, b) -> bool:
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b


def table(found: dict[str, Outcome]) -> str:
    """Markdown tables of the outcomes and of classes that are not fused, and all fused classes."""
    count = {kind: sum(o.kind == kind for o in found.values()) for kind in KINDS}
    lines = [f"| of {len(found)} classes | | |", "|---|---|---|"]
    lines += [f"| {kind} | {count[kind]} | {KINDS[kind]} |" for kind in KINDS if count[kind]]
    lines += ["", *not_fused(found)]
    fused = [re.sub("ForCausalLM$", "", name) for name, o in found.items() if o.kind == "fused"]
    return "\n".join([*lines, "", *textwrap.wrap(f"Fused: {', '.join(fused)}.", 100), ""])


def not_fused(found: dict[str, Outcome]) -> list[str]:
    """The lines of a Markdown table of the classes that are not fused, and why."""
    return ["| not fused | | cause |", "|---|---|---|"] + [
        f"| {name} | {o.kind} | {' '.join(o.cause.split()).split('. ')[0].rstrip('.')} |"
        for name, o in found.items()
        if o.kind != "fused"
    ]


def counted(found: dict[str, dict[str, Outcome]]) -> str:
    """A Markdown table of the number of outcomes per mapping, and one of all that is not fused."""
    lines = [f"| mapping | classes | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    for mapping, outcomes in found.items():
        count = [sum(o.kind == kind for o in outcomes.values()) for kind in KINDS]
        lines.append(f"| {mapping} | {len(outcomes)} | {' | '.join(map(str, count))} |")
    return "\n".join([*lines, "", *not_fused({k: v for o in found.values() for k, v in o.items()})])


def checked_all(names: Iterable[str]) -> dict[str, Outcome]:
    found = {}
    for name in names:
        found[name] = checked(name)
        print(f"{name:50} {found[name].kind:13} {found[name].cause[:200]}", flush=True)
    return found


def in_order(mapping: dict) -> list[str]:
    return sorted(set(mapping.values()), key=str.lower)


def write(page: Path, text: str) -> None:
    """Replaces the tables of a page."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    page.write_text(BLOCK.sub(lambda m: f"{m[1]}{text}\n{versions}.\n{m[2]}", page.read_text()))


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    found = {}
    if names == ["--others"]:
        of_mapping, seen = {}, set(CAUSAL.values())
        for mapping, classes in OTHERS.items():
            of_mapping[mapping] = checked_all(c for c in in_order(classes) if c not in seen)
            found |= of_mapping[mapping]
            seen |= set(found)
        write(OTHERS_PAGE, counted(of_mapping) + "\n")
    else:
        found = checked_all(names or in_order(CAUSAL))
        if not names:
            write(PAGE, table(found))
    return int(any(o.kind == "wrong" for o in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
