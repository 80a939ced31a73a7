"""Every public function: how it is called, what it means, and what its arguments may be.

`call` and `means` take the source of logits and the same keyword arguments; `means` is a definition
of oracle.py, of a tensor in any precision.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import logitless as ll
from tests.support import oracle

from . import arguments as args
from . import draws, groups, slots, teachers
from .arguments import Argument
from .sources import SHARDS, SOURCES, TENSORS

UNKNOWN = -(2**60)  # of a class that rounding decides

# --- definitions


def ignored_rows(x, ids=None, ignore_index=-100, mask=None) -> Tensor:
    """True in rows whose mask is 0, or whose first id is ignore_index."""
    none = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    ignored = none if mask is None else mask == 0
    if ids is not None and (ids.dim() < x.dim() or ids.shape[-1]):
        ignored = ignored | ((ids if ids.dim() < x.dim() else ids[..., 0]) == ignore_index)
    return ignored


def cross_entropy(x, target, *, ignore_index=-100, mask=None, **how):
    target = target.where(~ignored_rows(x, target, ignore_index, mask), -100)
    return oracle.cross_entropy(x, target, **how)


def stats(
    x, ids=None, *, entropy=False, total=False, argmax=False, rank=False, ignore_index=-100,
    mask=None, **how,
) -> dict[str, Tensor]:  # fmt: skip
    """What row_stats gives; 0 in ignored rows, and argmax and rank -1."""
    found = {"lse": oracle.logsumexp(x, **how)}
    ignored = ignored_rows(x, ids, ignore_index, mask)
    if ids is not None:
        at = ids.masked_fill(ignored if ids.dim() < x.dim() else ignored.unsqueeze(-1), 0)
        found["picked"] = oracle.picked(x, at, **how)
        found["logprob"] = oracle.token_logprobs(x, at, **how)
    if entropy:
        found["entropy"] = oracle.entropy(x, **how)
    if total:
        found["total"] = oracle.total(x, **how)
    if argmax:
        found["argmax"] = argmax_of(x, **how)
    if rank:
        found["rank"] = rank_of(x, at if ids.dim() < x.dim() else at[..., 0], **how)
    return {name: without(ignored, t, _blank(t)) for name, t in found.items()}


def argmax_of(x: Tensor, temperature=1.0, softcap=None) -> Tensor:
    """The lowest of equals; UNKNOWN of NaN, and where a softcap makes equal but for rounding."""
    top = x.amax(-1, keepdim=True)
    first = (x == top).int().argmax(-1).masked_fill(top.isnan().squeeze(-1), UNKNOWN)
    if softcap is None:
        return first
    z, z_top = oracle.z_of(x, 1.0, softcap), oracle.z_of(top, 1.0, softcap)
    close = (x != top) & (z >= z_top - 1e-5 * softcap)
    return first.masked_fill(close.any(-1), UNKNOWN)


def rank_of(x: Tensor, ids: Tensor, temperature=1.0, softcap=None) -> Tensor:
    """How many logits are not at most that of the id; UNKNOWN where a softcap makes equal."""
    own = x.gather(-1, ids.long().unsqueeze(-1))
    rank = (~(x <= own)).sum(-1)
    if softcap is None:
        return rank
    z, z_own = oracle.z_of(x, 1.0, softcap), oracle.z_of(own, 1.0, softcap)
    close = (x != own) & ((z - z_own).abs() <= 1e-5 * softcap)
    return rank.masked_fill(close.any(-1), UNKNOWN)


def without(ignored: Tensor, t: Tensor, value: int) -> Tensor:
    return t.masked_fill(ignored if ignored.dim() == t.dim() else ignored.unsqueeze(-1), value)


def score(x, target, *, ignore_index=-100, **how):
    found = stats(x, target, entropy=True, argmax=True, ignore_index=ignore_index, **how)
    return {name: found[name] for name in ll.Scores._fields if name in found}


def kept_scores(x, target, kept, *, ignore_index=-100, mask=None, **how):
    ignored = ignored_rows(x, target, ignore_index, mask)
    target, kept = target.masked_fill(ignored, 0), kept.long()
    found = oracle.kept_scores(x, target, kept.masked_fill(ignored.unsqueeze(-1), -1), **how)
    return ll.KeptScores(*(None if t is None else without(ignored, t, 0) for t in found))


def cross_entropy_and_scores(x, target, *, ignore_index=-100, mask=None, rank=False, **how):
    loss = cross_entropy(x, target, ignore_index=ignore_index, mask=mask, **how)
    read = {name: how[name] for name in ("temperature", "softcap") if name in how}
    scores = score(x.detach(), target, ignore_index=ignore_index, mask=mask, rank=rank, **read)
    return loss, ll.Scores(**scores)


def row_loss(x, formula, *, ids=None, rows=(), reduction="mean", row_weight=None, **how):
    found, lead = stats(x, ids, **how), x.shape[:-1]
    ignored = ignored_rows(x, ids, how.get("ignore_index", -100), how.get("mask"))
    flat = {name: t.reshape(lead.numel(), *t.shape[len(lead) :]) for name, t in found.items()}
    beside = [t.reshape(lead.numel(), *t.shape[len(lead) :]).to(x.dtype) for t in rows]
    value = formula(ll.RowStats(**flat), *beside)
    value, *more = value if isinstance(value, tuple) else (value,)
    loss = oracle.over_rows(value.view(lead), ~ignored, row_weight, reduction)
    more = [without(ignored, t.detach().view(lead), _blank(t)) for t in more]
    return (loss, *more) if more else loss


def group_loss(x, formula, *, ids=None, mask=None, ignore_index=-100, **how):
    own = {name: how.pop(name) for name in ("groups", "rows", "reduction") if name in how}
    found = stats(x, ids, ignore_index=ignore_index, mask=mask, **how)
    ignored = ignored_rows(x, ids, ignore_index, mask)
    return groups.defined(formula, x, ignored, found, **own)


def _blank(t: Tensor) -> int:
    return 0 if t.is_floating_point() or t.dtype == torch.bool else -1


def all_statistics(stats, *rows):
    """A formula of whatever there is."""
    value = 0.1 * stats.lse
    if stats.logprob is not None:
        p = stats.logprob.exp() + 0.5 * stats.logprob + 0.1 * stats.picked
        value = value + (p if p.dim() == value.dim() else p.sum(-1))
    if stats.entropy is not None:
        value = value - 0.3 * stats.entropy**2
    if stats.total is not None:
        value = value + 0.01 * stats.total
    return slots.beside(value, rows)


def with_more(stats, *rows):
    """The same beside results without a gradient."""
    more = [stats.lse, stats.lse > 1]
    if stats.entropy is not None:
        more.append(stats.entropy)
    if stats.argmax is not None:
        more.append(stats.argmax)
    if stats.rank is not None:
        more.append(stats.rank)
    return all_statistics(stats, *rows), *more


def tensor_of(teacher):
    return teacher if isinstance(teacher, Tensor) else teacher.materialize().detach()


def kl_div(x, teacher, *, direction, skew=0.0, **how):
    kind = f"skewed_{direction}" if skew else f"{direction}_kl"
    return oracle.dense_divergence(x, tensor_of(teacher), kind, beta=skew, **how)


def jsd(x, teacher, **how):
    return oracle.dense_divergence(x, tensor_of(teacher), "jsd", **how)


def tvd(x, teacher, **how):
    return oracle.dense_divergence(x, tensor_of(teacher), "tvd", **how)


def gathered_kl(x, teacher_logprobs, mask=None, **how):
    return oracle.gathered_kl(x, teacher_logprobs, mask, **how)


def topk(x, k, **how):
    ids, logprobs, tail = oracle.topk(x, k, **how)
    tail = torch.where(logprobs[..., 0].isnan(), torch.nan, tail)  # also of no classes
    ids = ids.masked_fill(logprobs.isnan(), UNKNOWN)  # which is largest, a NaN does not say
    return {"ids": ids, "logprobs": logprobs, "tail": tail}


def partial(x):
    """Constants: which of equal logits the gradient of a maximum goes to is nobody's business."""
    m = x.detach().amax(-1)
    d = x.detach() - torch.where(m == -torch.inf, 0.0, m).unsqueeze(-1)
    e = d.exp()
    return {"m": m, "s": e.sum(-1), "w": torch.where(e == 0, 0.0, d * e).sum(-1)}


