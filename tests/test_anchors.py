"""Bugs that users of other libraries met, numbered as in docs/bugs.md; none of them is here."""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import math
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import oracle
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from laws import error, host_reads_nothing, poisoned_memory, value_and_grad
from triton.runtime import JITFunction
from triton.runtime.interpreter import GridExecutor

import logitless as ll
from logitless import kernels
from logitless.kernels import config, launch
from logitless.kernels.layout import row_offset

KERNELS = {  # every kernel that is launched, by the module that launches it
    name: module
    for _, file, _ in pkgutil.iter_modules(kernels.__path__, "logitless.kernels.")
    for module in (importlib.import_module(file),)
    for name in vars(module)
    if name.endswith("_kernel")
}
BLOCK = 32
ROUNDING = 4e-6  # of an fp32 result against fp64, relative to the largest value


@pytest.fixture(params=[1, 3], ids=["whole rows", "3 splits"])
def cut(request, impl):
    """Blocks of 32 columns, with each row by one program, and split over three."""
    with config.override(block_v=BLOCK, splits=request.param):
        yield request.param


def assert_is(ours, naive, x, tolerance=ROUNDING):
    """Value and gradient of ours are those of naive in fp64, under a random upstream gradient."""
    upstream = torch.randn(naive(x.double()).shape, dtype=torch.float64).to(x.device)
    got = value_and_grad(ours, x, upstream)
    want = value_and_grad(naive, x.double(), upstream)
    assert error(got[0], want[0]) <= tolerance
    assert error(got[1], want[1]) <= tolerance


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("V", [1, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 4])
def test_bug_01_padded_columns_are_not_counted(V, device):
    """Padded columns counted in the logsumexp where V is not a multiple of the tile.

    Far below 0, one padded column read as 0 would be all of the result.
    """
    x = torch.randn(2, V, device=device) - 60
    target = torch.randint(0, V, (2,), device=device)
    assert_is(ll.logsumexp, oracle.logsumexp, x)
    assert_is(
        lambda x: ll.cross_entropy(x, target, reduction="none"),
        lambda x: oracle.cross_entropy(x, target, reduction="none"),
        x,
    )


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("offset", [-1e2, -1e4, -1e6])
def test_bug_02_all_negative_logits(offset, device):
    """A max that starts at 0: all-negative logits give inf or NaN."""
    x = torch.randn(2, 70, device=device) + offset
    assert_is(ll.logsumexp, oracle.logsumexp, x)
    assert_is(ll.entropy, oracle.entropy, x)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(
    ("V", "place"), [(96, 0), (101, 0), (101, 1), (96, 2)], ids=["first", "odd", "middle", "last"]
)
@pytest.mark.parametrize(
    "low", [-torch.inf, torch.finfo(torch.float32).min], ids=["-inf", "lowest float"]
)
def test_bug_03_a_block_all_minus_inf(V, place, low, device):
    """First block of a row all -inf: NaN. Nor is there one from any block, or the lowest float."""
    x = torch.randn(1, V, device=device) * 2
    x[:, place * BLOCK : (place + 1) * BLOCK] = low
    rest = (x[0] > low).nonzero().squeeze(1)
    target = rest[[3]]
    assert_is(ll.logsumexp, oracle.logsumexp, x)
    assert_is(ll.entropy, lambda x: oracle.entropy(x[:, rest]), x)
    assert_is(lambda x: ll.cross_entropy(x, target), lambda x: oracle.cross_entropy(x, target), x)
    assert torch.equal(ll.score(x, target).argmax, x.argmax(1))


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("V", [BLOCK + 1, 3 * BLOCK - 1])
def test_bug_04_softcap_comes_before_padding(V, device):
    """softcap applied after padding: padded -inf columns become -softcap and count."""
    x = torch.full((2, V), -100.0, device=device)
    want = torch.full((2,), -5 + math.log(V), device=device)
    torch.testing.assert_close(ll.logsumexp(x, softcap=5.0), want, rtol=0, atol=2e-6)
    assert_is(
        lambda x: ll.logsumexp(x, softcap=5.0),
        lambda x: oracle.logsumexp(x, softcap=5.0),
        x + torch.randn_like(x) * 95,
    )


