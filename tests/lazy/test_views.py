"""Operations that move rows of lazy logits, or slice their vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.lazy_models import assert_same, model


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


def test_a_mask_must_not_change_before_backward(x, t):
    z = model(True, x.device)(x)
    mask = t > 3
    loss = F.cross_entropy(z[mask], t[mask])
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
