"""Who takes part, and how each of them is called.

A contender is a name and a function that imports it and returns its ops, keyed as the cases name
them: "cross_entropy", "cross_entropy in place", "logsumexp", "score", each called as
`f(logits, target)`. What a library doesn't have is left out, and it sits out those cases.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll

Ops = dict[str, Callable]
OURS, EAGER, COMPILED = "logitless", "eager", "compile"


class Contender(NamedTuple):
    name: str
    package: str  # as the package index knows it
    load: Callable[[], Ops]
    kind: str  # "torch", or what its kernels are written in, for a GPU alone


def logitless() -> Ops:
    return {
        "cross_entropy": ll.cross_entropy,
        "cross_entropy in place": lambda x, t, **options: ll.cross_entropy(
            x, t, inplace=True, **options
        ),
        "logsumexp": lambda x, t: ll.logsumexp(x),
        "score": ll.score,
    }


def eager() -> Ops:
    return {
        "cross_entropy": lambda x, t: F.cross_entropy(x, t),
        "logsumexp": lambda x, t: torch.logsumexp(x, -1),
        "score": torch_score,
    }


def compiled() -> Ops:
    return {op: torch.compile(f, dynamic=False) for op, f in eager().items()}


def liger() -> Ops:
    from liger_kernel.transformers.functional import liger_cross_entropy

    # One function for both: it always leaves the gradient in the caller's logits.
    return {
        "cross_entropy": liger_cross_entropy,
        "cross_entropy in place": liger_cross_entropy,
    }


def fla() -> Ops:
    from fla.modules.fused_cross_entropy import FusedCrossEntropyLoss

    # Its logsumexp is left out: one block of 65,536 a program, autotuned, takes minutes to compile.
    return {
        "cross_entropy": FusedCrossEntropyLoss(),
        "cross_entropy in place": FusedCrossEntropyLoss(inplace_backward=True),
    }


def flash_attn() -> Ops:
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    return {
        "cross_entropy": CrossEntropyLoss(),
        "cross_entropy in place": CrossEntropyLoss(inplace_backward=True),
    }


def quack() -> Ops:
    from quack.cross_entropy import cross_entropy

    return {
        "cross_entropy": cross_entropy,
        "cross_entropy in place": lambda x, t: cross_entropy(x, t, inplace_backward=True),
    }


def cut_cross_entropy() -> Ops:
    # Fuses the LM head with its loss: there is nothing to call on logits already in hand.
    import cut_cross_entropy  # noqa: F401

    return {}


CONTENDERS = (
    Contender(OURS, "logitless", logitless, "torch"),
    Contender(EAGER, "torch", eager, "torch"),
    Contender(COMPILED, "torch", compiled, "torch"),
    Contender("liger", "liger-kernel", liger, "triton"),
    Contender("fla", "fla-core", fla, "triton"),
    Contender("flash-attn", "flash-attn", flash_attn, "triton"),
    Contender("quack", "quack-kernels", quack, "cute"),
    Contender("cce", "cut-cross-entropy", cut_cross_entropy, "triton"),
)
NAMES = tuple(contender.name for contender in CONTENDERS)
TRITON_RIVALS = tuple(contender.name for contender in CONTENDERS if contender.kind == "triton")


def torch_score(x: Tensor, target: Tensor):
    """What one writes without a library: an fp32 copy of the logits, and a few more."""
    logp = F.log_softmax(x.float(), -1)
    logprob = logp.gather(-1, target[:, None])[:, 0]
    return logprob, -(logp.exp() * logp).sum(-1), torch.logsumexp(x.float(), -1), x.argmax(-1)


def load(names: list[str], device: str) -> tuple[dict[str, Ops], dict[str, str]]:
    """The ops of each contender that can run here, and for each a version or a reason not to."""
    loaded, standing = {}, {}
    for name, package, importer, kind in CONTENDERS:
        if name not in names:
            continue
        if device == "cpu" and kind != "torch":
            standing[name] = "absent: needs a GPU"
            continue
        try:
            loaded[name] = importer()
            standing[name] = version(package)
            if not loaded[name]:
                standing[name] += " (no op on logits: sits out)"
        except Exception as error:  # a rival may fail to import in its own way
            standing[name] = f"absent: {short(error)}"
    return loaded, standing


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(ll, "__version__", "unknown") if package == "logitless" else "unknown"


def short(error: BaseException) -> str:
    """An exception in one line of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:120]
