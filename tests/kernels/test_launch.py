"""How kernels are launched: grids, devices, what they are compiled for, and no waiting."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import torch

import logitless as ll
from logitless import kernels
from logitless.core import target_checks, tensor_checks
from logitless.kernels import config, launch
from tests.support.forked import together
from tests.support.laws import host_reads_nothing


@contextlib.contextmanager
def launches():
    """Records (kernel, grid) of every launch. No kernel runs.

    The class Launch is patched instead of Triton, because a Launch calls Triton only to compile.
    """
    made = []

    def record(self, *_):
        made.append((self.kernel.fn.__name__, self.grid))

    with mock.patch.object(launch.Launch, "__call__", record):
        yield made


def loss_and_gradient(x, target, ids):
    """Enough calls to launch every kernel of these losses."""
    leaf = x.detach().requires_grad_()
    ll.cross_entropy(leaf, target, label_smoothing=0.1).backward()
    ll.token_logprobs(leaf, ids).sum().backward()
    (ll.cross_entropy(leaf * 1, target, inplace=True) * 2).backward()
    ll.score(x, target)


def test_rows_are_on_the_long_grid_axis(device):
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


def test_host_reads_no_value(device, nobody_looks):
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


def test_kernels_run_on_the_tensors_device(monkeypatch):
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
    for path in Path(kernels.__file__).parent.rglob("*.py"):  # past the one place that looks
        assert not re.search(r"_kernel\[", path.read_text()), path


def test_launches_are_kept_by_what_they_are_compiled_for(monkeypatch):
    """Sizes, constants and alignments; with another alignment, a compiled kernel could fault."""
    kernel, x = kernels.zero_ignored.__globals__["_zero_ignored_kernel"], torch.zeros(40)
    monkeypatch.setattr(launch, "_launches", {})
    with launches() as made:
        for tensor, number, block in (
            (x, 16, 8), (x[16:], 16, 8), (x[1:], 16, 8), (x, 17, 8), (x, 16, 16),
        ):  # fmt: skip
            launch.launch(kernel, (1,), (tensor, None), (number,), num_warps=1, BLOCK_D=block)
    assert len(made) == 5
    assert len(launch._launches) == 4


def compiled(rows, vocab, splits):
    """What Triton would be given to compile, by the losses over logits."""
    from tests.support import aot  # which hides GPUs

    x = torch.zeros(rows, vocab, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64)
    with aot.recording() as launches, config.override(splits=splits), ll.impl("triton"):
        ll.cross_entropy(x, target, label_smoothing=0.1, reduction="none").sum().backward()
        ll.score(x, target).entropy.sum().backward()
        ll.token_logprobs(x, target[:, None].expand(-1, 5)).sum().backward()
        (ll.cross_entropy(x * 1, target, inplace=True) * 2).backward()
        ll.kl_div(x, x.detach(), direction="forward").backward()
        ll.jsd(x, x.detach()).backward()
    return {(s.name, str(s.signature), str(s.constants), str(s.attrs)) for s, *_ in launches}


def same_kernels(_):
    # Nothing is going to run.
    tensor_checks.triton_can_run = target_checks.in_range = lambda *_, **__: None
    for splits in (1, 3):
        # Here, a kernel with one warp per row is used from 16 rows on.
        for first, others in ((7, (8, 15)), (16, (17, 99, 128))):
            one = compiled(first, 32000, splits)
            assert len(one) > 4, one
            for rows, vocab in (*((n, 32000) for n in others), (first, 32016), (others[0], 50256)):
                more = compiled(rows, vocab, splits)
                assert more == one, (rows, vocab, splits, more ^ one)
        # beyond 2^16, longer blocks
        assert compiled(5, 128256, splits) == compiled(8, 151936, splits)
    assert compiled(7, 32000, 3) == compiled(7, 32000, 5)


def test_new_lengths_need_no_new_kernel():
    """Constexpr lengths that recompile: what Triton would be given is the same for every N and V
    of an alignment, on a process without the interpreter."""
    together(1, same_kernels)
