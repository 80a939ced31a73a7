"""Creates the inputs of a case, and finds its contenders: logitless, PyTorch, other libraries.

The `Finder` of a contender is a function that takes a case, and returns the function to time. If
the library does not support the op of the case, the result is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from math import log
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from logitless.cli import machine
from logitless.cli.report import short

from . import formulas
from .cases import COMPILED, DTYPES, EAGER, OURS, Case, Mode
from .formulas import BY_ROW, IGNORED, Inputs

OF_A_HEAD = ("workspace", "logits_dtype", "accumulate")  # options of LinearLogits, not of the loss
Finder = Callable[[Case], Callable | None]


def inputs(case: Case, device: str) -> Inputs:
    """Returns the arguments of a case's op, such as logits and uniformly random targets."""
    N, V, leaves = case.rows, case.sizes[-1], leaves_of(case, device)
    options = {name: x for name, x in case.options.items() if name not in OF_A_HEAD}
    target = torch.randint(V, (N,), device=device)
    if length := options.pop("runs", None):  # every second block of `length` rows is ignored
        target[torch.arange(N, device=device) // length % 2 == 0] = IGNORED
    if "weight" in options:
        options["weight"] = torch.rand(V, device=device) + 0.5
    rows = (target,)
    if case.op == "policy_loss":
        # The old log-probabilities are the new log-probabilities plus a little noise. For logits z
        # of variance 4, log V + 2 approximates log Σ e^z.
        noise, advantage = torch.randn(2, N, device=device)
        picked = (leaves[0].float() * leaves[1][target].float()).sum(-1)
        rows += (picked - (log(V) + 2) + 0.03 * noise, advantage)
    elif case.op == "topk_distill":
        small_tail, labels = options.pop("small_tail", False), options.pop("labels", False)
        sparse = sparse_teacher(N, V, min(options.pop("K", 64), V // 2), device)
        rows = (*sparse, target) if labels else sparse
        if small_tail:  # gives the student almost no mass outside the ids
            leaves[0].scatter_(1, rows[0], 20.0)
    elif case.op == "capture_topk":
        rows = ()
    elif case.family == "teachers":  # a dense teacher: logits, log-probabilities or probabilities
        (teacher,) = leaves_of(case, device)
        change = {"gathered_kl": torch.log_softmax, "soft_cross_entropy": torch.softmax}.get(
            case.op
        )
        rows = (change(teacher.float(), -1) if change else teacher,)
    return Inputs(leaves, rows, options)


def leaves_of(case: Case, device: str) -> tuple[Tensor, ...]:
    """Returns logits of variance 4, or hidden states and a weight whose logits have variance 4."""
    normal = partial(torch.randn, dtype=DTYPES[case.dtype], device=device)
    if case.family != "heads":
        return (normal(case.sizes).mul_(2),)
    N, D, V = case.sizes
    return normal(N, D), normal(V, D) * (2 / D**0.5)


def sparse_teacher(N: int, V: int, K: int, device: str) -> tuple[Tensor, ...]:
    """Returns ids, log-probabilities and tail of a teacher with K random ids per row."""
    logprobs = (2 * torch.randn(N, 4096, device=device)).log_softmax(-1).topk(K).values
    ids = torch.stack([torch.randperm(V, device=device)[:K] for _ in range(min(N, 64))])
    ids = ids.repeat(-(-N // len(ids)), 1)[:N]
    return ids, logprobs, torch.log1p(-logprobs.exp().sum(-1).clamp(max=0.999))


def clipped(stats, *rows) -> Tensor:
    return formulas.clipped(stats.logprob, *rows)


OURS_BY_OP = {  # ops whose arguments differ from the arguments in formulas.py
    "in place": partial(ll.cross_entropy, inplace=True),
    "logsumexp": lambda x, target: ll.logsumexp(x),
    "topk_distill": lambda x, ids, logprobs, tail, labels=None, **options: ll.topk_distill(
        x, ll.SparseTargets(ids, logprobs, tail), labels=labels, **options
    ),
    "capture_topk": lambda x, k: attrgetter("ids", "logprobs", "tail")(ll.capture_topk(x, k)),
    "gathered_kl": partial(ll.gathered_kl, reduction="mean"),
    "policy_loss": lambda x, target, *rows: ll.row_loss(clipped, x, target, rows=rows),
}


def ours(case: Case) -> Callable:
    """Returns the function of logitless that a user would call for this case."""
    name = "in place" if case.mode == Mode.INPLACE else case.op
    op = OURS_BY_OP.get(name) or getattr(ll, name)
    if case.family != "heads":
        return op
    head = {name: case.options[name] for name in OF_A_HEAD if name in case.options}
    return lambda h, W, *rows, **options: op(ll.LinearLogits(h, W, **head), *rows, **options)


def eager(case: Case) -> Callable | None:
    """Returns the PyTorch formula, or None for in-place cases. PyTorch has no in-place losses."""
    formula = formulas.FORMULAS[case.op]
    op = formula if case.op in BY_ROW else lambda *x, **options: formula(*x, **options).mean()
    op = F.cross_entropy if case.op == "cross_entropy" else op
    if case.family == "heads":
        return lambda hidden, weight, *rows: op(F.linear(hidden, weight), *rows)  # type: ignore
    return None if case.mode == Mode.INPLACE else op


def compiled(case: Case) -> Callable | None:
    if not case.compiled or not (op := eager(case)):
        return None
    torch.compiler.reset()  # avoids torch.compile's limit on recompilations
    return torch.compile(op, dynamic=False)


def of_log_softmax(loss):
    """Converts a loss over log-probabilities to a loss over logits."""
    return lambda x, teacher, **_: loss(x.log_softmax(-1), teacher.log_softmax(-1))


def liger(module) -> dict:
    loss = import_module(f"{module.__name__}.functional").liger_cross_entropy
    head = module.LigerFusedLinearCrossEntropyLoss()
    return {
        "logits: cross_entropy": loss,
        "logits: in place": loss,  # `liger_cross_entropy` always overwrites the logits
        "teachers: kl_div, forward": of_log_softmax(module.LigerKLDIVLoss(log_target=True)),
        "teachers: jsd": of_log_softmax(module.LigerJSD(beta=0.5)),
        "heads: cross_entropy": lambda hidden, weight, target: head(weight, hidden, target),
    }


def fla(module) -> dict:
    """Returns the loss functions of the library fla.

    The logsumexp of fla is left out, because its autotuning takes minutes.
    """
    head = module.FusedLinearCrossEntropyLoss()
    return {
        "heads: cross_entropy": lambda hidden, weight, target: head(hidden, target, weight),
        **both_ways(import_module(f"{module.__name__}.fused_cross_entropy").FusedCrossEntropyLoss),
    }


def both_ways(loss) -> dict:
    """Returns an op that keeps the logits, and an op that overwrites the logits in backward.

    `loss(**options)` must return an op. For example, `loss` can be a class whose instances are ops.
    If a library has only a function `f`, pass `partial(partial, f)`. Then `loss(**options)` returns
    `partial(f, **options)`, which is an op.
    """
    return {"logits: cross_entropy": loss(), "logits: in place": loss(inplace_backward=True)}


BUILT_IN: dict[str, Finder] = {OURS: ours, EAGER: eager, COMPILED: compiled}
RIVALS = {
    "liger": ("liger_kernel.transformers", liger),
    "fla": ("fla.modules", fla),
    "flash-attn": ("flash_attn.losses.cross_entropy", lambda m: both_ways(m.CrossEntropyLoss)),
    "quack": ("quack.cross_entropy", lambda m: both_ways(partial(partial, m.cross_entropy))),
    "cce": ("cut_cross_entropy", lambda m: {"heads: cross_entropy": m.linear_cross_entropy}),
}
NAMES = (*BUILT_IN, *RIVALS)


def rival(ops: dict[str, Callable], case: Case) -> Callable | None:
    works = ("in place",) if case.mode == Mode.INPLACE else (case.work, case.op)
    return next((op for work in works if (op := ops.get(f"{case.family}: {work}"))), None)


def load(names: Iterable[str], device: str) -> tuple[dict[str, Finder], dict[str, str]]:
    """Returns the contenders that can run, and the version of every contender.

    If a contender cannot run, the reason is returned instead of the version.
    """
    loaded = {name: BUILT_IN[name] for name in names if name in BUILT_IN}
    versions = {name: ll.__version__ if name == OURS else torch.__version__ for name in loaded}
    for name in (name for name in names if name in RIVALS):
        path, find_ops = RIVALS[name]
        versions[name] = "absent: needs a GPU"
        if device == "cuda":
            try:
                loaded[name] = partial(rival, find_ops(import_module(path)))
                versions[name] = machine.installed(path.split(".")[0]) or "version unknown"
            except Exception as error:  # an import can raise any error
                versions[name] = f"absent: {short(error)}"
    return loaded, versions
