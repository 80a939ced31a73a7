"""Cases of a vocabulary that is sharded over 2, 3 or 4 processes, for rank_processes.py.

Over ranks that are threads, tests/parallel/test_shard.py and test_shard_heads.py run every call;
here, few calls show that gloo's collectives do the same.
"""

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from tests.support import dtensor_cases, fused_cases
from tests.support.rank_processes import (
    GROUPS,
    WIDTHS,
    WORLD,
    Case,
    apart,
    calls,
    differentiated,
    mesh_of,
)

SHORT = (
    "cross_entropy", "cross_entropy, every option", "cross_entropy_and_scores", "score", "kl_div",
    "topk_distill", "jsd", "tvd", "kept_scores", "kept_scores, mass",
)  # fmt: skip


def logits(name: str, ranks: int) -> float:
    """The error of values and gradients of a call over shards of logits."""
    from logitless import VocabShard

    c, widths, index = calls(), WIDTHS[ranks], dist.get_rank()
    if index >= ranks:
        return 0.0
    x = c.normal(c.N, c.V, seed=1, dtype=torch.float64)
    own = (-1, sum(widths[:index]), widths[index])
    part = x.narrow(*own).clone().requires_grad_()
    got, d_got = differentiated(c.CALLS[name], VocabShard(part * 1, GROUPS[ranks]), [part])
    return too_far(name, [*got, *d_got], [x], torch.clone, [own])


