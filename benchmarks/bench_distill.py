"""Distillation, timed: PYTHONPATH=. python benchmarks/bench_distill.py --out FILE.md

Every answer is checked against the plain PyTorch formula before it is timed. Device time with a
cold L2, medians, all in one run, beside the copy bandwidth C of the same run; B is the bytes of the
logits. Needs a CUDA GPU.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tables import Table
from tables import run as run_all

import logitless as ll
from logitless.cli.bench.timing import (
    Budget,
    copy_bandwidth,
    device_time,
    extra_memory,
    host_time,
)

N, V = 8192, 128256
BUDGET = Budget(15.0, 40.0)


def normal(*shape, dtype=torch.float32):
    return torch.empty(*shape, device="cuda", dtype=dtype).normal_(0, 2)


def both(f: Callable, leaf) -> Callable:
    """Forward and backward of f on a leaf."""

    def run(_):
        leaf.grad = None
        f(leaf).backward()

    return run


def ms(run: Callable) -> float:
    return device_time(lambda: None, run, BUDGET).ms


def memory(run: Callable, leaf) -> int:
    """Most bytes at once beyond what was there, the gradient among them."""
    leaf.grad = None
    return extra_memory("cuda", None, run)


def graph_us(run: Callable, copies: int = 10) -> float:
    """One call inside a replayed CUDA graph, in microseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            run()
    return 1e3 * device_time(lambda: None, lambda _: graph.replay(), BUDGET).ms / copies


def eager_tail(x, ids, logp, tail):
    """forward_kl over the ids and the rest, as one writes it in PyTorch."""
    logq = torch.log_softmax(x.float(), -1)
    at = logq.gather(-1, ids)
    rest = torch.log1p(-at.exp().sum(-1).clamp(max=1 - 1e-7))
    kl = (logp.exp() * (logp - at)).sum(-1) + tail.exp() * (tail - rest)
    return kl.mean()


def eager_gathered(z, logp):
    logq = torch.log_softmax(z, -1)
    return (logp.exp() * (logp - logq)).sum()


def eager_kl(x, t, direction):
    a, b = torch.log_softmax(x.float(), -1), torch.log_softmax(t.float(), -1)
    if direction == "forward":
        return F.kl_div(a, b, log_target=True, reduction="sum") / len(x)
    return F.kl_div(b, a, log_target=True, reduction="sum") / len(x)


def eager_jsd(x, t):
    a, b = torch.log_softmax(x.float(), -1), torch.log_softmax(t.float(), -1)
    m = torch.logaddexp(a, b) - 0.6931471805599453
    return (0.5 * (b.exp() * (b - m)).sum(-1) + 0.5 * (a.exp() * (a - m)).sum(-1)).mean()


def agree(ours: Callable, theirs: Callable, x, tolerance=2e-2) -> None:
    """Value and gradient on a few rows of x, with PyTorch in fp32."""
    a, b = (x.detach().clone().requires_grad_() for _ in range(2))
    one, other = ours(a), theirs(b)
    one.backward()
    other.backward()
    assert abs(one.item() - other.item()) <= 1e-3 * abs(other.item()) + 1e-6, (one, other)
    gap = (a.grad.float() - b.grad.float()).abs().max() / b.grad.float().abs().max()
    assert gap < tolerance, gap


