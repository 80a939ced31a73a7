"""All aliases of lazy logits share what is written. A write that would need a gradient raises."""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.lazy.logits import LazyLogits
from tests.support.lazy_models import V, assert_alike, backward, model
from tests.support.lazy_writes import WHERE, WRITES

pytestmark = pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")


def teacher(x):
    """Lazy logits without history, and the same logits as a plain tensor."""
    with torch.no_grad(), ll.lazy_logits():
        return model(True, x.device)(x), model(False, x.device)(x)


@pytest.mark.parametrize("where", ["the logits", "the last row", "a column", "a view"])
def test_a_write_in_training_raises_at_once(where, x, t):
    """If it needs a gradient. Under no_grad, a part needs none, and all aliases see the write."""
    z = model(True, x.device)(x)
    for write in ("[...]", "add_", "+=", "copy_", "masked_fill_", "_foreach", "nn.init"):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"written to.*materialize\(\)"):
            WRITES[write](z)
        if write == "nn.init":  # under no_grad
            continue
        with pytest.raises(RuntimeError, match=r"written to.*materialize\(\)|custom Function"):
            WRITES[write](WHERE[where](z) if where != "a view" else z.view(-1, V))
    assert torch.isfinite(ll.cross_entropy(z, t))


def test_a_detached_alias_may_be_written_to(x, t):
    """As in PyTorch, the logits with a history then have the values that were written."""

    def program(m):
        z = m(x)
        early = z * 2
        z.detach()[..., 3] = -1.0
        z.data[0] += 1
        loss = F.cross_entropy(z.view(-1, V), t.view(-1)) + early.logsumexp(-1).sum()
        return loss.detach(), *backward(m, loss)

    assert_alike(x, program)


def test_an_array_shares_the_memory_of_all_aliases(x):
    x = x.cpu()
    z, plain = teacher(x)
    rows, want = z[1:], plain[1:]
    for array, value in ((z.numpy(), 1.0), (z[..., 3].numpy(), 2.0), (np.from_dlpack(z), 3.0)):
        array[..., 0] = value
    plain.numpy()[..., 0], plain[..., 3].numpy()[..., 0] = 1.0, 2.0
    plain[..., 0] = 3.0
    assert torch.equal(z.clone(), plain)
    assert torch.equal(rows.clone(), want)
    assert torch.equal(ll.entropy(z), ll.entropy(plain))
    with pytest.raises(RuntimeError, match="requires grad"):
        model(True, x.device)(x).numpy()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(teacher(x)[0])


def test_no_function_reads_memory_that_is_not_there(x):
    """Functions that read the memory itself get the values."""
    z, plain = teacher(x)
    for lazy, want in ((z, plain), (z[..., 3], plain[..., 3])):
        same = [lazy.clone(), torch.asarray(lazy), torch.stack([lazy])[0]]
        same += [lazy.cpu(), torch.zeros_like(want).copy_(lazy)]
        for found in same:
            assert torch.equal(found.to(want.device) + 0, want)
        assert lazy.tolist() == want.tolist()
        assert lazy.is_shared() == want.is_shared()  # which is True on a GPU


def overwritten(t):
    """What a kernel of another library does: it takes the address of t, and writes to it."""
    size = t.numel()
    memory = np.ctypeslib.as_array((ctypes.c_double * size).from_address(t.data_ptr()))
    memory.reshape(t.shape)[..., 3] = -30.0


def test_a_kernel_that_overwrites_the_logits(x, t):
    """Whoever has the address of the logits may change them, and losses see it."""
    x, t = x.cpu(), t.cpu()  # whose memory ctypes can reach
    z, plain = teacher(x)
    assert z.data_ptr() == z.detach().data_ptr()  # as Liger's backward has it
    overwritten(z)
    overwritten(plain)
    assert torch.equal(z.materialize(), plain)
    assert torch.equal(z.clone(), plain)
    torch.testing.assert_close(ll.cross_entropy(z, t), ll.cross_entropy(plain, t))
    torch.testing.assert_close(
        F.cross_entropy(z.view(-1, V), t.view(-1)), F.cross_entropy(plain.view(-1, V), t.view(-1))
    )


VIEWS = {
    "the logits": lambda z: z,
    "detached": lambda z: z.detach(),
    "rows": lambda z: z.view(-1, V),
    "one sequence": lambda z: z[1:],
    "rows of a view": lambda z: z.flatten(0, 1)[2:7],
    "the last sequence": lambda z: z.unbind(0)[-1],
    "one more dimension": lambda z: z[:, None],
    "some steps": lambda z: z[:, 1:],
    "transposed": lambda z: z.transpose(0, 1),
    "some columns": lambda z: z[..., 2:7],
    "a copy": lambda z: z.clone(),
    "rows by index": lambda z: z[[1, 0]],
    "rows by mask": lambda z: z[torch.arange(2) > 0],
    "probabilities": lambda z: z.softmax(-1),
    "scaled": lambda z: z / 2,
    "a view of scaled ones": lambda z: (z / 2)[1:],
    "a copy of a view": lambda z: z[1:].clone(),
}
CONTIGUOUS = [*VIEWS][:7]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("through", CONTIGUOUS)
def test_views_share_what_a_kernel_overwrites(through, known, x, t):
    """Views made before see the change, as plain views do. Copies and functions do not."""
    x, t = x.cpu(), t.cpu()
    z, plain = teacher(x)
    lazy, want = ({name: view(logits) for name, view in VIEWS.items()} for logits in (z, plain))
    if known:
        z.tolist()
        lazy["some steps"].tolist()
    overwritten(VIEWS[through](z))
    overwritten(VIEWS[through](plain))
    for name in VIEWS:
        assert torch.equal(lazy[name].materialize(), want[name]), name
        torch.testing.assert_close(ll.entropy(lazy[name]), ll.entropy(want[name]))
        torch.testing.assert_close(lazy[name].exp().sum(), want[name].exp().sum())


def test_a_hook_that_writes_is_told_what_to_do(x):
    m = model(True, x.device)
    m[1].register_forward_hook(lambda module, args, out: out.mul_(2))
    with pytest.raises(RuntimeError, match=r"by Tensor.mul_, .* Write to a copy instead: logits"):
        m(x)


# --- what lazy logits are computed from


def test_logits_after_a_step(x, t):
    """They raise and say what to do, also if the step writes through .data."""
    for through_data in (False, True):
        m = model(True, x.device)
        z = m(x)
        kept, loss = z.detach().materialize(), F.cross_entropy(z.view(-1, V), t.view(-1))
        loss.backward()
        assert torch.equal(kept, z.materialize())  # before the step they can be read
        z = m(x)
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
        with torch.no_grad():
            for p in m.parameters():
                (p.data if through_data else p).sub_(p.grad)
        for read in (lambda z: z.argmax(-1), lambda z: z.materialize(), lambda z: ll.entropy(z)):
            with pytest.raises(RuntimeError, match="before the step, or keep a copy"):
                read(z.detach())


def test_logits_that_are_known_outlive_a_step(x, t):
    """Computed values do not change."""
    m = model(True, x.device)
    z = m(x)
    want = z.detach().tolist()
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
    with torch.no_grad():
        m[1].weight.zero_()
    assert z.tolist() == z.materialize().tolist() == want
    assert torch.equal(z.argmax(-1), torch.tensor(want, device=x.device).argmax(-1))
    assert z[1:].tolist() == want[1:]


def test_a_weight_with_nan_is_not_a_changed_weight(x):
    m = model(True, x.device)
    with torch.no_grad():
        m[1].weight[0] = torch.nan
    assert type(m(x)[1:]) is LazyLogits
