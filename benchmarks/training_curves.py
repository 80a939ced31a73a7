"""Trains the same small Llama with and without `ll.fuse`, and compares the curves.

    python benchmarks/training_curves.py --out FOLDER [--steps 2000] [--seeds 3] [--at-once 12]
    python benchmarks/training_curves.py --plot FOLDER

The text is the source code of Python's standard library. The Llama has a vocabulary of 32,768
tokens, and 4 layers of width 384. Each case is trained with several seeds, with Transformers' own
loss and with `ll.fuse(model)`. A seed fixes the weights and the batches. So two runs of the same
seed differ only by the rounding errors of their losses:

- bf16: autocast to bf16, fp32 weights
- fp16: autocast to fp16, fp32 weights, and a GradScaler
- LoRA: adapters of rank 8 in every linear layer of a model that was trained before, in bf16
- FSDP2: bf16 through `fully_shard`, in one process

Every run is a process of its own. FOLDER gets training-curves.md and training-curves.jsonl. Each
line of training-curves.jsonl is one run, with the loss and the norm of the gradient as means of
STRIDE steps. The option --plot draws training-curves.png from training-curves.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

CASES = ("bf16", "fp16", "LoRA", "FSDP2")
STRIDE = 10
BATCH, CONTEXT = 4, 512
WARM_UP, LR = 100, 1e-3
BEFORE_LORA = 300  # steps of plain training before the adapters are added
LAST = 200  # steps at the end whose mean loss is compared


class LoRA(nn.Module):
    """A frozen linear layer plus an adapter of rank 8."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 8, bias=False, device=layer.weight.device)
        self.up = nn.Linear(8, layer.out_features, bias=False, device=layer.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(x))


