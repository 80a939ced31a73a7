"""torchtitan's Llama 3 with HeadLoss trains like with its ChunkedLossWrapper."""

import sys
import types
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

# the logger of torchtitan's metrics, which are not under test
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=object)

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, compute_logprobs
from torchtitan.models.llama3 import model_registry

from logitless.integrations import torchtitan as adapter
from logitless.integrations.torchtitan import HeadLoss
from tests.support.forked import together
from tests.support.trainer_runs import WORKSPACE, Run, V, once

pytestmark = pytest.mark.filterwarnings("default")
D, B, T = 256, 2, 64
WRITES = "`loss=HeadLoss.Config(loss_fn=...)`"
INNER = CrossEntropyLoss.Config()
THEIRS = ChunkedLossWrapper.Config(loss_fn=INNER)
OURS = HeadLoss.Config(loss_fn=INNER, workspace=WORKSPACE)


class Attention(nn.Module):
    """torchtitan's kernels for attention need a GPU."""

    def forward(self, q, k, v, **_):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        sdpa = nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def build(loss_config, wrap=lambda model: None):
    torch.manual_seed(0)
    config = model_registry("debugmodel", attn_backend="flex").model
    config.vocab_size = V
    config.lm_head.out_features = config.tok_embeddings.num_embeddings = V
    model = config.build()
    for block in model.layers.values():
        block.attention.inner_attention = Attention()
    model.init_weights(buffer_device=torch.device("cpu"))
    wrap(model)
    loss = loss_config.build(compile_config=None)
    loss.set_lm_head(model.lm_head)  # these two lines are what the Trainer does
    model._skip_lm_head = True
    return model, loss


def data(rank: int = 0):
    draw = torch.Generator().manual_seed(7 + rank)
    ids = torch.randint(0, V, (B, T), generator=draw)
    labels = ids.roll(-1, 1)
    labels[:, -1] = labels[0, : 10 + rank] = -100
    return ids, labels


def policy(logits, labels, count, **_):
    """Reads log-probabilities and entropies, as torchtitan's losses for RL do."""
    logp, entropy = compute_logprobs(logits, labels, return_entropy=True)
    return -(logp.exp() * logp).sum() / count, {"entropy/mean": entropy.sum() / count}


def step(model, loss, ids, labels, count) -> Run:
    def compute():
        value, metrics = loss(model(ids), labels, count)
        return value, {name: float(t) for name, t in metrics.items()}

    return once(model, compute, D)


@pytest.mark.parametrize("inner", [None, policy], ids=["cross-entropy", "log-probabilities"])
def test_equal(inner, compare):
    ids, labels = data()
    found = []
    for config in (THEIRS, OURS):
        model, loss = build(config)
        loss.loss_fn = inner or loss.loss_fn
        found.append(step(model, loss, ids, labels, (labels != -100).sum()))
    want, got = found
    case = "log-probabilities and entropies" if inner else "CrossEntropyLoss"
    compare("torchtitan", case, WRITES, got, want)


def sharded(rank: int):
    """Their run and ours, with the groups of torchtitan.distributed.fsdp."""
    dist.init_process_group("gloo")

    def wrap(model):
        mesh = dist.init_device_mesh("cpu", (2,))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model.tok_embeddings, mesh=mesh)
        fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)

    ids, labels = data(rank)
    count = (labels != -100).sum()
    dist.all_reduce(count)
    found = []
    for config in (THEIRS, OURS):
        run = step(*build(config, wrap), ids, labels, count)
        full = {name: g.full_tensor() for name, g in run.weights.items()}
        found.append(run._replace(weights=full))
    dist.destroy_process_group()
    return found


def test_fsdp2(compare):
    for want, got in together(2, sharded):
        compare("torchtitan", "FSDP2 on two ranks", WRITES, got, want)


def test_tensor_parallel_is_refused():
    _, loss = build(OURS)
    hidden = torch.randn(1, 2, D)
    with (
        patch.object(adapter, "spmd_mesh_size", lambda axis: 2),
        pytest.raises(NotImplementedError, match="tensor parallel"),
    ):
        loss(hidden, torch.zeros(1, 2, dtype=torch.long), 2)


def test_validation_is_without_gradients():
    ids, labels = data()
    (model, theirs), (_, ours) = build(THEIRS), build(OURS)
    with torch.no_grad():
        want, got = (loss(model(ids), labels, 7)[0] for loss in (theirs, ours))
    torch.testing.assert_close(got, want)