LOSSES = {
    "cross_entropy": lambda x, t: ll.cross_entropy(x, t, reduction="none"),
    "smoothed": lambda x, t: ll.cross_entropy(x, t, reduction="none", label_smoothing=0.3),
    "logprob": lambda x, t: -ll.score(x, t).logprob,
    "token_logprobs": lambda x, t: -ll.token_logprobs(x, t),
}


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("name", LOSSES)
def test_bug_05_common_offset_costs_no_digits(name, device):
    """`lse - x_y` under a common offset of 1e4 loses four digits."""
    x = torch.randn(4, 70, device=device) + 1e4
    target = torch.randint(0, 70, (4,), device=device)
    smoothing = 0.3 if name == "smoothed" else 0.0
    want = oracle.cross_entropy(x.double(), target, reduction="none", label_smoothing=smoothing)
    got = LOSSES[name](x, target).double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    picked = x.gather(1, target[:, None]).squeeze(1)
    naive = torch.logsumexp(x, 1) - picked
    assert (naive.double() - want).abs().max() > 1e-4, "the bug would not show on these logits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_bug_06_loss_is_fp32(dtype, reduction, impl, device):
    """Loss returned or accumulated in bf16: 1.6e-2 off."""
    x = (torch.randn(12, 50, device=device) * 2).to(dtype)
    target = torch.randint(0, 50, (12,), device=device)
    got = ll.cross_entropy(x, target, reduction=reduction)
    want = oracle.cross_entropy(x.double(), target, reduction=reduction)
    assert got.dtype == torch.float32
    assert error(got, want) <= 1e-6
    assert error(want.to(dtype), want) > 1e-5, "the bug would not show on these numbers"


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bug_07_true_class_gradient_is_rounded_once(dtype, inplace, impl, device):
    """True-class gradient rounded before subtracting 1: 100 % off at p = 0.999 in bf16."""
    V, target = 65, torch.tensor([7, 0], device=device)
    x = torch.zeros(2, V, device=device)
    x[[0, 1], target] = math.log(999 * (V - 1))
    x = x.to(dtype)
    want = value_and_grad(
        lambda x: F.cross_entropy(x, target, reduction="sum"), x.double(), torch.ones(())
    )[1]
    got = value_and_grad(
        lambda x: ll.cross_entropy(x * 1, target, reduction="sum", inplace=inplace),
        x,
        torch.ones((), device=device),
    )[1]
    at = target[:, None]
    relative = (got.double().gather(1, at) / want.gather(1, at) - 1).abs()
    assert (relative <= torch.finfo(dtype).eps).all()
    assert (want.gather(1, at).abs() < 2e-3).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_bug_09_every_rows_upstream_gradient_counts(inplace, impl, device):
    """reduction="none" with per-token weights: wrong gradients; only grad_output[0] used."""
    x = torch.randn(5, 37, device=device)
    target = torch.randint(0, 37, (5,), device=device)
    upstream = torch.tensor([0.5, -2.0, 0.0, 3.0, 1.0], device=device)
    row_weight = torch.tensor([1.0, 0.25, 2.0, -1.0, 0.0], device=device)
    for weight in (None, row_weight):
        how = {"reduction": "none", "row_weight": weight}
        got = value_and_grad(
            lambda x, how=how: ll.cross_entropy(x * 1, target, inplace=inplace, **how), x, upstream
        )
        want = value_and_grad(
            lambda x, how=how: oracle.cross_entropy(x, target, **how), x.double(), upstream.double()
        )
        assert error(got[0], want[0]) <= ROUNDING
        assert error(got[1], want[1]) <= ROUNDING


