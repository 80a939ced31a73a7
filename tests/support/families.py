"""Every causal language model of Transformers, tiny and random: fused, it trains as it did before.

    make test-families                               all, and the table in docs/fuse.md anew
    make test-families ARGS="LlamaForCausalLM"       some, by the names of their classes

A family is *fused* if loss and gradients are those of the plain model and no logits were made,
*materialised* if they are, but an operation made the logits, *refused* if `fuse` says that it
cannot, *not built* if no tiny model of it trains here even without us, and *wrong* otherwise.
"""

import re
import sys
import textwrap
import warnings
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import logitless as ll
from logitless.lazy import logits as lazy
from logitless.lazy.fuse import linear_head
from logitless.lazy.logits import LazyLogits
from tests.support.paths import ROOT
from tests.support.tiny_models import V, batch, build

PAGE = ROOT / "docs/fuse.md"
BLOCK = re.compile(r"(<!-- families -->\n).*?(<!-- end -->)", re.DOTALL)
LOSS, GRADIENT = 2e-6, 1e-5  # relative errors allowed in fp32
CALLS: tuple[dict, ...] = ({}, {"num_items_in_batch": torch.tensor(7)})
WORKSPACE = 5 * V * 4  # five rows of logits at a time, so that chunks add up
KINDS = {
    "fused": "the same loss, gradients and generated tokens; no logits in training",
    "materialised": "the same, but the logits are made",
    "refused": "`fuse` raises an error",
    "not built": "no small random model of it trains, fused or not",
    "wrong": "another loss, gradient or token",
}


class Outcome(NamedTuple):
    """What became of a family."""

    kind: str  # one of KINDS
    cause: str = ""


def trained(model: nn.Module, **given):
    """The loss and every parameter's gradient."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch(model), **given).loss
    loss.backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def apart(got, want) -> str:
    """Where two steps differ by more than is allowed, in words."""
    (loss, grads), (plain, others) = got, want
    far = float((loss - plain).abs() / plain.abs().clamp(min=1))
    if not far <= LOSS:
        return f"loss {far:.1e} apart"
    if grads.keys() != others.keys():
        return f"gradients of other parameters: {sorted(grads.keys() ^ others.keys())}"
    top = max(g.abs().max() for g in others.values())
    for name, want in others.items():
        far = float((grads[name] - want).abs().max() / max(want.abs().max(), top / 1000))
        if not far <= GRADIENT:
            return f"gradient of {name} {far:.1e} apart"
    return ""


def answers(model: nn.Module):
    """What it generates, or why it cannot."""
    try:
        with torch.no_grad():
            ids = batch(model)["input_ids"][:, :4]
            return model.eval().generate(ids, max_new_tokens=4, do_sample=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.train()


def refused(model: nn.Module) -> str:
    """What `fuse` says against the model; nothing, if it takes it."""
    try:
        ll.unfuse(ll.fuse(model))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def checked(name: str) -> Outcome:
    """Build one of the family, train it plain and fused, and compare."""
    try:
        model = build(name)
        if refusal := refused(model):
            return Outcome("refused", refusal)
        want = [trained(model, **call) for call in CALLS]
    except Exception as error:
        return Outcome("not built", f"{type(error).__name__}: {error}")
    said = answers(model)
    logits = kept_logits(ll.fuse(model, workspace=WORKSPACE))
    lazy._warned.clear()  # which are told once in a process
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
    made = [re.search("materialised by ([^;]+)", str(w.message)) for w in seen]
    by = sorted({m[1] for m in made if m})
    if (
        by
        or not logits
        or any(type(z) is not LazyLogits or z.dense_values is not None for z in logits)
    ):
        return Outcome("materialised", ", ".join(by) or "the head is not called")
    return Outcome("fused", "" if torch.is_tensor(said) else f"does not generate: {said}")


def kept_logits(model: nn.Module) -> list:
    """What the head returns from now on."""
    found = []
    linear_head(model, None).register_forward_hook(
        lambda head, given, z: found.append(z) if torch.is_grad_enabled() else None
    )
    return found


def same(a, b) -> bool:
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b


def table(found: dict[str, Outcome]) -> str:
    """Markdown: how many of each kind, then each that is not fused, then the names of the rest."""
    count = {kind: sum(o.kind == kind for o in found.values()) for kind in KINDS}
    lines = [f"| of {len(found)} classes | | |", "|---|---|---|"]
    lines += [f"| {kind} | {count[kind]} | {KINDS[kind]} |" for kind in KINDS if count[kind]]
    lines += ["", "| not fused | | cause |", "|---|---|---|"]
    lines += [
        f"| {name} | {o.kind} | {' '.join(o.cause.split()).split('. ')[0].rstrip('.')} |"
        for name, o in found.items()
        if o.kind != "fused"
    ]
    fused = [re.sub("ForCausalLM$", "", name) for name, o in found.items() if o.kind == "fused"]
    return "\n".join([*lines, "", *textwrap.wrap(f"Fused: {', '.join(fused)}.", 140), ""])


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    found = {}
    for name in names or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower):
        found[name] = checked(name)
        print(f"{name:50} {found[name].kind:13} {found[name].cause[:200]}", flush=True)
    if not names:
        versions = (
            f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
        )
        PAGE.write_text(
            BLOCK.sub(lambda m: f"{m[1]}{table(found)}\n{versions}.\n{m[2]}", PAGE.read_text())
        )
    return int(any(o.kind == "wrong" for o in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
