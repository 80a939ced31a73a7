"""Random programs over lazy logits that read and write, against the same over plain logits.

    python -m tests.differential.lazy_programs SEED PROGRAMS

A program is a list of steps. Each step takes one of the tensors so far, beginning with the logits,
and adds its result to them, or writes to it. At the end every tensor, the loss, and the gradients
of hidden, weight, bias and logits must be those of plain logits. A step over lazy logits may refuse
instead, with one of the messages in REFUSALS; then all tensors must be those before the step.
"""

import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from logitless.heads.linear import checked_head
from logitless.lazy.logits import lazy_logits_of
from logitless.lazy.memory import Shared

from . import lazy_steps
from .lazy_steps import run

REFUSALS = re.compile(
    r"must not be written to|must be called before anything is computed|before the step, or keep"
    r"|the gradient of lazy logits is not computed|view was created inside a custom Function"
    r"|must not be modified in place before the result is used|must not be differentiated twice"
)
# Errors of plain logits that depend on what PyTorch's functions save, and how they lay out memory.
UNLUCKY = re.compile(
    "more than one element of the written-to tensor|view size is not compatible"
    "|modified by an inplace operation|a function that returns multiple views"
    "|a write forgets the hook of a view"
)
# Writes that autograd does not see, after which PyTorch's own gradients may be wrong.
UNSEEN = re.compile(r"numpy|\.data\b|dlpack")


class Step(NamedTuple):
    text: str  # as Python, of `t`, the tensor, and `s`, all tensors so far
    at: int  # which of the tensors so far
    writes: bool = False


class Program(NamedTuple):
    seed: int
    shape: tuple[int, ...]  # of the hidden states
    vocab: int
    bias: bool
    grad: bool
    steps: tuple[Step, ...]
    loss: tuple[Step, ...]
    hook: str | None
    second: bool

    def __str__(self) -> str:
        lines = [f"t{i + 1} = {s.text}  # t = t{s.at}" for i, s in enumerate(self.steps)]
        lines += [f"loss += {s.text}  # t = t{s.at}" for s in self.loss]
        options = f"hook {self.hook}, second {self.second}, grad {self.grad}, bias {self.bias}"
        return "\n".join([f"{self.shape} x {self.vocab}, {options}", *lines])


# --- drawing and running

WRITES = 1.5  # how often a step writes, against 4 for a view

KINDS = (
    lazy_steps.views, lazy_steps.values, lazy_steps.reductions, lazy_steps.writes,
    lazy_steps.hooks,
)  # fmt: skip


def drawn(seed: int) -> Program:
    """A program whose steps all succeed over plain logits, or are the last one."""
    r = random.Random(seed)
    shape = (*(r.randint(1, 4) for _ in range(r.randint(1, 2))), r.randint(1, 5))
    options = {"bias": r.random() < 0.5, "grad": r.random() < 0.75}
    blank = Program(
        seed, shape, r.randint(1, 7), **options, steps=(), loss=(), hook=None, second=False
    )
    tensors, steps = [*start(blank, False)[:1]], []
    for _ in range(r.randint(0, 6)):
        at = r.choice((len(tensors) - 1, r.randrange(len(tensors))))
        t = tensors[at]
        if t.dim() == 0 or not t.numel() or not t.is_floating_point() or t.numel() > 500:
            continue
        kind = r.choices(KINDS, (4, 4, 1, WRITES, 0.3))[0]
        text = r.choice(kind(r, t.shape))
        try:
            result = run(text, t)
        except Exception:
            continue
        steps.append(Step(text, at, kind is lazy_steps.writes))
        tensors.append(result if isinstance(result, Tensor) else t)
    loss = []
    for _ in range(r.randint(1, 3)):
        at = r.randrange(len(tensors))
        t = tensors[at]
        usable = t.dim() and t.numel() and t.is_floating_point()
        ends = lazy_steps.reductions(r, t.shape) if usable else []
        loss.append(Step(r.choice([*ends, "t.double().square()"]), at))
    hook = r.choice((None, None, None, "t * 2", "t.clamp(-0.1, 0.1)", "t + 1", "t.mul_(0.5)"))
    return blank._replace(steps=tuple(steps), loss=tuple(loss), hook=hook, second=r.random() < 0.15)


