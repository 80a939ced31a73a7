"""Losses over a head, timed: PYTHONPATH=. python benchmarks/bench_linear.py --out FILE.md

Forward and backward in bf16, beside the GEMMs that the work cannot do without, by cuBLAS at full
size, in one run. "extra memory" is the peak beyond hidden states, weight and their gradients. Needs
a CUDA GPU.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tables import MIB, Table, run

import logitless as ll
from logitless.cli.bench.timing import Budget, device_time, extra_memory
from logitless.head import ACCUMULATE

BUDGET = Budget(120.0, 300.0)  # long enough for the GPU's clocks to settle


class Shape(NamedTuple):
    rows: int
    width: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.rows}×{self.width}×{self.vocab}"


SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 151936), Shape(16384, 2304, 256000))


class Head:
    """Hidden states, a weight and targets whose logits are N(0, 4)."""

    def __init__(self, shape: Shape):
        N, D, V = shape
        self.shape = shape
        self.hidden = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * (2 / D**0.5)
        self.weight = weight.requires_grad_()
        self.target = torch.randint(V, (N,), device="cuda")

    @property
    def leaves(self):
        return self.hidden, self.weight

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def both(self, f: Callable) -> Callable:
        """Forward and backward of f."""

        def once(_=None):
            self.forget()
            f(*self.leaves, self.target).backward()

        return once

    def memory(self, once: Callable) -> int:
        """Beyond the gradients."""
        once()
        self.forget()
        gradients = sum(t.numel() * t.element_size() for t in self.leaves)
        return extra_memory("cuda", None, once) - gradients

    def product(self) -> float:
        """Milliseconds of one of the three GEMMs, on average."""
        N, _, V = self.shape
        h, W = (t.detach() for t in self.leaves)
        z = torch.empty(N, V, device="cuda", dtype=h.dtype)
        dh, dW = torch.empty_like(h), torch.empty_like(W)

        def three(_):
            torch.mm(h, W.t(), out=z)
            torch.mm(z, W, out=dh)
            torch.mm(z.t(), h, out=dW)

        return device_time(lambda: None, three, BUDGET).ms / 3


def ms(once: Callable) -> float:
    return device_time(lambda: None, once, BUDGET).ms


def ours(h, W, target, **how):
    return ll.cross_entropy(ll.LinearLogits(h, W, **how), target)


def eager(h, W, target):
    return F.cross_entropy(F.linear(h, W), target)


def _liger() -> Callable:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda h, W, t: loss(W, h, t)


def _cce() -> Callable:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


def _fla() -> Callable:
    from fla.modules import FusedLinearCrossEntropyLoss

    loss = FusedLinearCrossEntropyLoss()
    return lambda h, W, t: loss(h, t, W)


# Each makes its loss, or fails where the rival is absent.
RIVALS: dict[str, Callable[[], Callable]] = {
    "eager": lambda: eager,
    "torch.compile": lambda: torch.compile(eager),
    "liger": _liger,
    "cut-cross-entropy": _cce,
    "fla": _fla,
}


def check(head: Head, f: Callable) -> None:
    """On some rows, the loss and gradients of PyTorch's in fp32."""
    few = 512
    got = [t.detach().clone().requires_grad_() for t in (head.hidden[:few], head.weight)]
    want = [t.detach().float().requires_grad_() for t in got]
    loss = f(*got, head.target[:few])
    loss.backward()
    truth = eager(*want, head.target[:few])
    truth.backward()
    assert abs(loss.item() - truth.item()) < 2e-3 * truth.item(), (loss, truth)
    for a, b in zip(got, want, strict=True):
        gap = (a.grad.float() - b.grad).norm() / b.grad.norm()
        assert gap < 1e-2, gap


def heads(shape: Shape) -> Callable[[Table], None]:
    def part(table: Table) -> None:
        head = Head(shape)
        check(head, ours)
        check(head, functools.partial(ours, workspace=64 * MIB))
        before = 3 * head.product()
        settings = (
            ("logitless", {}, 1.06),
            ("logitless, 128 MiB", {"workspace": 128 * MIB}, 1.25),
            ("logitless, 128 MiB, summed in bf16",
             {"workspace": 128 * MIB, "accumulate": "weight"}, None),
            ("logitless, summed in fp32", {"accumulate": "fp32"}, None),
        )  # fmt: skip
        found = []
        for name, how, ratio in settings:
            once = head.both(functools.partial(ours, **how))
            found.append((name, ratio, head.memory(once), ms(once)))
        after = 3 * head.product()
        three = (before + after) / 2  # clocks drift
        table.add(f"{shape} f+b", f"three cuBLAS GEMMs ({before:.2f}, {after:.2f} ms)", three)
        for name, ratio, extra, time in found:
            limit = ratio and ratio * three
            table.add(f"{shape} f+b", name, time, limit, f"{ratio} × GEMMs", extra)
        for name, make in RIVALS.items():
            try:
                once = head.both(make())
                extra = head.memory(once)
                table.add(f"{shape} f+b", name, ms(once), extra=extra)
            except Exception as error:
                table.say(f"| {shape} f+b | {name} | {type(error).__name__} | | | |")
            head.forget()
            torch.cuda.empty_cache()

    return part


