"""What the trainers' integrations need a GPU for: a CUDA graph, FSDP2, and whole training steps.

    python -m benchmarks.trainer_steps [--shape 8×1024×2048×128256] [--rivals .peers]

1. HeadLoss of integrations/torchtitan.py, forward and backward in a CUDA graph, as torchtitan
   captures its steps. torchtitan itself cannot be installed everywhere, so a stand-in of 20 lines
   has its ChunkedLossWrapper. The replays see new inputs and new weights.
2. `fuse` after `fully_shard`, on one rank over NCCL.
3. GRPO and DPO steps of a model of four layers: through the functions of `use_in_trl`, which
   rehearse the loss while the logits are in memory, and through TRL's own kernel (--rivals has the
   package trl_kernels). A quarter of the tokens is a prompt, and has no label.

Answers are compared first, then steps are timed for 1.5 s each. The output is Markdown.
"""

import argparse
import importlib
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll
from benchmarks.policy_heads import dpo, grpo, pairs
from benchmarks.step_clock import time_and_memory
from logitless.cli import machine
from logitless.cli.report import table
from logitless.integrations.token_gradients import Ways
from logitless.integrations.trl_statistics import Call, token_statistics

SMALL = (4, 64, 256, 5000)
BOUND = 2e-2  # the largest relative error in bf16
BUDGET = 1500.0  # milliseconds of timing per step