def test_bug_11_second_backward_gives_the_same(impl, device):
    """Second backward on a retained graph scaled twice."""
    leaf = torch.randn(3, 37, device=device, requires_grad=True)
    target = torch.randint(0, 37, (3,), device=device)
    loss = ll.cross_entropy(leaf * 1, target, label_smoothing=0.1) * 3
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_bug_11_second_backward_in_place_raises(impl, device):
    """Second backward on a retained graph scaled twice: the logits are gone, so it raises."""
    leaf = torch.randn(3, 37, device=device, requires_grad=True)
    target = torch.randint(0, 37, (3,), device=device)
    loss = ll.cross_entropy(leaf * 1, target, inplace=True) * 3
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.equal(leaf.grad, first)


READERS = {
    "logsumexp": lambda x, t, **_: ll.logsumexp(x),
    "entropy": lambda x, t, **_: ll.entropy(x, softcap=3.0),
    "token_logprobs": lambda x, t, **_: ll.token_logprobs(x, t),
    "score": lambda x, t, **_: ll.score(x, t).logprob,
    "cross_entropy": lambda x, t, **how: ll.cross_entropy(x, t, label_smoothing=0.1, **how),
}


@pytest.mark.parametrize("name", READERS)
def test_bug_19_logits_are_not_overwritten(name, impl, device):
    """Input logits overwritten without telling autograd; even zeroed under no_grad."""
    x = torch.randn(3, 37, device=device)
    target = torch.randint(0, 37, (3,), device=device)
    leaf = x.clone().requires_grad_()
    READERS[name](leaf, target).sum().backward()
    assert torch.equal(leaf, x)
    assert leaf._version == 0
    with torch.no_grad():
        READERS[name](leaf, target, inplace=True)
    assert torch.equal(leaf, x)
    assert leaf._version == 0


def test_bug_19_autograd_is_told_of_inplace(impl, device):
    """Input logits overwritten without telling autograd: its count of writes goes up."""
    leaf = torch.randn(3, 37, device=device, requires_grad=True)
    logits = leaf * 1
    square = logits.square().sum()  # saves the logits
    before = logits._version
    loss = ll.cross_entropy(logits, torch.tensor([1, 2, 3], device=device), inplace=True)
    assert logits._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (square + loss).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_bug_20_compiled_with_ignored_rows(reduction, inplace, impl, device):
    """torch.compile with ignored rows: output rows never written, silently wrong loss."""
    x = torch.randn(4, 37, device=device)
    target = torch.tensor([-100, 3, -100, 36], device=device)

    def f(x, target):
        return ll.cross_entropy(x * 1, target, reduction=reduction, inplace=inplace)

    upstream = torch.randn(() if reduction == "mean" else 4, device=device)
    want = value_and_grad(
        lambda x: oracle.cross_entropy(x, target, reduction=reduction),
        x.double(),
        upstream.double(),
    )
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with poisoned_memory():
        got = value_and_grad(lambda x: compiled(x, target), x, upstream)
    assert error(got[0], want[0]) <= ROUNDING
    assert error(got[1], want[1]) <= ROUNDING
    assert not got[1][target == -100].any()


BAD = [37, -1, 41, -7, 2**31 + 3, -(2**40)]
SENTINEL = 113  # in any dtype, int8 too
GUARD = 64  # elements on each side


class Guarded:
    """New tensors in the middle of larger buffers, whose ends must stay as they are."""

    def __init__(self):
        self.buffers = []
        self.real = torch.empty, torch.empty_like

    def empty(self, *shape, **how):
        shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        buffer = self.real[0](shape.numel() + 2 * GUARD, **how).fill_(SENTINEL)
        self.buffers.append(buffer)
        return buffer[GUARD : GUARD + shape.numel()].view(shape)

    def empty_like(self, t, *, dtype=None, memory_format=None):
        return self.empty(t.shape, dtype=dtype or t.dtype, device=t.device)

    def holding(self, t):
        return self.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)

    def __enter__(self):
        torch.empty, torch.empty_like = self.empty, self.empty_like
        return self

    def __exit__(self, *_):
        torch.empty, torch.empty_like = self.real
        assert len(self.buffers) > 3, "the kernels' outputs are not guarded"
        for buffer in self.buffers:
            assert (buffer[:GUARD] == SENTINEL).all()
            assert (buffer[-GUARD:] == SENTINEL).all()


