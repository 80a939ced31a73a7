"""A choice of implementation is obeyed or refused, in forward and in backward."""

from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import logitless as ll
from tests.support.calls import CALLS, TEACHER, leaves, made, outcome
from tests.support.refusals import READERS, X, refuses
from tests.support.sizes import ON_GPU


def kernels_run(f):
    """Whether f launches any kernel, on the CPU: whether the interpreter is asked for one."""
    launched = []
    run = GridExecutor.__call__

    def recorded(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", recorded):
        f()
    return bool(launched)


interpreted = pytest.mark.skipif(ON_GPU, reason="where there is a GPU, nothing is interpreted")


class TestImpl:
    """An explicit choice of code is obeyed or refused, never replaced."""

    @pytest.mark.parametrize("name", ["cuda", "", None, "Triton"])
    def test_unknown_name(self, name):
        with (
            refuses(ValueError, f"impl must be one of 'triton', 'eager', got {name!r}."),
            ll.impl(name),
        ):
            pass

    @interpreted
    def test_default_follows_the_tensor(self, monkeypatch):
        monkeypatch.delenv("LOGITLESS_IMPL", raising=False)
        assert kernels_run(lambda: ll.logsumexp(X)) is False

    @interpreted
    @pytest.mark.parametrize("name", ["eager", "triton"])
    @pytest.mark.parametrize("by", ["block", "environment"])
    def test_choice_is_what_runs(self, name, by, monkeypatch):
        if by == "environment":
            monkeypatch.setenv("LOGITLESS_IMPL", name)
            assert kernels_run(lambda: ll.logsumexp(X)) is (name == "triton")
        else:
            monkeypatch.setenv("LOGITLESS_IMPL", "triton" if name == "eager" else "eager")
            with ll.impl(name):  # the block wins over the environment
                assert kernels_run(lambda: ll.logsumexp(X)) is (name == "triton")

    @interpreted
    def test_blocks_nest_and_end(self):
        with ll.impl("eager"):
            with ll.impl("triton"):
                assert kernels_run(lambda: ll.logsumexp(X)) is True
            assert kernels_run(lambda: ll.logsumexp(X)) is False
            with pytest.raises(KeyError), ll.impl("triton"):
                raise KeyError
            assert kernels_run(lambda: ll.logsumexp(X)) is False

    def test_unknown_name_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("LOGITLESS_IMPL", "fast")
        with refuses(ValueError, "LOGITLESS_IMPL must be one of 'triton', 'eager', got 'fast'."):
            ll.logsumexp(X)

    @pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
    def test_triton_refuses_fp64(self, function):
        rule = "impl 'triton' must be used with float16, bfloat16 or float32, got float64."
        with ll.impl("triton"), refuses(TypeError, rule):
            function(X.double())

    @pytest.mark.parametrize("function", READERS.values(), ids=READERS.keys())
    def test_triton_refuses_a_cpu_tensor_without_its_interpreter(self, function, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        rule = (
            "impl 'triton' must be used with a GPU tensor, or with a cpu tensor and "
            "TRITON_INTERPRET=1, got a cpu tensor."
        )
        with ll.impl("triton"), refuses(RuntimeError, rule):
            function(X)


@pytest.mark.parametrize("name", ["jsd", "kl_div", "topk_distill", "cross_entropy"])
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_backward_outside_of_the_block_that_chose_the_implementation(name, source):
    """The gradient of a jsd by the kernels was 20 to 36 % off outside `with ll.impl("triton")`."""
    want = outcome(name, source)
    parts = [t.requires_grad_() for t in leaves(source)]
    with ll.impl("triton"):
        out = CALLS[name](made(source, parts))[0]
    got = torch.autograd.grad(out, parts)
    for a, b in zip(got, want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_kernels_refuse_meta_tensors():
    words = "must be used with a GPU tensor, .* TRITON_INTERPRET=1, got a meta tensor"
    with ll.impl("triton"), pytest.raises(RuntimeError, match=words):
        ll.logsumexp(TEACHER.to("meta"))
