"""Compares time and memory of a head's forward + backward with lazy logits and with plain logits.

In the last cases, lazy logits are materialised. In the other cases, lazy logits stay lazy.

    python benchmarks/lazy_materialised.py [--rows 1024] [--hidden 64] [--vocab 50000]

Each case runs in a process of its own, with one thread. A case has one step to warm up, and then
`--steps` steps. Memory is the peak of the process beyond its size before the first step. Time is
the smallest CPU time of a step, because other processes on the machine hardly change CPU time.

At the first operation on any tensor subclass, PyTorch 2.13 imports its distributed tensors. This
import takes 44 MiB once per process. The script triggers the import before the first step.
"""

import argparse
import platform
import resource
import subprocess
import sys
import time
import warnings

import torch
import torch.nn.functional as F

import logitless as ll

CASES = {
    "cross-entropy": lambda z, t, q: F.cross_entropy(z, t),
    "+ bias of (1, V)": lambda z, t, q: F.cross_entropy(z + q[:1], t),
    "soft labels": lambda z, t, q: F.cross_entropy(z, q),
    "take_along_dim(log_softmax)": lambda z, t, q: (
        -torch.take_along_dim(z.log_softmax(-1), t[:, None], -1).mean()
    ),
    "F.kl_div": lambda z, t, q: F.kl_div(z.log_softmax(-1), q, reduction="batchmean"),
    "F.kl_div by value": lambda z, t, q: F.kl_div(z.log_softmax(-1), q, reduction="none").mean(),
    "entropy by (p log p).sum": lambda z, t, q: (
        -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1).mean()
    ),
    "sin": lambda z, t, q: z.sin().mean(),
    "square": lambda z, t, q: z.square().mean(),
    "exp of scaled, squared": lambda z, t, q: (z / 10).exp().square().mean(),
    "relu of a view": lambda z, t, q: z.view(2, -1, z.shape[-1]).relu().mean(),
    "a mask of values": lambda z, t, q: F.cross_entropy(z.masked_fill(q > 0.5, -1e4), t),
    # The cases below need all values at once, so both kinds of logits are materialised.
    "flip": lambda z, t, q: z.flip(-1).mean(),
    "flip of sin": lambda z, t, q: z.sin().flip(-1).mean(),
    "flip of square": lambda z, t, q: z.square().flip(-1).mean(),
    "flip of a scaled view": lambda z, t, q: (z / 3).view(2, -1, z.shape[-1]).flip(-1).mean(),
    "cumsum of softmax": lambda z, t, q: z.softmax(-1).cumsum(-1).mean(),
    "cumsum of a softcap": lambda z, t, q: (torch.tanh(z / 30) * 30).cumsum(-1).mean(),
    "cumsum of p log p": lambda z, t, q: (
        (z.log_softmax(-1).exp() * z.log_softmax(-1)).cumsum(-1).mean()
    ),
    "cumsum of F.kl_div": lambda z, t, q: (
        F.kl_div(z.log_softmax(-1), q, reduction="none").cumsum(-1).mean()
    ),
    "a column": lambda z, t, q: z[..., 3].square().mean(),
    "materialize": lambda z, t, q: (
        (z if type(z) is torch.Tensor else z.materialize()).square().mean()
    ),
}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB; Linux reports KiB


def one(case: str, fused: bool, given) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    rows, width, vocab = given.rows, given.hidden, given.vocab
    h = torch.randn(rows, width, requires_grad=True)
    w = (torch.randn(vocab, width) / 8).requires_grad_()
    t = torch.randint(0, vocab, (rows,))
    needs_q = case not in ("cross-entropy", "take_along_dim(log_softmax)")
    q = torch.rand(rows, vocab) if needs_q else torch.zeros(1)
    ll.LinearLogits(torch.zeros(1, 1), torch.zeros(1, 1)).lazy().flip(-1)
    before, times = peak(), []
    for _ in range(1 + given.steps):
        begin = time.process_time()
        z = ll.LinearLogits(h, w).lazy() if fused else F.linear(h, w)
        CASES[case](z, t, q).backward()
        del z
        times.append(time.process_time() - begin)
        h.grad = w.grad = None
    print(f"{peak() - before:.0f} {min(times[1:]):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rows", 1024), ("hidden", 64), ("vocab", 50_000), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    parser.add_argument("--fused", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.case:
        one(given.case, given.fused, given)
        return
    print(
        f"One step of a head, {given.rows} x {given.hidden} x {given.vocab}, fp32, "
        f"{given.threads} thread, {platform.machine()}, torch {torch.__version__}\n\n"
        "| case | plain | lazy | memory | time |\n|---|---|---|---|---|"
    )
    sizes = [f"--{name}={getattr(given, name)}" for name in ("rows", "hidden", "vocab", "steps")]
    for case in (name for name in CASES if given.only in name):
        found = []
        for kind in ((), ("--fused",)):
            command = [sys.executable, __file__, f"--case={case}", *sizes, *kind]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append([float(number) for number in said.split()])
        (space, seconds), (lazy_space, lazy_seconds) = found
        print(
            f"| {case} | +{space:.0f} MiB, {seconds:.2f} s | +{lazy_space:.0f} MiB,"
            f" {lazy_seconds:.2f} s | {lazy_space / space:.2f} | {lazy_seconds / seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