def heads(name: str, ranks: int, sequence_parallel: bool = False) -> float:
    """The error of values and gradients of a call over shards of a head, in chunks of rows."""
    from logitless import LinearLogits, VocabShard

    c, widths, index = calls(), WIDTHS[ranks], dist.get_rank()
    if index >= ranks:
        return 0.0
    sizes = [(c.N, c.D), (c.V, c.D), (c.V,)]
    parts = [c.normal(*size, seed=i, dtype=torch.float64) for i, size in enumerate(sizes)]
    own = (0, sum(widths[:index]), widths[index])
    tokens = (0, c.N // ranks * index, c.N // ranks) if sequence_parallel else (0, 0, c.N)
    mine = [tokens, own, own]
    local = [t.narrow(*at).clone().requires_grad_() for t, at in zip(parts, mine, strict=True)]
    head = LinearLogits(*local, workspace=3 * 32 * 8)
    shard = VocabShard(head, GROUPS[ranks], sequence_parallel=sequence_parallel)
    got, d_got = differentiated(c.CALLS[name], shard, local)
    return too_far(name, [*got, *d_got], parts, linear, mine)


def too_far(
    name: str,
    got: list[Tensor],  # results, and gradients of this rank's slices
    parts: list[Tensor],  # the whole tensors
    source: Callable[..., Tensor],  # computes logits from the whole tensors
    mine: list[tuple[int, int, int]],  # dimension, start and length of this rank's slices
) -> float:
    """The error relative to a computation without ranks, divided by the allowed error."""
    from tests.support.meanings import MEANINGS

    leaves = [t.clone().requires_grad_() for t in parts]
    found, d = differentiated(MEANINGS[name], source(*leaves), leaves)
    return apart(got, [*found, *(t.narrow(*at) for t, at in zip(d, mine, strict=True))])


def mesh_for_a_group() -> float:
    import logitless as ll

    c = calls()
    x = c.normal(c.N, c.V, seed=1, dtype=torch.float64)
    found = ll.logsumexp(ll.VocabShard(x, mesh_of(WORLD)))
    return apart([found], [ll.logsumexp(x.repeat(1, WORLD))])


def global_mean() -> float:
    """global_mean with different numbers of tokens per rank, for summed and averaged gradients."""
    import logitless as ll

    c = calls()
    x = c.normal(WORLD, c.N, c.V, seed=1, dtype=torch.float64)
    targets = c.IDS[:, :1].expand(c.N, WORLD).T.clone()
    for rank in range(WORLD):
        targets[rank, : rank + 1] = -100
    whole = x.clone().requires_grad_()
    want = ll.cross_entropy(whole, targets)
    want.backward()
    rank, found = dist.get_rank(), []
    for averaged, share in ((True, WORLD), (False, 1)):
        leaf, target = x[rank].clone().requires_grad_(), targets[rank]
        total = ll.cross_entropy(leaf, target, reduction="sum")
        got = ll.global_mean(total, (target != -100).sum(), averaged=averaged)
        got.backward()
        found += [(got.detach(), want.detach()), (leaf.grad / share, whole.grad[rank])]
    found.append((ll.global_mean(torch.zeros(()), 0), torch.zeros(())))
    return apart(*zip(*found, strict=True))


def differing_calls() -> float:
    """With LOGITLESS_CHECK=1, every rank raises if calls differ or one rank's call is invalid."""
    import logitless as ll

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITLESS_CHECK", "1")
        for odd in (0, WORLD - 1):
            differs = dist.get_rank() == odd
            words = "ranks must call the same loss with the same arguments, got on rank"
            for call in differing(ll, differs):
                with pytest.raises(ValueError, match=words):
                    call()
            for kind, words, call in refused_on_one(ll, differs):
                told = f"ranks must call the same loss .*: {words}"
                with pytest.raises(kind if differs else ValueError) as caught:
                    call()
                assert re.match(words if differs else f"(?s){told}", str(caught.value))
        ll.cross_entropy(ll.VocabShard(X), TARGET)
    return 0.0


X, TARGET = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
H, W = torch.zeros(2, 5), torch.zeros(3, 5)


def differing(ll, differs: bool) -> list[Callable]:
    """Calls in which one rank passes different arguments."""

    def shard(source=X, **how):
        return ll.VocabShard(source, **how)

    def head(hidden=H, weight=W, **how):
        return ll.LinearLogits(hidden, weight, **how)

    def loss(source=None, target=TARGET, **how):
        return ll.cross_entropy(shard() if source is None else source, target, **how)

    one, scale = int(differs), 1.0 + differs
    return [
        lambda: loss(label_smoothing=0.1 * one),
        lambda: loss(reduction="sum" if differs else "mean"),
        lambda: loss(temperature=scale),
        lambda: loss(temperature=torch.full((2,), scale)),
        lambda: loss(row_weight=torch.full((2,), scale)),
        lambda: loss(weight=torch.full((3 * WORLD,), scale)),
        lambda: loss(target=torch.tensor([one, 1 - one])),
        lambda: loss(shard(X.double() if differs else X)),
        lambda: ll.logsumexp(shard(X[: 2 - one])),
        lambda: ll.entropy(shard()) if differs else ll.logsumexp(shard()),
        lambda: ll.token_logprobs(shard(), torch.zeros(2, 1 + one, dtype=torch.long)),
        lambda: ll.capture_topk(shard(), 1 + one),
        lambda: ll.capture_topk(shard(), 1) if differs else ll.logsumexp(shard()),
        lambda: ll.jsd(shard(), shard(X + 1), beta=0.3 if differs else 0.5),
        lambda: loss(shard(head() if differs else X)),
        lambda: loss(shard(head(H[:, : 5 - one], W[:, : 5 - one]))),
        lambda: loss(shard(head(workspace=64 * (1 + one)))),
        lambda: loss(shard(head(H.clone().requires_grad_(differs)))),
        lambda: loss(
            shard(head(H.clone().requires_grad_(differs), W.clone().requires_grad_(not differs)))
        ),
        lambda: loss(shard(head(H[: 2 - one]), sequence_parallel=True)),
        lambda: loss(shard(head(), sequence_parallel=differs)),
        lambda: loss(shard(vocab=3 * WORLD if differs else None)),
    ]


def refused_on_one(ll, differs: bool) -> list[tuple[type[Exception], str, Callable]]:
    """Calls with invalid arguments on one rank, with the type and the text of the error."""
    start = -1 if differs else 3 * dist.get_rank()
    return [
        (ValueError, "z_loss must be",
         lambda: ll.cross_entropy(ll.VocabShard(X), TARGET, z_loss=-1.0 if differs else 0.1)),
        (ValueError, "direction must be",
         lambda: ll.kl_div(ll.VocabShard(X), ll.VocabShard(X),
                           direction="sideways" if differs else "forward")),
        (ValueError, "reduction must be",
         lambda: ll.kl_div(ll.VocabShard(X), ll.VocabShard(X), direction="forward",
                           reduction="average" if differs else "mean")),
        (ValueError, "start must be at least 0", lambda: ll.VocabShard(X, None, start)),
        (TypeError, "source must be a Tensor", lambda: ll.VocabShard([1.0] if differs else X)),
    ]  # fmt: skip


def cases() -> dict[str, Case]:
    """All cases by name. A case returns its error relative to one process."""
    found: dict[str, Case] = {}
    for name, kind, ranks in zip(
        SHORT, itertools.cycle((logits, heads)), itertools.cycle(WIDTHS), strict=False
    ):
        at = f"{ranks} ranks, {kind.__name__}: {name}"
        found[at] = lambda kind=kind, how=(name, ranks): kind(*how)
    for name in ("cross_entropy", "score"):
        how = (name, 3, True)
        found[f"3 ranks, tokens cut: {name}"] = lambda how=how: heads(*how)
    found["a mesh for a group"] = mesh_for_a_group
    found["global_mean"] = global_mean
    found["calls that differ"] = differing_calls
    return found | dtensor_cases.cases(SHORT) | fused_cases.cases()