class TestBug21BadTargets:
    """Out-of-range target: out-of-bounds read, or loss 0 with nonzero gradient."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("K", [None, 1, 3], ids=["1 id", "(1,) ids", "3 ids"])
    @pytest.mark.usefixtures("nobody_looks")
    def test_bug_21_kernels_stay_in_bounds(self, dtype, K, device):
        """As on a GPU, where nobody looks: NaN for the row, and no other element knows."""
        rows, V = len(BAD) + 2, 37
        ids = torch.randint(0, V, (rows,) if K is None else (rows, K), device=device)
        wrong = ids.clone()
        wrong.view(rows, -1)[1:-1, -1] = torch.tensor(BAD, device=device)
        bad = torch.zeros(rows, dtype=torch.bool, device=device)
        bad[1:-1] = True
        x = torch.randn(rows, V, device=device).to(dtype)
        results = {}
        for name, given in (("right", ids), ("wrong", wrong)):
            with (
                ll.impl("triton"),
                config.override(block_v=BLOCK, splits=3 if K is None else 1),
                Guarded() as guarded,
            ):
                logits = guarded.holding(x).requires_grad_()
                found = ll.row_stats(logits, given)
                (grad,) = torch.autograd.grad(
                    (found.lse[:, None] - found.picked.view(rows, -1)).sum(), logits
                )
            assert torch.equal(logits, x)
            results[name] = found.lse.detach(), found.picked.detach(), grad
        (right_lse, right_picked, right_grad), (lse, picked, grad) = results.values()
        assert torch.equal(lse, right_lse)
        assert torch.equal(picked.isnan(), wrong != ids)
        assert torch.equal(picked[wrong == ids], right_picked[wrong == ids])
        assert grad[bad].isnan().all()
        assert torch.equal(grad[~bad], right_grad[~bad])

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.usefixtures("nobody_looks")
    def test_bug_21_loss_is_not_silent(self, inplace, device):
        """Loss 0 with nonzero gradient is what it was; both are NaN, and only there."""
        target = torch.tensor([3, 37, -100, -1], device=device)
        bad = torch.tensor([False, True, False, True], device=device)
        leaf = torch.randn(4, 37, device=device, requires_grad=True)
        with ll.impl("triton"):
            loss = ll.cross_entropy(leaf * 1, target, reduction="none", inplace=inplace)
            loss.sum().backward()
        assert torch.equal(loss.isnan(), bad)
        assert torch.equal(leaf.grad.isnan(), bad[:, None].expand(4, 37))

    @pytest.mark.parametrize("value", BAD)
    def test_bug_21_cpu_raises_naming_row_and_value(self, value, impl, device):
        if device != "cpu":
            pytest.skip("a GPU does not look: tests/gpu")
        x = torch.randn(4, 37)
        target = torch.tensor([0, -100, value, 36])
        rule = rf"target must be in \[0, 37\) or ignore_index \(-100\), got {value} at row 2\."
        for f in (ll.cross_entropy, ll.score):
            with pytest.raises(IndexError, match=rule):
                f(x, target)
        ids = target.where(target != -100, 0)
        for f in (ll.token_logprobs, ll.row_stats):
            with pytest.raises(
                IndexError, match=rf"ids must be in \[0, 37\), got {value} at row 2\."
            ):
                f(x, ids)


@pytest.mark.parametrize("count", [3, 5, 1])
def test_bug_21_target_count_must_match(count, device):
    """Target count that doesn't match the rows accepted."""
    x, target = torch.randn(4, 37, device=device), torch.zeros(count, dtype=int, device=device)
    for f in (ll.cross_entropy, ll.score):
        with pytest.raises(ValueError, match=rf"target must have shape \(4,\).*got \({count},\)"):
            f(x, target)


@triton.jit
def _offsets_kernel(OUT, rows_t, stride_b, stride_t):
    row = tl.program_id(0)
    tl.store(OUT + row, row_offset(row, rows_t, stride_b, stride_t))


