"""For developers: counts PyTorch operations and kernel launches of losses over a small head.

    python benchmarks/host_operations.py [CHECKOUT] [--names]

The counts are for forward and backward together, and include the two GEMMs of backward. Views and
allocations count as operations too, because each of them takes time on the host. Without a GPU,
kernels run under Triton's interpreter. The checks of label values are then turned off, because
these checks do not run on a GPU. CHECKOUT is the checkout to measure. The default is the checkout
of this script.
"""

import argparse
import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("checkout", nargs="?", default=Path(__file__).parents[1], type=Path)
parser.add_argument("--names", action="store_true", help="list the operations and the kernels")
args = parser.parse_args()
sys.path.insert(0, str(args.checkout.resolve()))
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import logitless as ll  # noqa: E402
from logitless.core import call  # noqa: E402
from logitless.kernels.launch import Launch  # noqa: E402


def calls():
    """Yields the name of each measured call, and a function that runs forward and backward."""
    rows, vocab = (64, 1024) if device == "cuda" else (4, 64)  # the interpreter is slow
    hidden = torch.randn(rows, 64, device=device, requires_grad=True)
    weight = torch.randn(vocab, 64, device=device, requires_grad=True)
    target, g = torch.randint(0, vocab, (rows,), device=device), torch.randn(rows, device=device)

    def head() -> ll.LinearLogits:
        hidden.grad = weight.grad = None
        return ll.LinearLogits(hidden, weight)

    def score() -> None:
        found = ll.score(head(), target)
        torch.autograd.backward((found.logprob, found.entropy), (g, g))

    yield "mean", lambda: ll.cross_entropy(head(), target).backward()
    yield "none", lambda: ll.cross_entropy(head(), target, reduction="none").backward(g)
    yield "token_logprobs", lambda: ll.token_logprobs(head(), target).backward(g)
    yield "score, logprob", lambda: ll.score(head(), target).logprob.backward(g)
    yield "score", score


def counted(f) -> tuple[Counter, Counter]:
    """Returns the operations of PyTorch that f() calls, and the kernels that f() launches."""
    kernels, run = Counter(), Launch.__call__

    def launch(self, *tensors):
        kernels[self.kernel.fn.__name__] += 1
        # The operations of Triton's interpreter are not operations of the library.
        if device == "cuda":
            run(self, *tensors)

    with (
        mock.patch.object(Launch, "__call__", launch),
        profile(activities=[ProfilerActivity.CPU]) as recorded,
    ):
        f()
    operations = [e for e in recorded.events() or () if e.name.startswith("aten::")]
    outer = [e for e in operations if not str(getattr(e.cpu_parent, "name", "")).startswith("aten")]
    return Counter(e.name for e in outer), kernels


with (
    ll.impl("triton") if device == "cpu" else contextlib.nullcontext(),
    mock.patch.object(call, "reads_values", return_value=False),
):
    for name, f in calls():
        for _ in range(3):
            f()
        operations, kernels = counted(f)
        print(f"{name:14} {operations.total():3} operations, {kernels.total()} launches")
        if args.names:
            print("   ", *(f"{n} {k}" for k, n in (operations + kernels).items()), sep="  ")
