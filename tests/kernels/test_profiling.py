"""What profilers show: every kernel has a readable name, and every launch its bytes."""

import importlib
import pkgutil
import re
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

import logitless as ll
from logitless import kernels
from logitless.kernels.profiling import elements
from tests.support.launches import every_kernel

KERNELS = {
    name: kernel
    for _, file, _ in pkgutil.walk_packages(kernels.__path__, "logitless.kernels.")
    for name, kernel in vars(importlib.import_module(file)).items()
    if name.endswith("_kernel")
}


def hooks_of(name: str):
    """`repr` and `launch_metadata` of a kernel, compiled or interpreted."""
    kernel = KERNELS[name]
    if hasattr(kernel, "kwargs"):  # as the interpreter keeps them
        return kernel.kwargs["repr"], kernel.kwargs["launch_metadata"]
    return kernel._repr, kernel.launch_metadata


def test_every_kernel_has_a_name_and_bytes():
    assert set(KERNELS) == every_kernel()
    types = {"X": "*bf16", "STUDENT": "constexpr", "LABEL": "*i64"}
    for name in KERNELS:
        represent, metadata = hooks_of(name)
        assert represent is not None, name
        assert metadata is not None, name
        family = name.strip("_").removesuffix("_kernel")
        compiled = represent(SimpleNamespace(signature=types, constants={"KIND": "jsd", "K": 1}))
        assert compiled.startswith(f"logitless_{family}_bf16")
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", compiled), "all that PTX takes"


def test_names_tell_the_kind_and_the_ids():
    represent, metadata = hooks_of("_pair_fwd_kernel")
    kind = SimpleNamespace(signature={"X": "*fp32"}, constants={"KIND": "jsd"})
    assert represent(kind) == "logitless_pair_fwd_fp32_jsd"
    _, metadata = hooks_of("_stats_bwd_kernel")
    x, ids = torch.zeros(3, 100, dtype=torch.bfloat16), torch.zeros(3, 64, dtype=torch.int64)
    got = metadata((1,), None, {"X": x, "IDS": ids, "W": None, "DX": x, "K": 64, "V": 100})
    assert got == {"name": "stats_bwd[bf16, K=64]", "bytes": 2 * 600 + 8 * 192}


def test_bytes_are_those_that_move():
    x, ids = torch.zeros(3, 100), torch.zeros(3, 4, dtype=torch.int64)
    one = torch.zeros(())
    _, metadata = hooks_of("_gather_fwd_kernel")
    assert metadata((1,), None, {"X": x, "IDS": ids, "K": 4})["bytes"] == 12 * 4 + 12 * 8
    _, metadata = hooks_of("_scale_kernel")
    assert metadata((1,), None, {"X": x, "G": one.expand(3)}) == {
        "name": "scale[fp32]",
        "bytes": 2 * 1200 + 4,
    }
    _, metadata = hooks_of("_nll_fwd_bwd_kernel")
    fresh = metadata((1,), None, {"X": x, "DX": torch.zeros(3, 100, dtype=torch.bfloat16)})
    assert fresh["bytes"] == 1200 + 600
    assert metadata((1,), None, {"X": x, "DX": None})["bytes"] == 2400
    assert elements(torch.zeros(5, 1).expand(5, 7)) == 5


@pytest.mark.gpu("the interpreter calls no launch hooks")
def test_a_profiler_sees_every_launch():
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    seen = []

    def hook(metadata):
        seen.append(metadata.get())

    ll.logsumexp(x)  # compiled, so that the next launch would take the short way
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        ll.logsumexp(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert [launch["name"] for launch in seen] == ["stats_fwd[bf16]"]
    assert seen[0]["bytes"] >= x.numel() * 2
