"""Runs the steps of the demo: train a teacher, store its predictions, train four students."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from logitless.store import Store, Writer, capture, distill_loss
from logitless.store.capture import lazy_head

from . import small
from .memory import extra_memory
from .progress import bar
from .small import Scale, Transformer

CE, KD = 0.2, 0.8  # weights of the cross-entropy and of the KL divergence
WORKSPACE = 4 << 20  # bytes of logits that a fused head computes at a time
ALONE, WHOLE = "the text alone", "the teacher's whole logits"
LIVE, STORED = "the teacher's top K, live", "the store"


class Plan(NamedTuple):
    """The sizes of the models, the data and the measurements."""

    vocab: int
    k: int  # number of stored ids per token; 64 ids would have too little probability mass
    teacher: Scale
    student: Scale
    documents: int  # number of documents that the students train on
    held_out: int  # number of held-out batches
    memory_rows: int  # number of tokens that `loss_memory` measures
    memory_vocab: int


_SMALL = Scale(batch=8, context=32, width=96, layers=2, lr=4e-3)
_LARGE = Scale(batch=16, context=256, width=384, layers=4, lr=1e-3)
PLANS = {
    "cpu": Plan(
        8192, 256, _SMALL, _SMALL._replace(width=48, layers=1, lr=1e-2), 480, 12, 1024, 32_768
    ),
    "cuda": Plan(
        32_768, 256, _LARGE, _LARGE._replace(width=128, layers=2, lr=3e-3), 960, 16, 8192, 131_072
    ),
}


@dataclass
class Student:
    """A student and the record of its training."""

    name: str
    model: Transformer
    curve: list[tuple[int, float]] = field(default_factory=list)  # step, held-out loss
    seconds: float = 0.0
    memory: int = 0  # peak bytes that the loss allocates in one step, without its inputs


@dataclass
class Outcome:
    """The numbers and texts that the report shows."""

    device: str
    steps: int
    tokens: int  # number of tokens per step
    teacher_loss: float
    students: list[Student]
    store: dict[str, Any]
    words: list[tuple[str, str, list[tuple[str, float]]]]  # (text, next word, predictions)
    plan: Plan


def run(path: Path, steps: int, device: str, seed: int) -> Outcome:
    """Runs the whole demo, with the store in the folder `path`."""
    plan = PLANS[device]
    text = small.read_sources(small.MAX_CHARS // 3)
    words = small.vocabulary(text, plan.vocab)
    known, unseen = split(small.encode(text, words))
    held_out = windows(unseen, plan.held_out * plan.teacher.batch, plan, seed + 1).to(device)

    teacher = seeded(plan.teacher, plan.vocab, device, seed)
    train_teacher(teacher, known, held_out, plan, 2 * steps, seed)
    documents = windows(known, plan.documents, plan, seed + 2)
    about_store = captured(teacher, documents, path, plan)
    store = Store(path)
    students = [
        Student(name, seeded(plan.student, plan.vocab, device, seed))
        for name in (ALONE, WHOLE, LIVE, STORED)
    ]
    for student in students:
        student.memory = loss_memory(student.name, plan, device)
    train_students(students, teacher, store, documents.to(device), held_out, plan, steps, seed)
    tokens = plan.student.batch * plan.student.context
    loss = held_out_loss(teacher, held_out)
    return Outcome(
        device, steps, tokens, loss, students, about_store, predictions(store, words), plan
    )


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Splits tokens into training text and held-out text.

    The tokens are cut into pieces of 1,024 tokens, and every tenth piece is held out.
    """
    pieces = ids[: len(ids) // 1024 * 1024].view(-1, 1024)
    held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def windows(ids: Tensor, count: int, plan: Plan, seed: int) -> Tensor:
    """Returns documents from random places of the text, as a tensor (count, context + 1)."""
    random = torch.Generator().manual_seed(seed)
    context = plan.teacher.context
    start = torch.randint(len(ids) - context - 1, (count, 1), generator=random)
    return ids[start + torch.arange(context + 1)]


def seeded(scale: Scale, vocab: int, device: str, seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(scale._replace(context=scale.context + 1), vocab).to(device)


@torch.no_grad()
def held_out_loss(model: Transformer, documents: Tensor) -> float:
    """Returns the model's mean cross-entropy on the documents, in nats per token."""
    losses = [
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        for batch in documents.split(8)
    ]
    return torch.stack(losses).mean().item()


class Optimizer:
    """AdamW with a learning rate that rises and falls once."""

    def __init__(self, model: Transformer, lr: float, steps: int):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
        self.rate = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=steps + 1)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step()


def train_teacher(
    model: Transformer, ids: Tensor, held_out: Tensor, plan: Plan, steps: int, seed: int
) -> None:
    ll.fuse(model, head="head")
    optimizer = Optimizer(model, plan.teacher.lr, steps)
    device = held_out.device
    with bar("1. teacher ", steps) as advance:
        for step in range(steps):
            batch = windows(ids, plan.teacher.batch, plan, seed + 1000 + step).to(device)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.step(loss)
            advance(1, f"loss {loss:.3f}", tokens=batch[:, 1:].numel())
    ll.unfuse(model)


def captured(model: Transformer, documents: Tensor, path: Path, plan: Plan) -> dict[str, Any]:
    """Captures the teacher's predictions into a store, and returns facts about the store."""
    begin = time.perf_counter()
    header = {"vocab_size": plan.vocab, "k": plan.k, "teacher": "the demo's"}
    with Writer(path, **header) as writer, bar("2. capture ", documents.numel()) as advance:
        batches = documents.split(plan.teacher.batch)
        capture(model, batches, writer, head="head", progress=lambda n: advance(n, tokens=n))
    seconds = time.perf_counter() - begin
    store = Store(path)
    size = sum(shard.size for shard in store.shards)
    report = store.verify()
    inside = 1 - store[0][1].tail.exp().mean()
    return {
        "documents": len(store), "tokens": store.tokens, "bytes per token": size / store.tokens,
        "bytes of whole rows, fp16": 2 * plan.vocab, "seconds": seconds, "right": bool(report),
        "mass of the slots": float(inside), "label log-probability": report.label_logprob,
    }  # fmt: skip


@torch.no_grad()
def targets_of(name: str, teacher: Transformer, store: Store, documents: Tensor) -> Any:
    """Returns a student's targets for documents (B, T): SparseTargets, whole logits or None."""
    if name == STORED:
        return store.targets_for(documents)
    if name == LIVE:
        with lazy_head(teacher, "head"):
            return ll.capture_topk(teacher(documents), store.info.k)
    return teacher(documents) if name == WHOLE else None


def student_loss(name: str, logits: Any, labels: Tensor, targets: Any) -> Tensor:
    """Returns a student's loss, from logits (B, T, V) and unshifted labels (B, T)."""
    if name in (LIVE, STORED):
        options = {"divergence": "forward_kl", "support": "tail", "ce_weight": CE, "kd_weight": KD}
        return distill_loss(logits, labels, targets, **options).loss
    rows, label = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    ce = F.cross_entropy(rows, label)
    if name == ALONE:
        return ce
    logp = F.log_softmax(targets[:, :-1].flatten(0, 1), -1)
    kd = F.kl_div(F.log_softmax(rows, -1), logp, log_target=True, reduction="batchmean")
    return CE * ce + KD * kd


def train_students(
    students: list[Student], teacher: Transformer, store: Store, documents: Tensor,
    held_out: Tensor, plan: Plan, steps: int, seed: int,
) -> None:  # fmt: skip
    """Trains the students alternately, one step at a time.

    So a slow phase of the machine slows all students equally.
    """
    optimizers = [Optimizer(s.model, plan.student.lr, steps) for s in students]
    for student in students[2:]:
        ll.fuse(student.model, head="head", workspace=WORKSPACE)
    random = torch.Generator().manual_seed(seed)
    every = max(steps // 10, 1)
    with bar("3. students", steps) as advance:
        for step in range(1, steps + 1):
            which = torch.randint(len(documents), (plan.student.batch,), generator=random)
            batch = documents[which]
            for student, optimizer in zip(students, optimizers, strict=True):
                begin = time.perf_counter()
                targets = targets_of(student.name, teacher, store, batch)
                loss = student_loss(student.name, student.model(batch), batch, targets)
                optimizer.step(loss)
                loss.item()  # `item` waits for the device, so the whole step is timed
                student.seconds += time.perf_counter() - begin
                if step % every == 0 or step == steps:
                    student.curve.append((step, held_out_loss(student.model, held_out)))
            note = "  ".join(f"{s.curve[-1][1]:.3f}" for s in students if s.curve)
            advance(1, f"held-out loss {note}", tokens=len(students) * batch.numel())


def loss_memory(name: str, plan: Plan, device: str) -> int:
    """Returns the peak memory in bytes of the loss in one step, including all logits."""
    rows, vocab, width = plan.memory_rows, plan.memory_vocab, plan.student.width
    hidden = torch.randn(1, rows, width, device=device, requires_grad=True)
    head = torch.nn.Linear(width, vocab, bias=False, device=device)
    labels = torch.randint(vocab, (1, rows), device=device)
    k = plan.k
    ids = torch.arange(k, device=device).expand(1, rows, k).contiguous()
    logprobs = torch.full((1, rows, k), -7.0, device=device)
    sparse = ll.SparseTargets(ids, logprobs, torch.full((1, rows), -0.6, device=device))
    model = ll.fuse(torch.nn.Sequential(head), head="0", workspace=WORKSPACE)
    if name in (ALONE, WHOLE):
        ll.unfuse(model)

    def step(x: Tensor) -> None:
        targets = sparse
        if name == WHOLE:
            targets = x.detach() @ head.weight.T.detach()
        elif name == LIVE:
            teacher = ll.LinearLogits(x.detach(), head.weight.detach(), workspace=WORKSPACE)
            targets = ll.capture_topk(teacher, k)
        student_loss(name, model(x), labels, targets).backward()

    return extra_memory(device, hidden, step)


def predictions(store: Store, words: list[str], count: int = 6) -> list:
    """Returns beginnings of documents, each with its next word and the teacher's top five words."""
    rows = []
    for i in range(0, len(store), max(len(store) // count, 1)):
        tokens, targets = store[i]
        at = len(tokens) // 2
        text = "".join(words[t] for t in tokens[: at + 1].tolist())
        best = zip(
            targets.ids[at, :5].tolist(), targets.logprobs[at, :5].exp().tolist(), strict=True
        )
        rows.append((text, words[int(tokens[at + 1])], [(words[t], p) for t, p in best]))
    return rows[:count]
