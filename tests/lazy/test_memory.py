"""How long lazy logits keep hidden states and values in memory."""

import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support.lazy_models import Largest, V, model

pytestmark = [
    pytest.mark.filterwarnings("ignore:logits of a fused head are materialised"),
    pytest.mark.usefixtures("quick_collections"),
]

FEWER = {
    "one sequence": lambda z: z[:1].clone(),
    "rows by index": lambda z: z[[1]],
    "rows by mask": lambda z: z[torch.arange(10, device=z.device).view(2, 5) > 7],
    "a function of rows": lambda z: z.softmax(-1)[[0]],
    "rows of a function": lambda z: (z[[0]] * 2).softmax(-1),
    "selected": lambda z: (z / 2).index_select(1, torch.tensor([0, 3], device=z.device)),
    "masked columns": lambda z: z.masked_fill(torch.arange(V, device=z.device) < 2, 0.5)[[1]],
    "joined": lambda z: torch.cat([z, z])[[0]],
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", FEWER)
def test_some_rows_do_not_keep_all_hidden_states(name, trains, x):
    """After a backward, or without one, only the hidden states of the rows are in memory."""
    with torch.set_grad_enabled(trains), ll.lazy_logits():
        z = model(True, x.device)(x)
        rows = FEWER[name](z)
        if trains:
            rows.logsumexp(-1).sum().backward()
    whole = weakref.ref(z.recipe.head.hidden)
    want = rows.detach().clone().tolist()
    del z
    gc.collect()
    assert whole() is None
    assert rows.tolist() == want


def test_values_live_as_long_as_those_of_plain_logits(x, t):
    """Values that only a loss needed are gone after its backward."""
    z = model(True, x.device)(x)
    p = z.softmax(-1)
    F.cross_entropy(p.flip(-1).view(-1, V), t.view(-1)).backward()
    values = [weakref.ref(logits.cell.memory) for logits in (z, p)]
    del z, p
    gc.collect()
    assert [value() for value in values] == [None, None]


KEPT = {
    "the logits": lambda z: z,
    "detached": lambda z: z.detach(),
    "a view": lambda z: z[:, -1],
    "a detached view": lambda z: z.detach()[:, -1],
    "a function": lambda z: z.float(),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_logits_keep_no_activation_of_the_body(name, x, t):
    """After backward, which frees what autograd saved; detached ones keep none without it."""
    held = []

    class Body(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            activation = h * 2
            held.append(weakref.ref(activation))
            ctx.save_for_backward(activation)
            return h.sin()

        @staticmethod
        def backward(ctx, g):
            ctx.saved_tensors  # noqa: B018 - read, as a layer does
            return g

    body, head = model(True, x.device)
    z = head(Body.apply(body(x)))
    kept = KEPT[name](z)
    loss = F.cross_entropy(z.view(-1, V), t.view(-1))
    loss.backward()
    del z, loss
    gc.collect()
    assert held[0]() is None
    assert kept.shape[-1] == V
    z = head(Body.apply(body(x)))
    kept = KEPT[name](z)
    del z
    gc.collect()
    assert (held[1]() is None) == ("detached" in name)


class Visited(torch.nn.Module):
    """Sets a node of PyTorch on the logits, as DDP does."""

    def __init__(self, m):
        super().__init__()
        self.m = m
        self.register_full_backward_hook(lambda *_: None)

    def forward(self, x):
        return self.m(x)


@pytest.mark.parametrize("visited", [False, True])
def test_two_losses_over_the_same_logits_allocate_nothing_of_their_size(visited, device):
    rows, v, d = 48, 231, 1
    m = torch.nn.Sequential(torch.nn.Linear(3, d), torch.nn.Linear(d, v)).to(device)
    m = ll.fuse(m, head="1", workspace=5 * v * 4)
    x = torch.randn(rows, 3, device=device, requires_grad=True)
    t = torch.randint(v, (rows,), device=device)
    with Largest() as seen:
        z = (Visited(m) if visited else m)(x)
        (F.cross_entropy(z, t) + F.cross_entropy(z[::2], t[::2]) + z.logsumexp(-1).sum()).backward()
    assert seen.size <= 5 * v
    assert not z.known


def test_the_weight_is_neither_copied_nor_watched_by_many(device):
    m = ll.fuse(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, V)).to(device), head="1"
    )
    x = torch.randn(2, 3, device=device)
    weight = m[1].weight
    before = sys.getrefcount(weight)
    for _ in range(50):
        z = m(x)
        assert z.recipe.head.weight is weight
        z.logsumexp(-1).sum().backward()
    del z
    gc.collect()
    assert sys.getrefcount(weight) == before
    assert not weight._backward_hooks


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_parameters_pass_no_hooks_of_saved_tensors(x):
    """Such as save_on_cpu, which would copy the weight once per operation on the logits."""
    packed = []
    m = model(True, x.device)

    def pack(t):
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        z = m[1](x.new_ones(2, 6).requires_grad_())
        loss = z[1:].float().flip(-1).square().sum()
    assert not any(t is p for t in packed for p in m[1].parameters())
    with torch.no_grad():
        m[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="must not be modified in place"):
        loss.backward()