def start(p: Program, lazy: bool) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the tensors that they are computed from."""
    hidden, weight, *bias = leaves = leaves_of(p)
    if lazy:
        return ll.LinearLogits(hidden, weight, *bias).lazy(), leaves
    return F.linear(hidden, weight, *bias) * 1.0, leaves


def leaves_of(p: Program) -> list[Tensor]:
    """The hidden states, the weight, and the bias if the program has one."""
    g = torch.Generator().manual_seed(p.seed)

    def make(*shape) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_(p.grad)

    leaves = [make(*p.shape), make(p.vocab, p.shape[-1])]
    return [*leaves, make(p.vocab)] if p.bias else leaves


def start_inference(p: Program, lazy: bool) -> tuple[Tensor, list[Tensor]]:
    """Like `start`, but the logits are those of a fused head without gradients."""
    hidden, weight, *bias = leaves = leaves_of(p._replace(grad=False))
    if lazy:
        return lazy_logits_of(checked_head(hidden, weight, *bias), inference=True), leaves
    return F.linear(hidden, weight, *bias) * 1.0, leaves


class Refused(Exception):
    pass


class Outcome(NamedTuple):
    values: list  # of each tensor and of the loss, or before the step that refused
    gradients: list | None
    refused: str | None  # the step that was not done
    failed: str | None  # an error
    layout: list  # strides of each tensor that has memory of its own, else None


def outcome(p: Program, lazy: bool, until: str | None = None) -> Outcome:
    """What a program computes; `until` is a step that is refused over lazy logits."""
    z, leaves = start(p, lazy)
    lazy_steps.HOOKED.clear()
    tensors, total = [z], torch.zeros((), dtype=torch.float64)
    where = "start"

    def guarded(name: str, act: Callable) -> Any:
        nonlocal where
        where = name
        if name == until:
            raise Refused
        try:
            return act()
        except Exception as raised:
            if lazy and REFUSALS.search(str(raised)):
                raise Refused from raised
            raise

    try:
        if p.hook and z.requires_grad:
            z.register_hook(lambda t: run(p.hook, t))  # pyright: ignore
        for i, step in enumerate(p.steps):
            t = tensors[step.at]
            if step.writes and not lazy and lazy_steps.forgets_a_hook(t):
                raise RuntimeError("a write forgets the hook of a view")
            result = guarded(f"step {i}", lambda step=step, t=t: run(step.text, t))
            tensors.append(t if step.writes or not isinstance(result, Tensor) else result)
        for i, step in enumerate(p.loss):
            t = tensors[step.at]
            end = guarded(f"loss {i}", lambda step=step, t=t: run(step.text, t))
            total = total + end.double().sum() / (i + 1)
        values, gradients = [*map(read, tensors), read(total)], None
        if total.requires_grad:
            # Only logits with a hook have a gradient of their own.
            wanted = [*leaves, *([z] if p.hook and z.grad_fn is not None else [])]
            found = guarded("gradients", lambda: gradients_of(total, wanted, p.second))
            gradients = guarded("reading gradients", lambda: [*map(read, found)])
        return Outcome(values, gradients, None, None, layout(tensors))
    except Refused:
        return Outcome([*map(read, tensors)], None, where, None, layout(tensors))
    except Exception as raised:
        return Outcome([], None, None, f"{where}: {type(raised).__name__}: {raised}", [])


def layout(tensors: list[Tensor]) -> list:
    return [None if isinstance(t, Shared) and t.path else t.stride() for t in tensors]


def depends_on_layout(lazy: Outcome, plain: Outcome) -> bool:
    """Whether a plain result has other strides: then reshape copies in one program alone.

    Operations on transposed logits give transposed results, those on lazy ones contiguous ones.
    """
    pairs = zip(lazy.layout, plain.layout, strict=False)
    return any(a is not None and a != b for a, b in pairs)


def gradients_of(total: Tensor, wanted: list[Tensor], second: bool) -> list:
    found = torch.autograd.grad(total, wanted, create_graph=second, allow_unused=True)
    first = next((g for g in found if g is not None and g.requires_grad), None)
    if not second or first is None:
        return list(found)
    leaves = [t for t in wanted if t.is_leaf]
    again = torch.autograd.grad(first.square().sum(), leaves, allow_unused=True)
    return [*found, *again]


def read(t: Any) -> Tensor | None:
    """The values, as a copy."""
    return None if t is None else torch.tensor(t.detach().tolist(), dtype=torch.float64)


def difference(p: Program) -> str | None:
    """What is different over lazy logits, or None."""
    lazy = outcome(p, True)
    if lazy.refused == "reading gradients":
        lazy = lazy._replace(refused="gradients")
    plain = outcome(p, False, lazy.refused)
    if plain.failed or lazy.failed:
        both = bool(plain.failed) and bool(lazy.failed)
        fine = both or (plain.failed and UNLUCKY.search(plain.failed) and not lazy.failed)
        return None if fine else f"plain: {plain.failed}\nlazy: {lazy.failed}"
    compared = [("values", lazy.values, plain.values)]
    writes = "".join(step.text for step in p.steps if step.writes)
    if writes and depends_on_layout(lazy, plain):
        return None
    if not UNSEEN.search(writes):
        compared.append(("gradients", lazy.gradients, plain.gradients))
    for name, got, want in compared:
        if (got is None) != (want is None):
            return f"{name}: {got} for {want}"
        for i, (a, b) in enumerate(zip(got or (), want or (), strict=True)):
            if not same(a, b, 1e-5 if any(".float()" in step.text for step in p.steps) else 1e-9):
                return f"{name} {i}: {a} for {b}"
    return None


def same(a: Tensor | None, b: Tensor | None, tolerance: float) -> bool:
    """Equal up to rounding; absent is 0, and numbers that are not finite may be any of those.

    After a cast to fp32, both results are rounded to fp32, in another order of sums.
    """
    if a is None or b is None:
        other = b if a is None else a
        return other is None or not other.abs().nan_to_num(0.0).gt(tolerance).any()
    if a.shape != b.shape:
        return False
    known = torch.isfinite(b)
    scale = 1 + b[known].abs().amax() if known.any() else 1.0
    return bool(((a[known] - b[known]).abs() <= tolerance * scale).all())


def smaller(p: Program) -> Program:
    """The program without steps that the difference does not need."""
    for i in reversed(range(len(p.loss))):
        candidate = p._replace(loss=p.loss[:i] + p.loss[i + 1 :])
        p = candidate if difference(candidate) else p
    for candidate in (p._replace(hook=None), p._replace(second=False)):
        p = candidate if difference(candidate) else p
    for i in reversed(range(len(p.steps))):
        used = [s.at for s in (*p.steps, *p.loss)]
        if i + 1 not in used:
            steps = [s._replace(at=s.at - (s.at > i + 1)) for j, s in enumerate(p.steps) if j != i]
            loss = [s._replace(at=s.at - (s.at > i + 1)) for s in p.loss]
            candidate = p._replace(steps=tuple(steps), loss=tuple(loss))
            p = candidate if difference(candidate) else p
    return p


class Found(NamedTuple):
    program: Program
    difference: str


def search(seed: int, programs: int, tally: Counter) -> Found | None:
    """The first program with a difference."""
    for i in range(programs):
        p = drawn(seed + i)
        tally["programs"] += 1
        tally["steps"] += len(p.steps)
        tally["programs that write"] += any(s.writes for s in p.steps)
        found = difference(p)
        if found:
            p = smaller(p)
            return Found(p, difference(p) or found)
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counts = Counter()
    failed = search(*map(int, sys.argv[1:]), counts)
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if failed:
        raise SystemExit(f"seed {failed.program.seed}\n{failed.program}\n{failed.difference}")
