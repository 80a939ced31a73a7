"""`make sanitize` launches every kernel."""

from unittest import mock

import torch

import logitless as ll
from logitless.kernels.launch import Launch
from tests.support import kernel_calls, sanitizer
from tests.support.launches import every_kernel
from tests.support.sizes import ON_GPU

WAIT_FOR_OTHERS = {"_pair_finish_kernel"}


def test_every_kernel_is_launched_by_a_call():
    """On a CPU all but those whose programs wait for each other. The launches are only recorded."""
    assert len(every_kernel()) > 20
    names = set()

    def record(self, *tensors):
        names.add(self.kernel.fn.__name__)

    given = kernel_calls.make(5, 48, torch.bfloat16)
    with mock.patch.object(Launch, "__call__", record), ll.impl("triton"):
        for name in kernel_calls.CALLS:
            kernel_calls.run(name, given, finite=False)
    assert every_kernel() - names - (set() if ON_GPU else WAIT_FOR_OTHERS) == set()
    assert {*sanitizer.IN_FP32} <= kernel_calls.CALLS.keys()