def sparse(table: Table) -> None:
    x = normal(N, V, dtype=torch.bfloat16)
    leaf = x.detach().requires_grad_()
    target = torch.randint(V, (N,), device="cuda")
    plain = ms(both(lambda z: ll.cross_entropy(z, target), leaf))
    table.add("cross_entropy f+b", "logitless", plain)
    for K in (64, 512):
        teacher = torch.log_softmax(normal(N, 4096), -1)
        logp, _ = teacher.topk(K)
        ids = torch.stack([torch.randperm(V, device="cuda")[:K] for _ in range(64)])
        ids = ids.repeat(N // 64, 1)
        tail = torch.log1p(-logp.exp().sum(-1).clamp(max=0.999))
        targets = ll.SparseTargets(ids, logp, tail)
        few = targets[:64]
        how = {"divergence": "forward_kl", "support": "tail"}
        agree(
            lambda z: ll.topk_distill(z, few, **how),  # noqa: B023
            lambda z: eager_tail(z, few.ids, few.logprobs, few.tail),  # noqa: B023
            x[:64],
        )
        run = both(lambda z: ll.topk_distill(z, targets, **how), leaf)  # noqa: B023
        rule = (1.10 if K == 64 else 1.30) * plain
        extra = memory(run, leaf)
        table.add(
            f"topk_distill tail K={K} f+b", "logitless", ms(run), rule, "of cross_entropy", extra
        )
        confident = x.clone()
        confident.scatter_(1, ids, 20.0)
        sure = confident.requires_grad_()
        run = both(lambda z: ll.topk_distill(z, targets, **how), sure)  # noqa: B023
        table.add(f"the same, all rows with a small tail, K={K}", "logitless", ms(run))
        del confident, sure
        torch.cuda.empty_cache()
        if K == 64:
            mixed = {"temperature": 2.0, "labels": target, "ce_weight": 0.5, "kd_weight": 0.5}
            run = both(lambda z: ll.topk_distill(z, targets, **how, **mixed), leaf)  # noqa: B023
            table.add(
                "with cross-entropy, T=2, K=64 f+b",
                "logitless",
                ms(run),
                1.25 * plain,
                "of cross_entropy",
                memory(run, leaf),
            )
            renorm = {"divergence": "forward_kl", "support": "renorm"}
            written = ms(lambda _: torch.zeros_like(x))
            run = both(lambda z: ll.topk_distill(z, targets, **renorm), leaf)  # noqa: B023
            table.add("writing the gradient once", "torch.zeros_like", written)
            table.add("topk_distill renorm K=64 f+b", "logitless", ms(run), 1.15 * written, "of it")
            f = torch.compile(eager_tail)
            run = both(lambda z: f(z, ids, logp, tail), leaf)  # noqa: B023
            run(None)
            table.add(
                "topk_distill tail K=64 f+b",
                "torch.compile",
                ms(run),
                extra=memory(run, leaf),
            )
            run = both(lambda z: eager_tail(z, ids, logp, tail), leaf)  # noqa: B023
            table.add(
                "topk_distill tail K=64 f+b",
                "eager",
                ms(run),
                extra=memory(run, leaf),
            )
        leaf.grad = None
        torch.cuda.empty_cache()

    found = ll.capture_topk(x[:256], 64)
    values, _ = torch.log_softmax(x[:256].float(), -1).topk(64)
    torch.testing.assert_close(found.logprobs, values, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        theirs = ms(lambda _: (x.topk(64), x.logsumexp(-1)))
        table.add("capture_topk K=64", "torch.topk + logsumexp", theirs)
        table.add(
            "capture_topk K=64",
            "logitless",
            ms(lambda _: ll.capture_topk(x, 64)),
            theirs / 3,
            "a third",
        )
        for K in (8, 256):
            table.add(f"capture_topk K={K}", "logitless", ms(lambda _: ll.capture_topk(x, K)))  # noqa: B023


def gathered(table: Table, C: float) -> None:
    compiled = torch.compile(eager_gathered)
    for shape in ((4, 2048, 64), (8, 1024, 512)):
        z = normal(*shape).requires_grad_()
        logp = torch.log_softmax(normal(*shape), -1)
        agree(lambda z: ll.gathered_kl(z, logp), lambda z: eager_gathered(z, logp), z, 1e-4)  # noqa: B023
        size = "×".join(map(str, shape))
        for name, f in (
            ("logitless", ll.gathered_kl),
            ("eager", eager_gathered),
            ("torch.compile", compiled),
        ):
            wall = host_time(lambda z: f(z, logp).backward(), z).ms  # noqa: B023
            table.add(f"gathered_kl {size} f+b, wall", name, wall)
        limit = 4 * 3 * z.numel() * 4 / C * 1e6 + 6
        for name, f in (("logitless", ll.gathered_kl), ("eager", eager_gathered)):
            us = graph_us(lambda: torch.autograd.grad(f(z, logp), z))  # noqa: B023
            table.add(
                f"gathered_kl {size} f+b, graph replay",
                name,
                us,
                limit if f is ll.gathered_kl else None,
                "4 × bytes + 6 µs",
                unit="µs",
            )


def dense(table: Table, C: float) -> None:
    x, t = (normal(N // 2, V, dtype=torch.bfloat16) for _ in range(2))
    leaf = x.detach().requires_grad_()
    B = x.numel() * 2
    try:
        from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss

        liger_kl, liger_jsd = LigerKLDIVLoss(log_target=True), LigerJSD(beta=0.5)
    except Exception:
        liger_kl = liger_jsd = None
    soft = torch.softmax(t[:64].float(), -1)
    agree(
        lambda z: ll.soft_cross_entropy(z, soft), lambda z: F.cross_entropy(z.float(), soft), x[:64]
    )
    for name, ours, theirs, passes in (
        (
            "kl_div forward",
            lambda z, t: ll.kl_div(z, t, direction="forward"),
            lambda z, t: eager_kl(z, t, "forward"),
            5,
        ),
        (
            "kl_div reverse",
            lambda z, t: ll.kl_div(z, t, direction="reverse"),
            lambda z, t: eager_kl(z, t, "reverse"),
            5,
        ),
        ("jsd", lambda z, t: ll.jsd(z, t), eager_jsd, 7),
    ):
        agree(lambda z: ours(z, t[:64]), lambda z: theirs(z, t[:64]), x[:64])  # noqa: B023
        work = f"{name} {N // 2}×{V} bf16 f+b, {passes} B"
        run = both(lambda z: ours(z, t), leaf)  # noqa: B023
        limit = passes * B / C * 1e3 / 0.75
        table.add(work, "logitless", ms(run), limit, "0.75 of C", memory(run, leaf))
        run = both(lambda z: theirs(z, t), leaf)  # noqa: B023
        table.add(work, "eager", ms(run), extra=memory(run, leaf))
        leaf.grad = None
        torch.cuda.empty_cache()
        f = torch.compile(theirs)
        run = both(lambda z: f(z, t), leaf)  # noqa: B023
        run(None)
        table.add(work, "torch.compile", ms(run))
        rival = {"kl_div forward": liger_kl, "jsd": liger_jsd}.get(name)
        if rival is not None:

            def theirs_too(z, rival=rival):
                return rival(torch.log_softmax(z, -1), torch.log_softmax(t, -1))

            try:
                table.add(work, "liger (with log_softmax)", ms(both(theirs_too, leaf)))
            except Exception as error:
                print("liger:", type(error).__name__, str(error)[:100])
        leaf.grad = None
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.manual_seed(0)
    C = copy_bandwidth("cuda", BUDGET) * 1e12
    run_all(
        "Distillation",
        f"8192×128256 bf16 where nothing else is said; C = {C / 1e12:.3f} TB/s",
        [sparse, lambda table: gathered(table, C), lambda table: dense(table, C)],
    )