def llama(vocab: int, device: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()  # type: ignore


def with_adapters(model: nn.Module) -> nn.Module:
    """Freezes the model, and adds an adapter to each linear layer except the head."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, LoRA(child))
    return model


class Training:
    """One model with its optimiser, and the curves of its training."""

    def __init__(self, model: nn.Module, ids: Tensor, case: str, seed: int, steps: int):
        self.model, self.ids, self.device = model, ids, ids.device.type
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, LR)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda i: min(1.0, (i + 1) / WARM_UP) * (1 - 0.9 * i / steps)
        )
        self.dtype = torch.float16 if case == "fp16" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(self.device, enabled=case == "fp16")
        self.random = torch.Generator().manual_seed(seed)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def run(self, steps: int) -> None:
        window = torch.arange(CONTEXT, device=self.device)
        for _ in range(steps):
            start = torch.randint(len(self.ids) - CONTEXT, (BATCH, 1), generator=self.random)
            batch = self.ids[start.to(self.device) + window]
            with torch.autocast(self.device, self.dtype):
                loss = self.model(input_ids=batch, labels=batch).loss
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            self.norms.append(norm.detach())


def train(case: str, seed: int, fused: bool, steps: int, text: int) -> dict:
    """One run. Returns the curves, the seconds, and the peak memory in MiB."""
    import logitless as ll
    from examples.demo import small

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = small.read_sources(text)
    words = small.vocabulary(source)
    ids = small.encode(source, words).to(device)
    torch.manual_seed(seed)
    model = llama(small.VOCAB, device)
    if case == "LoRA":
        Training(model, ids, "bf16", seed + 1000, steps).run(min(BEFORE_LORA, steps))
        model = with_adapters(model)
    if fused:
        model = ll.fuse(model)
    if case == "FSDP2":
        model = sharded(model, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(model, ids, case, seed, steps)
    begin = time.perf_counter()
    training.run(steps)
    losses, norms = torch.stack(training.losses).tolist(), torch.stack(training.norms).tolist()
    seconds = time.perf_counter() - begin
    assert bool(ll.is_fused(model)) is fused
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return {
        "case": case, "seed": seed, "fused": fused, "seconds": seconds, "peak": peak,
        "loss": losses, "norm": norms,
    }  # fmt: skip


def sharded(model: nn.Module, device: str) -> nn.Module:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    store = Path(tempfile.mkdtemp()) / "store"
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    for layer in model.model.layers:  # type: ignore
        fully_shard(layer)
    return fully_shard(model)


def all_runs(args: argparse.Namespace) -> list[dict]:
    """Runs each case in a process of its own, at most args.at_once at the same time."""
    waiting = [
        (case, seed, fused)
        for case in args.cases for seed in range(args.seeds) for fused in (False, True)
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running, results = [], []
    while waiting or running:
        while waiting and len(running) < args.at_once:
            case, seed, fused = waiting.pop(0)
            command = [sys.executable, __file__, "--run", case, str(seed), str(int(fused))]
            command += ["--steps", str(args.steps), "--text", str(args.text)]
            running.append(
                (command, subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
            )
        for command, process in list(running):
            try:
                out, _ = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            running.remove((command, process))
            if process.returncode:
                print("failed:", *command[2:5], flush=True)
                continue
            results.append(json.loads(out.splitlines()[-1]))
            print("done:", *command[2:5], f"{results[-1]['seconds']:.0f} s", flush=True)
    return results


def means(values: list[float], count: int = STRIDE) -> list[float]:
    return [
        float(f"{statistics.fmean(values[i : i + count]):.5g}")
        for i in range(0, len(values), count)
    ]


def report(results: list[dict], steps: int) -> str:
    """A table of the final losses, and of the differences between runs."""
    from logitless.cli import machine
    from logitless.cli.report import table

    def final(case: str, fused: bool) -> list[float]:
        chosen = [r for r in results if r["case"] == case and r["fused"] == fused]
        chosen.sort(key=lambda r: r["seed"])
        return [statistics.fmean(r["loss"][-LAST:]) for r in chosen]

    rows = []
    for case in dict.fromkeys(r["case"] for r in results):
        plain, fused = final(case, False), final(case, True)
        gaps = [abs(a - b) for a, b in zip(plain, fused, strict=False)]
        by_seed = {(r["seed"], r["fused"]): r for r in results if r["case"] == case}
        first = [
            max(abs(a - b) for a, b in zip(one["loss"][:100], two["loss"][:100], strict=True))
            for seed in range(len(plain))
            if (one := by_seed.get((seed, False))) and (two := by_seed.get((seed, True)))
        ]
        rows.append({
            "case": case,
            "plain": ", ".join(f"{x:.4f}" for x in plain),
            "ll.fuse": ", ".join(f"{x:.4f}" for x in fused),
            "largest difference of a seed": f"{max(gaps, default=float('nan')):.4f}",
            "range over seeds": f"{max(plain) - min(plain):.4f}" if plain else "",
            "largest difference of one step, first 100": f"{max(first, default=float('nan')):.1e}",
            "peak MiB, plain": f"{max((r['peak'] for r in by_seed.values() if not r['fused']), default=0):,.0f}",  # noqa: E501
            "peak MiB, ll.fuse": f"{max((r['peak'] for r in by_seed.values() if r['fused']), default=0):,.0f}",  # noqa: E501
        })  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = ", ".join(filter(None, machine.device(device).values()))
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    return "\n".join([
        "# Training curves", "", f"- {where}; {versions}",
        f"- logitless at commit {machine.commit()}; {machine.now()}",
        f"- {steps} steps of {BATCH * CONTEXT:,} tokens; the losses are means of the last {LAST}"
        " steps, one number per seed", "", table(rows), "",
    ])  # fmt: skip


def plot(folder: Path) -> None:
    from matplotlib.figure import Figure

    lines = (folder / "training-curves.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    cases = list(dict.fromkeys(r["case"] for r in runs))
    figure = Figure(figsize=(3.2 * len(cases), 4.6), layout="constrained")
    axes = figure.subplots(2, len(cases), sharex=True, squeeze=False, sharey="row")
    for column, case in enumerate(cases):
        for run in (r for r in runs if r["case"] == case):
            steps = [STRIDE * (i + 0.5) for i in range(len(run["loss"]))]
            style = (
                {"color": "#d1495b", "linewidth": 0.8, "label": "ll.fuse(model)"}
                if run["fused"]
                else {"color": "#9aa5b1", "linewidth": 3.0, "label": "Transformers"}
            )
            style["zorder"] = 2 + run["fused"]
            for row, what in enumerate(("loss", "norm")):
                axes[row][column].plot(steps, run[what], **style)
        axes[0][column].set_title(case)
        axes[1][column].set_xlabel("step")
        for row in axes:
            row[column].spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("norm of the gradient")
    axes[1][0].set_yscale("log")
    lines, labels = axes[0][0].get_legend_handles_labels()
    once = dict(zip(labels, lines, strict=True))
    axes[0][0].legend(list(once.values()), list(once), frameon=False)
    figure.savefig(folder / "training-curves.png", dpi=150)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER")
    add("--plot", type=Path, metavar="FOLDER")
    add("--steps", type=int, default=2000)
    add("--seeds", type=int, default=3)
    add("--at-once", type=int, default=12)
    add("--cases", nargs="+", default=CASES, choices=CASES)
    add("--text", type=int, default=12_000_000, help="number of characters")
    add("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        case, seed, fused = args.run
        print(json.dumps(train(case, int(seed), fused == "1", args.steps, args.text)))
        return 0
    if args.plot:
        plot(args.plot)
        return 0
    results = all_runs(args)
    args.out.mkdir(parents=True, exist_ok=True)
    text = report(results, args.steps)
    for run in results:
        run["loss"], run["norm"] = means(run["loss"]), means(run["norm"])
    lines = [json.dumps(run, separators=(",", ":")) for run in results]
    (args.out / "training-curves.jsonl").write_text("\n".join(lines) + "\n")
    (args.out / "training-curves.md").write_text(text)
    print(text)
    return int(len(results) < len(args.cases) * args.seeds * 2)


if __name__ == "__main__":
    raise SystemExit(main())
