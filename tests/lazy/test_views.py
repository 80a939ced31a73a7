"""Operations that move rows of lazy logits, or slice their vocabulary."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support.lazy_models import V, assert_same, model


@pytest.mark.parametrize(
    "op",
    [
        lambda z: z.squeeze(3), lambda z: z.unsqueeze(-5), lambda z: z.transpose(0, 4),
        lambda z: z.narrow(3, 0, 1), lambda z: z.unbind(-4), lambda z: z.flatten(0, 3),
        lambda z: z.chunk(2, 3),
    ],
)  # fmt: skip
def test_a_dimension_that_is_not_there(op, x):
    for fused in (False, True):
        with pytest.raises(IndexError):
            op(model(fused, x.device)(x))


MOVES = {
    "transposed": lambda z: z.transpose(1, 2),
    "permuted": lambda z: z.permute(1, 2, 0),
    "moved": lambda z: z.movedim(-1, 0),
    "some rows": lambda z: z[:, :-1],
    "some columns": lambda z: z[..., 2:7],
    "narrowed": lambda z: z.narrow(1, 1, 3),
    "unbound": lambda z: z.unbind(1)[2],
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_any_view_of_moved_ones(name, known, x):
    """Whether their numbers are made after the move, or were before it."""

    def flat(z):
        if known:
            z.exp()
        moved = MOVES[name](z)
        first = moved.shape[0]
        return moved.reshape(-1) + moved.contiguous().view(first, -1).flatten() + moved.flatten()

    assert_same(x, lambda z: flat(z).square().mean())


def test_hidden_must_not_change_before_a_view(x, t):
    m = model(True, x.device)
    h = m[0](x)
    z = m[1](h)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="must not be modified in place"):
        z[1:]


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_what_a_caller_writes_later_changes_nothing(x, t):
    """An index, a mask or a bias is read when the operation is called."""
    mask, order = t > 3, torch.tensor([1, 0], device=x.device)
    columns, bias = torch.arange(V, device=x.device) > 5, torch.linspace(-1, 1, V).to(x)

    def read(z):
        return z[mask], z[order], z.index_select(0, order), z + bias, z.masked_fill(columns, -3.0)

    want = [torch.sigmoid(part) for part in read(model(False, x.device)(x))]
    got = read(model(True, x.device)(x))
    for written in (mask, order, columns, bias):
        written.zero_()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(torch.sigmoid(a), b)


def test_an_index_made_in_inference_mode(x):
    with torch.inference_mode(), ll.lazy_logits():
        z, index = model(True, x.device)(x), torch.tensor([1, 0], device=x.device)
        assert torch.equal(z[index].materialize(), z.materialize()[index])


@pytest.mark.parametrize("dim", [0, 1, 2, -2, -4])
def test_stack(dim, x, t):
    """Logits of two calls of a head stay lazy, also if one row of the stack is read twice."""

    def loss(m):
        z = torch.stack([m(x), m(x.flip(1) * 2)], dim)
        parts = z.unbind(dim)
        values = [F.cross_entropy(part.transpose(1, 2), t) for part in (*parts, parts[1])]
        return z, values[0] + 2 * values[1] + values[2] / 3 + z.logsumexp(-1).square().mean()

    found = []
    for fused in (True, False):
        m = model(fused, x.device)
        z, value = loss(m)
        value.backward()
        found.append([z, value.detach(), *(p.grad for p in m.parameters())])
    (lazy, *got), (plain, *want) = found
    assert not lazy.known
    assert lazy.shape == plain.shape
    assert lazy.stride() == plain.stride()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(lazy.materialize(), plain)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_stack_that_is_not_lazy(x, t):
    """Behind the vocabulary, of two heads, with a plain tensor, or of other shapes."""
    m, n = model(True, x.device), model(True, x.device)
    z = m(x)
    for other, dim in ((m(x), 3), (m(x), -1), (n(x), 0), (torch.zeros_like(z.materialize()), 0)):
        got = torch.stack([z, other], dim)
        assert type(got) is torch.Tensor
        plain = [t.materialize() if hasattr(t, "materialize") else t for t in (z, other)]
        torch.testing.assert_close(got, torch.stack(plain, dim))
    with pytest.raises(RuntimeError, match="equal size"):
        torch.stack([z, z[:1]])
    with pytest.raises(IndexError):
        torch.stack([m(x), m(x)], 4)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("first", [True, False])
def test_cat_with_a_batch_without_gradient(first, x, t):
    def loss(z):
        parts = [z[:1].detach(), z[1:]] if first else [z[:1], z[1:].detach()]
        return F.cross_entropy(torch.cat(parts).view(-1, V), t.view(-1))

    assert_same(x, loss)


def test_no_rows_and_bad_ids(x):
    z = model(True, x.device)(x)
    none = z[torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)]
    assert none.topk(2).values.shape == (0, 2)
    assert none.amax(-1).shape == (0,)
    z = model(True, "cpu")(x.cpu())
    with pytest.raises((IndexError, RuntimeError)):
        z.gather(-1, torch.full((*x.shape[:-1], 2), -100))


INDICES = {
    "uint8 mask": lambda z: z[(torch.arange(10).view(2, 5) > 3).to(torch.uint8)],
    "no rows": lambda z: z[[]],
    "no rows, second": lambda z: z[:, []],
    "an array": lambda z: z[np.array([1, 0])],
    "a list of booleans": lambda z: z[[True, False]],
    "True": lambda z: z[True],
    "None": lambda z: z[None, :, 1],
    "a tensor of one": lambda z: z[torch.tensor(1)],
    "negative": lambda z: z[-1, [-1, -2]],
    "two lists": lambda z: z[[0, 1], [2, 3]],
    "a mask of values": lambda z: z[z > 0],
    "a mask of rows and a column": lambda z: z[torch.arange(2) > 0, :, 3],
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", INDICES)
def test_any_index(name, x):
    z, plain = (INDICES[name](model(fused, x.device)(x)) for fused in (True, False))
    assert z.shape == plain.shape
    torch.testing.assert_close(z.detach().clone() + 0, plain.detach())


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize(
    "op",
    [
        lambda z: z.view(3, -1, 11), lambda z: z.reshape(7, 11), lambda z: z[torch.ones(3) > 0],
        lambda z: z[5], lambda z: z.narrow(1, 4, 3), lambda z: z.index_select(0, torch.tensor(9)),
        lambda z: z[:, torch.tensor([7])], lambda z: z.view(-1, -1, 11), lambda z: z.split([1, 2]),
    ],
)  # fmt: skip
def test_errors_are_those_of_the_logits(op, x):
    """The message names the user's shapes, not those of the hidden states."""
    said = []
    for fused in (False, True):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            op(model(fused, "cpu")(x.cpu()))
        said.append(str(raised.value).split("\n")[0])
    assert said[0] == said[1]
