"""torch.compile of fused models: trained and evaluated as the plain model, without logits.

The graph ends before the head. The head and the loss over its lazy logits run uncompiled.
"""

import copy

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import logitless as ll
from examples.demo.memory import extra_memory
from logitless.lazy import recipe, report
from logitless.lazy.logits import LazyLogits
from tests.support import inductor
from tests.support.fusable_models import D, Model, V

INDUCTOR = pytest.param("inductor", marks=inductor.needs_compiler)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])

# Warnings of the compiler itself are not ours. Ours are errors.
pytestmark = pytest.mark.filterwarnings(
    "default",
    "error:logits of a fused head are materialised",
    "error:fuse has no effect",
)


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    ll.report()
    monkeypatch.setattr(report, "_warned", set())
    with torch._inductor.config.patch(inductor.QUICK):
        yield


def batch(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(length))


class Trained(Model):
    """A model with a body, which computes its own loss if it gets labels."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, ids, labels=None):
        logits = self.lm_head(self.body(self.embed(ids)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, V), labels.view(-1)), logits


def pair(device: str) -> tuple[Trained, Trained]:
    """A fused model and the same plain model."""
    fused = ll.fuse(Trained().to(device))
    return fused, ll.unfuse(copy.deepcopy(fused))


def grads(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and its gradients under an upstream gradient that is not 1."""
    upstream = torch.tensor(0.7, device=loss.device, dtype=loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), upstream)]


def assert_lazy(logits: torch.Tensor) -> None:
    assert type(logits) is LazyLogits
    assert not logits.known
    assert ll.report() == []


def outside(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits.view(-1, V), ids.view(-1)), logits


def inside(model, ids):
    return model(ids, labels=ids)


LOSSES = pytest.mark.parametrize("loss", [inside, outside])


def compiled_model(fused, loss, **how):
    compiled = torch.compile(fused, **how)
    assert ll.is_fused(compiled)
    return lambda ids: loss(compiled, ids)


def compiled_itself(fused, loss, **how):
    fused.compile(**how)
    return lambda ids: loss(fused, ids)


def compiled_step(fused, loss, **how):
    """The model and its loss are inside of a larger compiled function."""
    return torch.compile(lambda ids: loss(fused, ids), **how)


@pytest.mark.parametrize("compiled", [compiled_model, compiled_itself, compiled_step])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@LOSSES
def test_training(loss, backend, compiled, device):
    """Three steps compile once, and no logits are materialised."""
    fused, plain = pair(device)
    step, ids = compiled(fused, loss, backend=backend), batch().to(device)
    want = grads(plain, loss(plain, ids)[0])
    frames = []
    for _ in range(3):
        value, logits = step(ids)
        torch.testing.assert_close(grads(fused, value), want)
        assert_lazy(logits)
        frames.append(counters["frames"]["total"])
    assert counters["stats"]["unique_graphs"] >= 1
    assert len(set(frames)) == 1
    assert ll.is_fused(fused)


@pytest.mark.gpu("CUDA graphs; on a CPU this mode is plain Inductor")
@pytest.mark.filterwarnings("ignore:.*CUDA graph")
def test_reduce_overhead(device):
    fused, plain = pair(device)
    compiled, ids = torch.compile(fused, mode="reduce-overhead"), batch().to(device)
    want = grads(plain, inside(plain, ids)[0])
    for _ in range(4):
        value, logits = inside(compiled, ids)
        torch.testing.assert_close(grads(fused, value), want)
        assert_lazy(logits)


@pytest.mark.parametrize("dynamic", [None, True])
@LOSSES
@pytest.mark.few(1)
def test_lengths(loss, dynamic, device):
    """Batches of other lengths are compiled at most once more."""
    fused, plain = pair(device)
    compiled = torch.compile(fused, backend="eager", dynamic=dynamic)
    frames = []
    for length in (3, 4, 5, 9, 14):
        ids = batch(2, length).to(device)
        value, logits = loss(compiled, ids)
        torch.testing.assert_close(grads(fused, value), grads(plain, loss(plain, ids)[0]))
        assert_lazy(logits)
        frames.append(counters["frames"]["total"])
    assert frames[-1] == frames[1]


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.few(1)
def test_peak_memory(backend, device):
    """A compiled step takes as much memory as an uncompiled step, within 5 %."""
    vocab, width = 8192, 64
    model = Trained().to(device)
    model.embed, model.lm_head = nn.Embedding(V, width), nn.Linear(width, vocab)
    model.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    ll.fuse(model.to(device), workspace=1 << 20)
    ids = batch(4, 256).to(device)

    def step(model):
        F.cross_entropy(model(ids).view(-1, vocab), ids.view(-1)).backward()

    peaks = []
    for one in (model, torch.compile(model, backend=backend)):
        step(one)  # compiles, and allocates the gradients
        peaks.append(extra_memory(device, one, step))
    assert peaks[1] <= 1.05 * peaks[0]
    assert peaks[1] < ids.numel() * vocab * 4 / 2  # half of the size of the logits


@BACKENDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.few(1)
def test_evaluation(mode, backend, device, monkeypatch):
    """Large logits of an evaluation are lazy too."""
    monkeypatch.setattr(recipe, "SMALL", 0)
    fused, plain = (one.eval() for one in pair(device))
    ids = batch().to(device)
    compiled = torch.compile(fused, backend=backend)
    with mode():
        want, _ = inside(plain, ids)
        for _ in range(2):
            value, logits = inside(compiled, ids)
            torch.testing.assert_close(value, want)
            assert_lazy(logits)
            torch.testing.assert_close(compiled(ids).argmax(-1), plain(ids).argmax(-1))