def losses(table: Table) -> None:
    """Other losses over the first head."""
    head = Head(SHAPES[0])
    N, _, V = head.shape
    plain = ms(head.both(ours))
    table.add(f"cross_entropy {head.shape} f+b", "logitless", plain)

    def scored(h, W, target):
        scores = ll.score(ll.LinearLogits(h, W), target)
        return (scores.logprob.exp() + 0.01 * scores.entropy).mean()

    once = head.both(scored)
    table.add(
        "score with entropy f+b", "logitless", ms(once), 1.08 * 4 * head.product(),
        "1.08 × four GEMMs", head.memory(once),
    )  # fmt: skip

    logp = torch.log_softmax(torch.randn(N, 4096, device="cuda") * 2, -1).topk(64)[0]
    ids = torch.stack([torch.randperm(V, device="cuda")[:64] for _ in range(64)])
    targets = ll.SparseTargets(ids.repeat(N // 64, 1), logp)

    def distilled(h, W, _):
        return ll.topk_distill(
            ll.LinearLogits(h, W), targets, divergence="forward_kl", support="tail"
        )

    once = head.both(distilled)
    table.add(
        "topk_distill tail K=64 f+b", "logitless", ms(once), 1.05 * plain,
        "1.05 × cross_entropy", head.memory(once),
    )  # fmt: skip

    kept = head.target.clone()
    head.target[torch.randperm(N, device="cuda")[: N // 2]] = -100
    table.add(
        "cross_entropy, half the rows ignored, f+b", "logitless", ms(head.both(ours)),
        0.56 * plain, "0.56 × all rows",
    )  # fmt: skip
    head.target = kept


def exactness(table: Table) -> None:
    """Error of the weight's gradient against fp64, beside that of one unfused bf16 head."""
    for shape in (Shape(8192, 1024, 32768),):
        head = Head(shape)
        h, W = (t.detach().double().requires_grad_() for t in head.leaves)
        eager(h, W, head.target).backward()
        truth = W.grad

        def error(f, truth=truth, head=head):
            head.both(f)()
            return ((head.weight.grad.double() - truth).norm() / truth.norm()).item()

        unfused = error(eager)
        table.say("")
        table.say(f"Error of d_weight at {shape}, over that of the unfused head ({unfused:.2e}):")
        table.say("")
        table.say("| chunks | " + " | ".join(ACCUMULATE) + " |")
        table.say("| --- | --- | --- | --- |")
        for chunks in (1, 2, 4, 8, 16, 64):
            space = shape.rows // chunks * shape.vocab * 2
            ratios = [
                error(functools.partial(ours, workspace=space, accumulate=way)) / unfused
                for way in ACCUMULATE
            ]
            table.say(f"| {chunks} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")


def growing(table: Table) -> None:
    """Peak memory for more and more tokens."""
    D, V = 4096, 128256
    table.say("")
    table.say(f"Extra memory for growing batches, width {D}, vocabulary {V}:")
    table.say("")
    table.say("| tokens | logits would be | logitless | logitless, 128 MiB |")
    table.say("| --- | --- | --- | --- |")
    for N in (4096, 8192, 16384, 32768, 65536):
        head = Head(Shape(N, D, V))
        found = [
            head.memory(head.both(functools.partial(ours, workspace=w))) for w in (None, 128 * MIB)
        ]
        cells = " | ".join(f"{m / MIB:.0f} MiB" for m in found)
        table.say(f"| {N} | {N * V * 2 / MIB:.0f} MiB | {cells} |")
        del head
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.manual_seed(0)
    run(
        "Losses over a head",
        "bf16, forward and backward; GEMMs by cuBLAS at full size; medians",
        [*(heads(shape) for shape in SHAPES), losses, exactness, growing],
    )