@pytest.mark.parametrize("stride_t", [2**31 - 16, 2**31 + 16, 1 << 28], ids=str)
@pytest.mark.parametrize("stride_b", [0, 2**33 + 8, 2**31 - 8], ids=str)
def test_bug_22_row_offsets_are_int64(stride_t, stride_b, device):
    """int32 overflow past 2^31 elements."""
    offsets = torch.zeros(24, dtype=torch.int64, device=device)
    _offsets_kernel[(24,)](offsets, 12, stride_b, stride_t)
    assert offsets.tolist() == [r // 12 * stride_b + r % 12 * stride_t for r in range(24)]
    assert max(offsets.tolist()) > 2**31


@contextlib.contextmanager
def launches():
    """(kernel, grid) of every launch, none of which runs."""
    made = []

    def interpreted(self, *_, **__):
        made.append((self.fn.__name__, self.grid))

    def compiled(self, *_, grid, **__):
        made.append((self.fn.__name__, grid))

    with (
        mock.patch.object(GridExecutor, "__call__", interpreted),
        mock.patch.object(JITFunction, "run", compiled),
    ):
        yield made


def loss_and_gradient(x, target, ids):
    """Enough calls to launch every kernel of these losses."""
    leaf = x.detach().requires_grad_()
    ll.cross_entropy(leaf, target, label_smoothing=0.1).backward()
    ll.token_logprobs(leaf, ids).sum().backward()
    (ll.cross_entropy(leaf * 1, target, inplace=True) * 2).backward()
    ll.score(x, target)


def test_bug_22_rows_are_on_the_long_grid_axis(device):
    """Grid dimension over 65,535: only the first axis goes further, so rows are on it."""
    launched = []
    for splits in (1, 3):
        grids = []
        for rows in (7, 70000):
            x = torch.zeros(1, 1, device=device).expand(rows, 8)
            target = torch.zeros(rows, dtype=torch.int64, device=device)
            with ll.impl("triton"), config.override(splits=splits), launches() as made:
                loss_and_gradient(x, target, target[:, None].expand(-1, 2))
            grids.append(made)
        for (name, few), (_, many) in zip(*grids, strict=True):
            assert few[1:] == many[1:], name
            assert many[0] > few[0] or many[0] == 1, name
        launched.append(len(made))
    assert launched[1] > launched[0] > 5, "parts that are merged"
    assert config.MAX_SPLITS <= 65535


def test_bug_23_host_reads_no_value(device, nobody_looks):
    """Host synchronisations in every call: no value decides what is launched.

    tests/gpu/test_contracts.py has the same of each option, and that it would be seen.
    """
    x = torch.randn(4, 37, device=device)
    target = torch.tensor([3, -100, 36, 0], device=device)
    ids = target.clamp(min=0)[:, None].expand(-1, 2)
    with ll.impl("triton"), launches() as made, host_reads_nothing():
        loss_and_gradient(x, target, ids)
        ll.cross_entropy(
            x, target, weight=x[0].abs(), z_loss=0.1, softcap=5.0,
            temperature=x[:, 0].abs(), row_weight=x[:, 1],
        )  # fmt: skip
    assert len(made) > 5


@pytest.mark.parametrize("rows", [0, 2], ids=["empty", "all ignored"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "how",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(37), "z_loss": 0.1}],
    ids=["plain", "smoothing", "weight"],
)
def test_bug_24_no_row_counts(rows, reduction, inplace, how, impl, device):
    """All targets ignored, or empty batch: ZeroDivisionError or NaN."""
    how = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in how.items()}
    leaf = torch.full((rows, 37), torch.nan, device=device).requires_grad_()  # not to be read
    target = torch.full((rows,), -100, device=device)
    loss = ll.cross_entropy(leaf * 1, target, reduction=reduction, inplace=inplace, **how)
    assert loss.shape == ((rows,) if reduction == "none" else ())
    assert not loss.any()
    (loss.sum() * 3).backward()
    assert leaf.grad.shape == (rows, 37)
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_bug_25_kernels_run_on_the_tensors_device(monkeypatch):
    """Kernel launched on the wrong device: launches happen under the tensor's own."""
    entered = []

    class Module:
        @staticmethod
        def device(device):
            return contextlib.nullcontext(entered.append(device))

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    second = torch.device("cuda", 1)
    with launch.on(second):
        assert entered == [second]
    sources = [inspect.getsource(module) for module in set(KERNELS.values())]
    for name in KERNELS:
        assert any(re.search(rf"Launch\(\s*{name}\b", source) for source in sources), name
    for source in sources:
        assert not re.search(r"_kernel\[", source), "launched past the one place that looks"