def far(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error."""
    many = zip(got, want, strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in many)


def verdict(name: str, error: float) -> None:
    print(f"{name}: error {error:.1e}", flush=True)
    if not error < BOUND:
        raise SystemExit(f"{name}: the error {error:.1e} is above {BOUND}.")


# --- torchtitan's HeadLoss in a CUDA graph


def stand_in() -> None:
    """Puts a minimal torchtitan into sys.modules."""

    class ChunkedLossWrapper:
        @dataclass(kw_only=True, slots=True)
        class Config:
            loss_fn: Callable

        def __init__(self, config, *, compile_config=None):
            self.loss_fn = config.loss_fn

        def set_lm_head(self, lm_head):
            self.lm_head = lm_head

        def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs):
            raise NotImplementedError

    losses = types.ModuleType("torchtitan.components.loss")
    losses.ChunkedLossWrapper = ChunkedLossWrapper  # type: ignore
    types_ = types.ModuleType("torchtitan.distributed.spmd_types")
    types_.spmd_mesh_size = lambda axis: 1  # type: ignore
    for name in ("torchtitan", "torchtitan.components", "torchtitan.distributed"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[losses.__name__], sys.modules[types_.__name__] = losses, types_


def inner(logits: Tensor, labels: Tensor, count: Tensor) -> tuple[Tensor, dict]:
    """torchtitan's CrossEntropyLoss."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=-100) / count, {}


def in_a_graph(shape: tuple[int, ...]) -> float:
    stand_in()
    module = importlib.import_module("logitless.integrations.torchtitan")
    sequences, tokens, width, vocab = shape
    torch.manual_seed(0)
    head = nn.Linear(width, vocab, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(sequences, tokens, width, device="cuda", dtype=torch.bfloat16)
    hidden = x.requires_grad_()
    labels = torch.randint(vocab, (sequences, tokens), device="cuda")
    labels[:, : tokens // 4] = -100
    count = (labels != -100).sum()
    loss_fn = module.HeadLoss(module.HeadLoss.Config(loss_fn=inner))
    loss_fn.set_lm_head(head)

    def step() -> Tensor:
        hidden.grad = head.weight.grad = None
        loss, _ = loss_fn(hidden, labels, count)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    worst = 0.0
    for seed in (1, 2):  # new inputs, then new weights too
        torch.manual_seed(seed)
        with torch.no_grad():
            hidden.copy_(torch.randn_like(hidden))
            head.weight.mul_(seed)
        graph.replay()
        got = [loss.clone(), hidden.grad.clone(), head.weight.grad.clone()]
        leaves = [t.detach().float().requires_grad_() for t in (hidden, head.weight)]
        want = inner(F.linear(*leaves), labels, count)[0]
        worst = max(worst, far(got, [want.detach(), *torch.autograd.grad(want, leaves)]))
    return worst


# --- fuse after FSDP2


class Model(nn.Module):
    def __init__(self, width: int, vocab: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 128), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.body(self.embed(ids), mask=mask.to(self.embed.weight.dtype), is_causal=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.hidden(ids)).flatten(0, 1), labels.flatten())

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def build(width: int, vocab: int, layers: int) -> Model:
    torch.manual_seed(0)
    return Model(width, vocab, layers).to("cuda", torch.bfloat16)


def sharded(shape: tuple[int, ...]) -> float:
    from torch.distributed.fsdp import fully_shard

    sequences, tokens, width, vocab = shape
    ids = torch.randint(vocab, (sequences, tokens), device="cuda")
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    found = []
    for fuses in (False, True):
        model = build(width, vocab, 2)
        for layer in model.body.layers:
            fully_shard(layer)
        fully_shard(model)
        if fuses:
            ll.fuse(model)
        loss = model(ids, labels)
        loss.backward()
        full = [p.grad.full_tensor() for p in model.parameters()]
        found.append([loss.detach(), *full])
        if fuses and not (said := ll.is_fused(model)):
            raise SystemExit(f"fuse after fully_shard: {said.reason}")
    dist.destroy_process_group()
    return far(found[1], found[0])


# --- steps with TRL's kernel and with ours


def loss_of(kind: str, old: Tensor, advantage: Tensor, mask: Tensor):
    """The loss of log-probabilities (B, T), as TRL computes it."""

    def loss(logprob: Tensor, *_) -> Tensor:
        if kind == "DPO":
            return dpo(pairs(logprob), pairs(old)).mean()
        return (grpo(logprob, old, advantage) * mask).sum() / mask.sum()

    return loss


def logprobs_of(way: str, kind: str, loss: Callable, mask: Tensor, ways: Ways) -> Callable:
    outputs = ("entropy",)
    if way == "TRL's kernel":
        function = importlib.import_module("trl_kernels.chunked_logprob").ChunkedLogProbFunction
        return lambda h, w, t: function.apply(h, w, None, t, 1.0, 32768, None, 1.0, outputs)[0]
    call = Call({}, ways, mask, SimpleNamespace(loss=loss))
    return lambda h, w, t: token_statistics(call, h, w, None, t, 1.0, 0, None, 1.0, outputs)[0]


def step_of(way: str, kind: str, shape: tuple[int, ...], frozen: bool):
    """A training step without its optimizer, and the parameters that it trains."""
    sequences, tokens, width, vocab = shape
    model = build(width, vocab, 4)
    model.lm_head.weight.requires_grad_(not frozen)
    torch.manual_seed(1)
    ids = torch.randint(vocab, (sequences, tokens), device="cuda")
    mask = (torch.arange(tokens, device="cuda") >= tokens // 4).expand_as(ids).contiguous()
    old = -torch.tensor(vocab).log().item() - 0.5 + 0.1 * torch.randn(ids.shape, device="cuda")
    old = torch.where(mask, old, 0.0)
    advantage = torch.randn(sequences, 1, device="cuda")
    loss = loss_of(kind, old, advantage, mask)
    # The way that the first steps of a trainer find out.
    ways = Ways("rows")
    ways.way = "pairs" if kind == "DPO" else "rows"
    compute, target = logprobs_of(way, kind, loss, mask, ways), ids.roll(-1, 1)[mask]

    def step() -> Tensor:
        picked = compute(model.hidden(ids)[mask], model.lm_head.weight, target)
        logprob = torch.zeros_like(old).masked_scatter(mask, picked)
        value = loss(logprob)
        value.backward()
        return value.detach()

    return step, tuple(p for p in model.parameters() if p.requires_grad)


def answers(way: str, kind: str, frozen: bool) -> list[Tensor]:
    step, trained = step_of(way, kind, SMALL, frozen)
    value = step()
    return [value, *(p.grad for p in trained if p.grad is not None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8×1024×2048×128256")
    parser.add_argument("--rivals", default=".peers", help="folder of the package trl_kernels")
    args = parser.parse_args()
    sys.path.insert(0, args.rivals)
    shape = tuple(map(int, args.shape.split("×")))
    verdict("HeadLoss in a CUDA graph", in_a_graph((4, 512, 512, 32000)))
    verdict("fuse after fully_shard, one rank", sharded((4, 256, 512, 32000)))
    cases = [(kind, frozen) for kind in ("GRPO", "DPO") for frozen in (False, True)]
    ways = ("ours", "TRL's kernel")
    for kind, frozen in cases:
        found = [answers(way, kind, frozen) for way in ways]
        verdict(f"{kind} step{', frozen head' * frozen}", far(*found))
    lines = []
    for kind, frozen in cases:
        for way in ways:
            step, trained = step_of(way, kind, shape, frozen)
            ms, mib = time_and_memory(step, trained, BUDGET)
            head = "frozen" if frozen else "trained"
            lines.append({
                "step": kind, "head": head, "way": way, "ms": f"{ms:.1f}",
                "MiB beyond the gradients": f"{mib:,.0f}",
            })  # fmt: skip
            print(*lines[-1].values(), sep=" | ", flush=True)
            del step, trained
            torch.cuda.empty_cache()
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    print(f"\n{machine.device('cuda')['name']}; {versions}; {args.shape}, bf16, four layers\n")
    print(table(lines))


if __name__ == "__main__":
    main()