# --- calls that are more than the function's name


def sparse(ids, logprobs, tail=None, mask=None) -> ll.SparseTargets:
    return ll.SparseTargets(ids, logprobs, tail, mask)


def call_distill(x, ids, logprobs, tail=None, mask=None, **how):
    return ll.topk_distill(x, sparse(ids, logprobs, tail, mask), **how)


def call_row_loss(x, formula, **how):
    return ll.row_loss(formula, x, **how)


def call_group_loss(x, formula, **how):
    return ll.group_loss(formula, x, **how)


def call_slot_loss(x, formula, ids, logprobs, tail=None, mask=None, **how):
    return ll.slot_loss(formula, x, sparse(ids, logprobs, tail, mask), **how)


def call_linear(x, target, *, weight=None, **how):
    if not isinstance(x, ll.LinearLogits):
        return ll.cross_entropy(x, target, weight=weight, **how)
    return ll.linear_cross_entropy(
        x.hidden, x.weight, target, bias=x.bias, class_weight=weight, workspace=x.workspace, **how
    )


def call_merge(x):
    halves = x.detach().split(max(x.shape[-1] // 2, 1), -1)
    found = ll.partial(halves[0])
    for half in halves[1:]:
        found = ll.merge(found, ll.partial(half))
    return found


def module(name: str, *inputs: str) -> Callable:
    """A module of ll.nn: these are arguments of its forward, all others of its own."""

    def call(x, **how):
        given = {key: how.pop(key) for key in inputs if key in how}
        return getattr(ll.nn, name)(**how)(x, **given)

    return call


def call_linear_module(x, target, *, row_weight=None, **how):
    if not isinstance(x, ll.LinearLogits):
        return ll.nn.CrossEntropyLoss(**how)(x, target, row_weight)
    loss = ll.nn.LinearCrossEntropyLoss(**how)
    return loss(x.hidden, x.weight, target, x.bias, row_weight)


def call_distill_module(
    x, ids, logprobs, tail=None, mask=None, labels=None, row_weight=None, **how
):
    targets = sparse(ids, logprobs, tail, mask)
    return ll.nn.TopKDistillLoss(**how)(x, targets, labels, row_weight)


# --- the table


class Function(NamedTuple):
    call: Callable
    means: Callable
    arguments: dict[str, Argument]
    sources: tuple[str, ...] | None = None  # None is all
    impls: tuple[str, ...] = ("eager", "triton")
    dims: int = 0  # the least number of dimensions of the rows


MASK = {"mask": teachers.ROW_MASK}
READ = {"temperature": args.TEMPERATURE, "softcap": args.SOFTCAP}
REDUCED = {
    "reduction": args.choice("mean", "sum", "none"),
    "row_weight": args.ROW_WEIGHT,
}
STATS = READ | {
    "ids": args.IDS, "entropy": args.FLAG, "total": args.FLAG, "argmax": args.FLAG,
    "rank": args.RANK_OF_IDS, "ignore_index": args.IGNORE_INDEX,
}  # fmt: skip
ROW_LOSS = STATS | REDUCED | {
    "formula": Argument(
        {"all": lambda m: all_statistics, "with more": lambda m: with_more}, needed=True
    ),
    "rows": args.BESIDE_ROWS,
}  # fmt: skip
GROUP_LOSS = STATS | {
    "formula": Argument(
        {
            "all": groups.formula_of(all_statistics, False),
            "with more": groups.formula_of(all_statistics, True),
        },
        needed=True,
    ),
    "groups": groups.GROUPS, "rows": groups.ROWS, "reduction": REDUCED["reduction"],
}  # fmt: skip
SCORE = READ | {"target": args.TARGET, "ignore_index": args.IGNORE_INDEX}
KEPT_SCORES = SCORE | MASK | {"kept": args.KEPT, "mass": args.FLAG}
CROSS_ENTROPY = SCORE | REDUCED | {
    "weight": args.CLASS_WEIGHT, "label_smoothing": args.FRACTION, "z_loss": args.Z_LOSS,
    "inplace": args.FLAG,
}  # fmt: skip
DENSE = READ | REDUCED | {
    "teacher": teachers.TEACHER, "mask": teachers.ROW_MASK, "t_squared": args.FLAG,
}  # fmt: skip
KL_DIV = DENSE | {
    "direction": args.choice("forward", "reverse", needed=True), "skew": args.SKEW,
}  # fmt: skip
JSD = DENSE | {"beta": args.FRACTION}
SOFT = READ | REDUCED | {
    "probs": teachers.PROBS, "mask": teachers.ROW_MASK, "weight": args.CLASS_WEIGHT,
    "label_smoothing": args.FRACTION,
}  # fmt: skip
TARGETS = {
    "ids": teachers.SLOT_IDS, "logprobs": teachers.LOGPROBS, "tail": teachers.TAIL,
    "mask": teachers.SLOT_MASK,
}  # fmt: skip
DISTILL = READ | REDUCED | TARGETS | {
    "divergence": args.choice("forward_kl", "reverse_kl", "jsd", "tvd", needed=True),
    "support": args.choice("truncate", "renorm_teacher", "renorm", "tail", needed=True),
    "beta": args.FRACTION, "t_squared": args.FLAG, "labels": args.LABELS,
    "ignore_index": args.IGNORE_INDEX, "ce_weight": args.CE_WEIGHT, "kd_weight": args.COEFFICIENT,
}  # fmt: skip
SLOT_LOSS = READ | REDUCED | TARGETS | {
    "formula": Argument(
        {"slots and tails": lambda m: slots.of_slots, "slots": lambda m: slots.of_ranks},
        needed=True,
    ),
    "rows": args.BESIDE_ROWS, "labels": args.LABELS, "ignore_index": args.IGNORE_INDEX,
}  # fmt: skip
GATHERED = REDUCED | {
    "teacher_logprobs": teachers.GATHERED, "mask": teachers.GATHERED_MASK, "renormalise": args.FLAG,
    "temperature": args.TEMPERATURE, "t_squared": args.FLAG,
}  # fmt: skip
TOPK = {"k": args.HOW_MANY, "temperature": args.NUMBER_TEMPERATURE, "softcap": args.SOFTCAP}
SAMPLED = {
    "n": draws.DRAWS, "proposal": draws.PROPOSAL, "temperature": args.NUMBER_TEMPERATURE,
    "softcap": args.SOFTCAP,
}  # fmt: skip

FUNCTIONS: dict[str, Function] = {
    "logsumexp": Function(ll.logsumexp, oracle.logsumexp, READ),
    "entropy": Function(ll.entropy, oracle.entropy, READ),
    "token_logprobs": Function(
        ll.token_logprobs, oracle.token_logprobs, READ | {"ids": args.NEEDED_IDS}
    ),
    "row_stats": Function(ll.row_stats, stats, STATS | MASK),
    "row_loss": Function(call_row_loss, row_loss, ROW_LOSS | MASK),
    "group_loss": Function(call_group_loss, group_loss, GROUP_LOSS | MASK, dims=1),
    "score": Function(ll.score, score, SCORE | MASK | {"rank": args.RANK}),
    "kept_scores": Function(ll.kept_scores, kept_scores, KEPT_SCORES),
    "cross_entropy": Function(ll.cross_entropy, cross_entropy, CROSS_ENTROPY | MASK),
    "cross_entropy_and_scores": Function(
        ll.cross_entropy_and_scores, cross_entropy_and_scores,
        CROSS_ENTROPY | MASK | {"rank": args.RANK},
    ),
    "linear_cross_entropy": Function(call_linear, cross_entropy, CROSS_ENTROPY | MASK),
    "kl_div": Function(ll.kl_div, kl_div, KL_DIV),
    "jsd": Function(ll.jsd, jsd, JSD),
    "tvd": Function(ll.tvd, tvd, DENSE),
    "soft_cross_entropy": Function(ll.soft_cross_entropy, oracle.soft_cross_entropy, SOFT),
    "topk_distill": Function(call_distill, slots.distill, DISTILL),
    "slot_loss": Function(call_slot_loss, slots.slot_loss, SLOT_LOSS),
    "gathered_kl": Function(
        ll.gathered_kl, gathered_kl, GATHERED, tuple(s for s in SOURCES if s not in SHARDS)
    ),
    "capture_topk": Function(ll.capture_topk, topk, TOPK),
    "capture_sampled": Function(
        draws.call, lambda x, **how: draws.sampled(x, unknown=UNKNOWN, **how), SAMPLED
    ),
    "SparseTargets": Function(
        lambda x, **how: sparse(**how), lambda x, **how: how, TARGETS, TENSORS[:1]
    ),
    "partial": Function(lambda x: ll.partial(x.detach()), partial, {}, TENSORS, ("eager",)),
    "merge": Function(call_merge, partial, {}, TENSORS, ("eager",)),
    "nn.LogSumExp": Function(module("LogSumExp"), oracle.logsumexp, READ),
    "nn.Entropy": Function(module("Entropy"), oracle.entropy, READ),
    "nn.TokenLogprobs": Function(
        module("TokenLogprobs", "ids"), oracle.token_logprobs, READ | {"ids": args.NEEDED_IDS}
    ),
    "nn.Score": Function(module("Score", "target"), score, SCORE),
    "nn.CrossEntropyLoss": Function(
        module("CrossEntropyLoss", "target", "row_weight"), oracle.cross_entropy, CROSS_ENTROPY
    ),
    "nn.LinearCrossEntropyLoss": Function(
        call_linear_module, oracle.cross_entropy, CROSS_ENTROPY
    ),
    "nn.KLDivLoss": Function(module("KLDivLoss", "teacher", "mask", "row_weight"), kl_div, KL_DIV),
    "nn.JSDLoss": Function(module("JSDLoss", "teacher", "mask", "row_weight"), jsd, JSD),
    "nn.TVDLoss": Function(module("TVDLoss", "teacher", "mask", "row_weight"), tvd, DENSE),
    "nn.TopKDistillLoss": Function(call_distill_module, slots.distill, DISTILL),
}  # fmt: skip

NOT_LOSSES = {  # public, and not called on logits: what they are tested by instead
    "LinearLogits": "a source",
    "VocabShard": "a source",
    "contrastive": "of embeddings: tests/contrastive, with a fuzzer of its own",
    "sigmoid_contrastive": "of embeddings: tests/contrastive, with a fuzzer of its own",
    "nn.ContrastiveLoss": "of embeddings: tests/contrastive",
    "nn.SigmoidContrastiveLoss": "of embeddings: tests/contrastive",
    "global_mean": "of several processes: tests/parallel/test_rank_processes.py",
    "nn.FusedHead": "a source",
    "Partial": "what partial returns",
    "RowStats": "what row_stats returns",
    "Scores": "what score returns",
    "KeptScores": "what kept_scores returns",
    "sampled_softmax": "of rows of a table: tests/losses/test_sampled_softmax.py",
    "nn.SampledSoftmaxLoss": "of rows of a table: tests/losses/test_sampled_softmax.py",
    "impl": "chosen by every case",
    "invariant": "of bits: tests/core/test_invariant.py",
    "fuse": "of a model: tests/lazy/test_fuse.py; its logits are those of nn.FusedHead",
    "is_fused": "of a model: tests/lazy/test_neighbours.py",
    "unfuse": "of a model: tests/lazy/test_fuse.py",
    "report": "of lazy logits: tests/lazy/test_report.py",
    "lazy_logits": "of fused heads: tests/lazy",
    "store": "targets on disk: tests/store",
    "nn": "its modules are named one by one",
}

BAD_LOGITS: args.Kinds = {
    "a list": lambda m: [1.0],
    "None": lambda m: None,
    "integers": lambda m: args.zeros(m, (*m.lead, m.vocab)),
    "complex": lambda m: args.ones(m, (*m.lead, m.vocab)).to(torch.complex64),
    "0-d": lambda m: args.ones(m, ()),
    "no columns": lambda m: args.ones(m, (*m.lead, 0)),
}