CHOICES = {  # all that a kernel may be compiled for: what is asked, and how memory is cut
    "ENTROPY", "TOTAL", "ARGMAX", "SECOND", "HAS", "ALIGNED", "X_ALIGNED", "T_ALIGNED",
    "BLOCK_V", "BLOCK_K", "BLOCK_P", "BLOCK_N", "SPAN", "MEAN", "LOG_K", "ROWS", "KIND",
    "DIVERGENCE", "RENORM_P", "STUDENT_OVER", "PRELOAD_IDS", "FIRST", "LAST", "UPCAST", "BLOCK_D",
    "BLOCK_R", "STEPS", "STEP_C", "STEP_U", "STEP_F", "PACK", "TRANSPOSED", "HAS_LABEL", "KNOWN",
    "EARLY",
}  # fmt: skip


def constants_of(name) -> set[str]:
    """What a kernel is compiled for, also where that is one struct."""
    module = KERNELS[name]
    parameters = inspect.signature(getattr(module, name).fn).parameters.values()
    found = {p.name for p in parameters if p.annotation is tl.constexpr}
    if "CONSTANTS" in found:
        fields = dataclasses.fields(module._Constants)
        found = found - {"CONSTANTS"} | {field.name.upper() for field in fields}
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_bug_25_no_length_is_a_constant(name):
    """Constexpr lengths that recompile for every new sequence length."""
    constants = constants_of(name)
    assert constants, "seen, or the comparison says nothing"
    assert constants <= CHOICES


SAME_KERNELS = """
import torch
import logitless as ll
from aot import recording
from logitless.core import checks
from logitless.kernels import config, launch

checks.triton_can_run = checks.in_range = lambda *_, **__: None  # nothing is going to run

def compiled(rows, V, splits):
    x = torch.zeros(rows, V, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64)
    with recording() as launches, config.override(splits=splits), ll.impl("triton"):
        ll.cross_entropy(x, target, label_smoothing=0.1, reduction="none").sum().backward()
        ll.score(x, target).entropy.sum().backward()
        ll.token_logprobs(x, target[:, None].expand(-1, 5)).sum().backward()
        (ll.cross_entropy(x * 1, target, inplace=True) * 2).backward()
    return {(s.name, str(s.signature), str(s.constants), str(s.attrs)) for s, *_ in launches}

for splits in (1, 3):
    few = compiled(7, 32000, splits)
    assert len(few) > 4, few
    for rows, V in ((8, 32000), (99, 32000), (128, 32000), (7, 32016), (9, 50256)):
        assert compiled(rows, V, splits) == few, (rows, V, splits, compiled(rows, V, splits) ^ few)
    assert compiled(5, 128256, splits) == compiled(8, 151936, splits)  # beyond 2^16, longer blocks
assert compiled(7, 32000, 3) == compiled(7, 32000, 5)
print("the same")
"""


def test_bug_25_new_lengths_need_no_new_kernel():
    """Constexpr lengths that recompile: what Triton would be given is the same for every N and V
    of an alignment, on a process without the interpreter."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-c", SAME_KERNELS],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "the same"


def test_every_bug_of_this_issue_is_named():
    """Bugs 1 to 7, 9, 11 and 19 to 25 of the list each have a test here that names them."""
    source = Path(__file__).read_text()
    for number in itertools.chain(range(1, 8), (9, 11), range(19, 26)):
        assert f"def test_bug_{number:02d}_" in source