def test_an_evaluation_a_teacher_and_training(device):
    """As in decoding, logits of at most 32 MiB without gradients are plain, in one graph.

    Inside of lazy_logits(), logits of any size are lazy, also if they were plain before.
    """
    fused, plain = pair(device)
    compiled, ids = torch.compile(fused, backend="aot_eager"), batch().to(device)
    want = plain(ids).detach()
    student = torch.zeros_like(want)
    with torch.no_grad():
        got = compiled(ids)
        assert not counters["graph_break"]
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want)
        with ll.lazy_logits():
            logits = compiled(ids)
        assert_lazy(logits)
        assert type(compiled(ids)) is torch.Tensor
    got, want = (ll.kl_div(student, z, direction="forward") for z in (logits, want))
    torch.testing.assert_close(got, want)
    value, logits = inside(compiled, ids)
    torch.testing.assert_close(grads(fused, value), grads(plain, inside(plain, ids)[0]))
    assert_lazy(logits)
    with torch.no_grad():
        assert type(compiled(ids)) is torch.Tensor


def test_a_whole_graph(device):
    """With fullgraph=True, where the graph must not end, the error says how to get plain logits."""
    fused, plain = pair(device)
    ids, whole = batch().to(device), {"backend": "eager", "fullgraph": True}
    for model in (fused, lambda ids: outside(fused, ids)):
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"ends the graph .* unfuse\(model\)"
        ):
            torch.compile(model, **whole)(ids)
    compiled = torch.compile(ll.unfuse(fused), **whole)
    value, logits = inside(compiled, ids)
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(grads(fused, value), grads(plain, inside(plain, ids)[0]))


def test_a_whole_graph_without_gradients(device, monkeypatch):
    """As `test_a_whole_graph`, unless all logits without gradients are plain."""
    monkeypatch.setattr(recipe, "SMALL", 0)
    fused, plain = pair(device)
    compiled, ids = torch.compile(fused, backend="eager", fullgraph=True), batch().to(device)
    with torch.no_grad():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="lazy_inference=False"):
            compiled(ids)
        ll.fuse(fused, lazy_inference=False)
        torch.testing.assert_close(compiled(ids), plain(ids))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.few(1)
def test_a_checkpoint(whole, device):
    """Dynamo leaves a checkpoint to PyTorch if the graph ends inside of it."""
    fused, plain = pair(device)
    ids = batch().to(device)

    def step(model, ids):
        logits = lambda ids: model(ids) if whole else model.lm_head(model.embed(ids))  # noqa: E731
        return F.cross_entropy(
            checkpoint(logits, ids, use_reentrant=False).view(-1, V), ids.view(-1)
        )

    value = torch.compile(lambda: step(fused, ids), backend="aot_eager")()
    torch.testing.assert_close(
        torch.autograd.grad(value, fused.lm_head.weight)[0],
        torch.autograd.grad(step(plain, ids), plain.lm_head.weight)[0],
    )
    assert ll.report() == []


def test_a_new_head_and_none(device):
    """A head that replaced the fused head after a compiled step is fused too, until unfuse."""
    fused, plain = pair(device)
    compiled, ids = torch.compile(fused, backend="eager"), batch().to(device)
    assert_lazy(inside(compiled, ids)[1])
    fused.lm_head, plain.lm_head = (nn.Linear(D, V).to(device) for _ in range(2))
    plain.lm_head.load_state_dict(fused.lm_head.state_dict())
    value, logits = inside(compiled, ids)
    want = grads(plain, inside(plain, ids)[0])
    torch.testing.assert_close(grads(fused, value), want)
    assert_lazy(logits)
    ll.unfuse(compiled)
    value, logits = inside(compiled, ids)
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(grads(fused, value), want)


@pytest.mark.filterwarnings("default:fuse has no effect")
def test_a_head_that_is_not_called(device):
    class Other(Trained):
        def forward(self, ids):
            return F.linear(self.embed(ids), self.lm_head.weight)

    compiled = torch.compile(ll.fuse(Other().to(device)), backend="eager")
    with pytest.warns(UserWarning, match="did not call its head"):
        compiled(batch().to(device))
    assert "did not call" in ll.is_fused(compiled).reason


@BACKENDS
@pytest.mark.few(1)
def test_fused_head(backend, device):
    torch.manual_seed(1)
    fused = nn.Sequential(nn.Linear(4, D), ll.nn.FusedHead(D, V)).to(device)
    x, target = torch.randn(5, 4, device=device), torch.arange(5, device=device)
    plain = nn.Sequential(fused[0], nn.Linear(D, V)).to(device)
    plain[1].load_state_dict(fused[1].state_dict())
    compiled = torch.compile(fused, backend=backend)
    logits = compiled(x)
    got, want = grads(fused, F.cross_entropy(logits, target)), F.cross_entropy(plain(x), target)
    torch.testing.assert_close(got, grads(plain, want))
    assert_lazy(logits)
    counters.clear()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x))
    assert not counters["graph_break"]


def test_autocast(device):
    fused = ll.fuse(Trained().to(device))
    compiled, ids = torch.compile(fused, backend="aot_eager"), batch().to(device)
    with torch.autocast(device, torch.bfloat16):
        value, logits = inside(compiled, ids)
        other, _ = inside(fused, ids)
    assert logits.dtype == torch.bfloat16
    assert_lazy(logits)
    torch.testing.assert_close(grads(fused, value), grads(fused, other))
