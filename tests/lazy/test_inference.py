"""Lazy logits without gradients: everything that reads or writes them acts as with plain logits."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.lazy import recipe
from logitless.lazy.logits import LazyLogits
from tests.support.fusable_models import Model
from tests.support.lazy_models import B, Largest, T, V, model
from tests.support.lazy_writes import WHERE, WRITES

IDS = torch.tensor([[0, 3, 2, 10, 4], [7, 1, 1, 0, 9]])
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@pytest.fixture(autouse=True)
def always_lazy(monkeypatch):
    monkeypatch.setattr(recipe, "SMALL", 0)
    ll.report()


def pair(x, mode=torch.no_grad):
    """Lazy logits, and the same plain logits."""
    with mode():
        z = model(True, x.device)(x)
        assert type(z) is LazyLogits
        return z, model(False, x.device)(x)


def saved(z):
    file = io.BytesIO()
    torch.save(z, file)
    return torch.load(io.BytesIO(file.getvalue()))


def sampled(z):
    """A step of sampling as many scripts write it."""
    logits = z[:, -1, :] / 0.7
    top, _ = torch.topk(logits, 5)
    logits[logits < top[:, [-1]]] = -float("inf")
    torch.manual_seed(0)
    return torch.multinomial(logits.softmax(-1), 2)


def banned(z):
    """Writes to the last row, and reads the row again from the logits."""
    last = z[0, -1]
    last[5] = -1e9
    last /= 2
    last.clamp_(min=-50)
    return torch.cat([last, z[0, -1], z[1, 2]])


READS = {  # each with the number of times that lazy logits are materialised
    "cpu": (lambda z: z.cpu().sort().values, 1),
    "numpy": (lambda z: z.detach().cpu().numpy() + z.cpu().numpy(), 1),
    "array": (lambda z: np.asarray(z.cpu()), 1),
    "pickle": (lambda z: pickle.loads(pickle.dumps(z)), 1),
    "save": (saved, 1),
    "deepcopy": (lambda z: copy.deepcopy(z), 1),
    "tolist": (lambda z: torch.tensor(z.tolist()), 1),
    "stack": (lambda z: torch.stack([z, z]), 1),
    "dlpack": (lambda z: torch.from_dlpack(z), 1),
    "vmap": (lambda z: torch.vmap(lambda row: row.sum(-1))(z), 1),
    "index_put": (lambda z: z.index_put((torch.tensor([0]),), torch.zeros_like(z[0])), 1),
    "a step": (sampled, 1),
    "banned tokens": (banned, 1),
    "argmax": (lambda z: z.argmax(-1), 0),
    "topk": (lambda z: z.topk(3).indices, 0),
    "a comparison": (lambda z: z > 0, 0),
    "the loss": (lambda z: F.cross_entropy(z.float().view(-1, V), IDS.view(-1).to(z.device)), 0),
    "perplexity": (lambda z: z.log_softmax(-1).gather(-1, IDS[..., None].to(z.device)), 0),
    "labels": (lambda z: z[torch.arange(2)[:, None], torch.arange(5), IDS], 0),
    "one number": (lambda z: z[1, -1, 3] * 2, 1),
    "some columns": (lambda z: z[:, -1, [1, 3]] * 2, 1),
    "probabilities": (lambda z: z.softmax(-1).cumsum(-1), 1),
}


@MODES
@pytest.mark.parametrize("name", READS)
def test_a_read(name, mode, x):
    read, count = READS[name]
    z, plain = pair(x.cpu(), mode)
    ll.report()
    with mode():
        got, want = (torch.as_tensor(read(t)).clone() for t in (z, plain))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, rtol=1e-6 if name == "the loss" else 1e-12, atol=1e-12)
    assert sum(record.count for record in ll.report()) == count


def test_only_rows_that_are_read_are_computed(x):
    """`logits[:, -1]` computes one row per sequence, and the logits stay lazy."""
    z, plain = pair(x)
    last = z[:, -1]
    torch.testing.assert_close(last.cumsum(-1), plain[:, -1].cumsum(-1))
    assert last.own.shape == (B, V)
    torch.testing.assert_close(z[0, 2, 1:3].clone(), plain[0, 2, 1:3])
    assert not z.known


def test_evaluation_never_allocates_the_logits(device):
    """Chunks of five rows; `logits[:, -1]` computes one row per sequence, also in a prefill."""
    rows, v, d = 48, 231, 1
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(v, d), torch.nn.Linear(d, v)).to(device)
    ids = torch.randint(v, (2, rows // 2), device=device)
    plain = copy.deepcopy(net)
    ll.fuse(net, head="1", workspace=5 * v * 4)

    def loss(net):
        return F.cross_entropy(net(ids).float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    sizes = {}
    for name, run in {"loss": loss, "last": lambda net: net(ids)[:, -1].exp()}.items():
        want = run(plain)
        with torch.no_grad(), Largest() as seen:
            got = run(net)
        torch.testing.assert_close(got, want)
        sizes[name] = seen.size
    assert sizes["loss"] <= 5 * v
    assert sizes["last"] <= 2 * v
    with torch.no_grad(), Largest() as seen:
        loss(plain)
    assert seen.size == rows * v


def test_printed_values(x, monkeypatch):
    """Printing shows the values of small logits, and materialises no other logits."""
    z, plain = pair(x)
    assert repr(z) == f"LazyLogits(shape=(2, 5, 11), dtype={x.dtype}, device={x.device})"
    monkeypatch.setattr(recipe, "SMALL", V * x.element_size())
    assert str(z[0, -1]) == str(plain[0, -1])
    assert "LazyLogits" in str(z)
    z.cumsum(-1)
    assert str(z) == str(plain)
    m = model(True, x.device)
    with torch.no_grad():
        row = m(x)[0, -1]
        m[1].weight.add_(1)
    assert repr(row).startswith("LazyLogits")  # the values can no longer be computed


def test_small_logits_are_plain(x, monkeypatch):
    size = B * T * V * x.element_size()
    for limit, kind in ((size, torch.Tensor), (size - 1, LazyLogits)):
        monkeypatch.setattr(recipe, "SMALL", limit)
        with torch.no_grad():
            assert type(model(True, x.device)(x)) is kind
            fused = ll.fuse(Model().double().to(x.device))
            ids = torch.zeros(B, T * V // 23 + 1, dtype=torch.int64, device=x.device)
            assert type(fused(ids[:, :1])) is torch.Tensor
    z, plain = pair(x)
    row = z[:, -1]  # small, so that functions of the row read its values
    assert type(row / 2) is torch.Tensor
    torch.testing.assert_close(row.softmax(-1), plain[:, -1].softmax(-1))
    assert torch.equal(row.argmax(-1), plain[:, -1].argmax(-1))
    assert not z.known
    ll.report()
    torch.testing.assert_close(ll.entropy(z[:, 0]), ll.entropy(plain[:, 0]))
    assert [r.operation for r in ll.report()] == ["a loss of logitless"]


@MODES
def test_the_option_keeps_logits_plain(mode, x):
    ids = torch.zeros(2, 3, dtype=torch.int64, device=x.device)
    fused = ll.fuse(Model().to(x.device))
    assert str(ll.is_fused(fused)) == "The head returns lazy logits."
    with mode():
        assert type(fused(ids)) is LazyLogits
        ll.fuse(fused, lazy_inference=False)
        assert type(fused(ids)) is torch.Tensor
        with ll.lazy_logits():
            assert type(fused(ids)) is LazyLogits
    assert type(fused(ids)) is LazyLogits
    assert str(ll.is_fused(fused)) == "The head returns lazy logits if gradients are wanted."
    head = ll.nn.FusedHead(4, 7, lazy_inference=False)
    with mode():
        assert type(head(torch.ones(2, 4))) is torch.Tensor
    for make in (lambda **how: ll.fuse(Model(), **how), lambda **how: ll.nn.FusedHead(2, 3, **how)):
        with pytest.raises(TypeError, match="lazy_inference must be True or False, got 1"):
            make(lazy_inference=1)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize(
    ("where", "limit"),
    [*((name, 0) for name in WHERE), ("the last row", 2 * V * 8), ("a column of rows", 2 * V * 8)],
)
def test_a_write_changes_what_it_changes_in_plain_logits(where, limit, x, monkeypatch):
    """Or raises, for example because another part has memory of its own."""
    monkeypatch.setattr(recipe, "SMALL", limit)
    before = {
        "nothing": lambda z, part: None,
        "the logits": lambda z, part: z.cumsum(-1),
        "the part": lambda z, part: part.cumsum(0),
        "a view of the part": lambda z, part: part.reshape(-1),
    }
    done = 0
    first = [*WHERE].index(where)
    for i, write in enumerate(WRITES):
        if write in ("out=", "resize_"):
            continue  # which change the shape of plain logits
        name, read = [*before.items()][(first + i) % len(before)]
        z, plain = pair(x)
        found = []
        for t in (plain, z):
            part, other = WHERE[where](t), t[1]
            kept = read(t, part)
            try:
                with torch.no_grad():
                    WRITES[write](part)
            except (RuntimeError, TypeError) as error:
                found.append(error)
                continue
            after = [t, part, other, t[0], *([kept] if name == "a view of the part" else [])]
            found.append([a.clone() for a in after])
        want, got = found
        if isinstance(got, Exception):
            assert isinstance(want, Exception) or "must not be written to" in str(got)
            continue
        torch.testing.assert_close(got, want, equal_nan=True)
        done += 1
    assert done > (12 if x.device.type == "cpu" else 5)  # NumPy and some other ways need a CPU


def test_views_share_a_write_after_their_logits_are_gone(x):
    z, plain = pair(x)
    a, b = z[:, 1:], z[:, :-1]
    want_a, want_b = plain[:, 1:], plain[:, :-1]
    del z
    for t, want in ((a, want_a), (b, want_b)):
        t.add_(1)
        want.add_(1)
    torch.testing.assert_close([a.clone(), b.clone()], [want_a, want_b])
    with pytest.raises(RuntimeError, match="must not be written to"), torch.enable_grad():
        a.mul_(torch.ones((), dtype=a.dtype, requires_grad=True))


@MODES
@pytest.mark.parametrize("read", [lambda row: row.view(-1), lambda row: row.numpy()])
def test_a_part_that_was_read_sees_a_write(read, mode, x):
    """A part in memory of its own becomes a view of what is written."""
    z, plain = pair(x.cpu(), mode)
    with mode():
        part = read(z[0])
        z.add_(1)
        want = (plain + 1)[0]
        got = part.clone() if torch.is_tensor(part) else torch.tensor(part)
        torch.testing.assert_close(got, want.view(got.shape))
        torch.testing.assert_close(z.clone(), plain + 1)


@pytest.mark.parametrize("write", ["in place", "data"])
def test_a_step_before_the_read_raises(write, x):
    m = model(True, x.device)
    with torch.no_grad():
        z, read = m(x), m(x)
        want = read.cumsum(-1)
        (m[1].weight if write == "in place" else m[1].weight.data).add_(1)
        for function in (lambda: z.argmax(-1), lambda: z[:, -1].tolist(), lambda: z.cumsum(-1)):
            with pytest.raises(RuntimeError, match=r"must not be modified in place.*\.step\(\)"):
                function()
        assert torch.equal(read.cumsum(-1), want)


@MODES
def test_a_write_to_the_hidden_states(mode, x):
    """Raises, or does not change the logits."""
    body, head = model(True, x.device)
    with mode():
        hidden = body(x)
        want = F.linear(hidden, head.weight, head.bias)
        z = head(hidden)
        hidden.add_(1)
        if mode is torch.no_grad:
            with pytest.raises(RuntimeError, match="must not be modified in place"):
                z.cumsum(-1)
        else:
            torch.testing.assert_close(z[:, -1].cumsum(-1), want[:, -1].cumsum(-1))
            torch.testing.assert_close(z.cumsum(-1), want.cumsum(-1))


def test_gradients_of_the_logits_themselves(x):
    z, plain = pair(x)
    grads = []
    for t in (z, plain):
        leaf = t.detach().requires_grad_()
        (leaf.softmax(-1) * 3).square().sum().backward()
        grads.append(leaf.grad.clone())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_of_the_logits(backend, x):
    torch._dynamo.reset()
    function = torch.compile(lambda z: (z * 2).log_softmax(-1).sum(-1), backend=backend)
    z, plain = pair(x)
    with torch.no_grad():
        torch.testing.assert_close(function(z).clone(), function(plain))
        torch.testing.assert_close(function(z[:, -1]).clone(), function(plain[:, -1]))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_traced_logits_are_plain(x):
    m = model(True, x.device)
    with torch.no_grad():
        want = model(False, x.device)(x)
        assert type(torch.func.functional_call(m, dict(m.named_parameters()), (x,))) is LazyLogits
        mapped = torch.vmap(m)(x)
        traced = torch.jit.trace(m, x)(x)
    for got in (mapped, traced):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want)


def test_autocast_and_half(device):
    torch.manual_seed(0)
    fused = ll.fuse(Model().to(device))
    plain = ll.unfuse(copy.deepcopy(fused))
    ids = torch.arange(20, device=device).view(4, 5)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        got, want = fused(ids), plain(ids)
    assert (type(got), got.dtype) == (LazyLogits, torch.bfloat16)
    assert torch.equal(got.clone(), want)
    assert torch.equal(got[:, -1].float().argmax(-1), want[:, -1].float().argmax(-1))
