"""`make sanitize` launches every kernel."""

import torch

import logitless as ll
from tests.support import kernel_calls, sanitizer
from tests.support.launches import every_kernel, launched
from tests.support.sizes import ON_GPU

WAIT_FOR_OTHERS = {"_pair_finish_kernel"}


def test_every_kernel_is_launched_by_a_call():
    """By the interpreter all but those whose programs wait for each other."""
    assert len(every_kernel()) > 20
    with launched() as ran, ll.impl("triton"):
        given = kernel_calls.make(5, 48, torch.bfloat16)
        for name in kernel_calls.CALLS:
            kernel_calls.run(name, given)
    assert every_kernel() - ran - (set() if ON_GPU else WAIT_FOR_OTHERS) == set()
    assert {*sanitizer.IN_FP32} <= kernel_calls.CALLS.keys()
