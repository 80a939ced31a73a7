"""How long lazy logits keep hidden states and values in memory."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support.lazy_models import V, model

pytestmark = pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")

FEWER = {
    "one sequence": lambda z: z[:1].clone(),
    "rows by index": lambda z: z[[1]],
    "rows by mask": lambda z: z[torch.arange(10, device=z.device).view(2, 5) > 7],
    "a function of rows": lambda z: z.softmax(-1)[[0]],
    "rows of a function": lambda z: (z[[0]] * 2).softmax(-1),
    "selected": lambda z: (z / 2).index_select(1, torch.tensor([0, 3], device=z.device)),
    "negative": lambda z: -z,
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
    values = [weakref.ref(logits.known_values) for logits in (z, p)]
    del z, p
    gc.collect()
    assert [value() for value in values] == [None, None]
