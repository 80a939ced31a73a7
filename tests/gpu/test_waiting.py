"""Kernels whose programs wait for each other: crowded, replayed, and turned off."""

import importlib.util
from functools import partial
from unittest import mock

import pytest
import torch

import logitless as ll
from logitless import kernels
from logitless.contract import Reading, Total
from logitless.eager.stats_coefficients import of_one
from logitless.kernels import config, program_exchange
from logitless.kernels.cross_entropy.one_pass import nll_fwd_bwd_plan
from logitless.kernels.pairs.forward import splits_of
from tests.support.launches import launched
from tests.support.sizes import DEVICE, ON_GPU, sized

ROWS, VOCAB = sized((2048, 128256), (3, 300))
DTYPES = [torch.bfloat16, torch.float32]


def in_place(x, other, labels):
    """The loss, and the gradient that took the place of the logits."""
    logits = x.clone().requires_grad_()
    loss = ll.cross_entropy(logits, labels, inplace=True)
    return loss.detach(), logits.detach()


def divergence(x, other, labels, of=ll.jsd):
    logits = x.clone().requires_grad_()
    loss = of(logits, other, reduction="none")
    return loss.detach(), *torch.autograd.grad(loss.sum(), logits)


MEAN = Total(True)


def mean(x, other, labels, total=MEAN):
    """The mean or sum over rows, its gradient, and a copy of some columns, all in one launch."""
    reading = Reading(x.shape[1], labels, ignore_index=-100, wants=("nll",))
    coefficients = of_one["nll", x.device, torch.float32]
    hidden, into = other[:, : sized(2500, 40)], x.clone()
    launch = kernels.plan_total(total, *x.shape, reading, coefficients, hidden, copies=True)
    (loss,), _, copy = launch(into, hidden, labels)
    return loss, into, copy


def smoothed(x, other, labels):
    few = slice(512)  # one launch adds up at most MAX_PARTS parts of losses
    return mean(x[few], other[few], labels[few], Total(False, 0.1, 0.01))


WORK = {
    "in place": in_place,
    "mean": mean,
    "smoothed": smoothed,
    "jsd": divergence,
    "tvd": partial(divergence, of=ll.tvd),
}
each_work = pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())


def make(dtype, rows=ROWS, V=VOCAB):
    x, other = (torch.randn(rows, V, device=DEVICE).mul_(2).to(dtype) for _ in range(2))
    labels = torch.randint(0, V, (rows,), device=DEVICE)
    labels[::7] = -100
    return x, other, labels


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu("several streams, with programs that are resident together")
@each_work
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beside_gemms_on_other_streams_as_alone(work, dtype):
    """Bit for bit, while two streams of GEMMs and three of the same work fill the GPU."""
    given = [make(dtype, rows) for rows in (ROWS, ROWS // 2 + 1, 3)]
    want = [work(*each) for each in given]
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    gemms, works = ([torch.cuda.Stream() for _ in range(n)] for n in (2, len(given)))
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in gemms:
            with torch.cuda.stream(stream):
                for _ in range(20):
                    a @ a
        got = []
        for stream, each in zip(works, given, strict=True):
            with torch.cuda.stream(stream):
                got.append(work(*each))
        torch.cuda.synchronize()
        for found, wanted in zip(got, want, strict=True):
            assert_equal(found, wanted)


@pytest.mark.gpu("CUDA graphs")
@each_work
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replayed_beside_gemms_as_alone(work, dtype):
    given = make(dtype)
    want = work(*given)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work(*given)
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(side):
            for _ in range(20):
                a @ a
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(got, want)


PATHS = {  # the kernel that waits, and what runs where it may not
    "in place": ("_nll_fwd_bwd_kernel", "_stats_bwd_kernel"),
    "jsd": ("_pair_finish_kernel", "_pair_fwd_kernel"),
    "tvd": ("_pair_finish_kernel", "_pair_fwd_kernel"),
}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turned_off_the_path_changes_and_the_result_does_not(name, dtype, monkeypatch):
    """The interpreter's programs never wait: there the same kernel with a row for itself."""
    given, work = make(dtype, sized(64, 3)), WORK[name]
    waits, instead = PATHS[name]
    with config.override(**sized({}, {"span": 512})):
        want = work(*given)
        with launched() as before:
            work(*given)
    monkeypatch.setattr(program_exchange, "WAITING", False)
    with config.override(**sized({}, {"span": 64})):
        got = work(*given)
        with launched() as after:
            work(*given)
    assert (waits in before) == (ON_GPU or name == "in place")
    assert waits not in after
    assert instead in after
    torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=1e-7)
    rtol = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=1e-7)


class OnAGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")


@pytest.mark.parametrize("value", ["0", "1", None])
def test_the_variable_is_read_when_the_module_is_imported(value, monkeypatch):
    monkeypatch.delenv("LOGITLESS_WAITING", raising=False)
    if value is not None:
        monkeypatch.setenv("LOGITLESS_WAITING", value)
    again = importlib.util.module_from_spec(program_exchange.__spec__)
    program_exchange.__spec__.loader.exec_module(again)
    assert again.WAITING is (value != "0")


@pytest.mark.parametrize("waiting", [True, False])
def test_who_may_wait(waiting, monkeypatch):
    """On a GPU, as many programs as share a row of 128,256; none where it is turned off."""
    monkeypatch.setattr(program_exchange, "WAITING", waiting)
    x = torch.zeros(1, 1).expand(1, 128256).as_subclass(OnAGPU)
    with mock.patch.object(config, "_override", {}):
        how = ((1.0, None, None), False, False, None, None, waiting, config.revision)
        plan = nll_fwd_bwd_plan(x.shape, (x.numel(), 1), 0, 4, x.device, None, *how)
        assert (plan is not None) is waiting
        assert (splits_of(x) > 1) is waiting
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert program_exchange.may_wait(1, cpu)
    assert not program_exchange.may_wait(2, cpu)
    assert program_exchange.may_wait(program_exchange.MAX_PROGRAMS, gpu) is waiting
    assert not program_exchange.may_wait(program_exchange.MAX_PROGRAMS + 1, gpu)
