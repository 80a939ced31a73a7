"""Measures the speed of capturing a teacher into a store, relative to the teacher's forward.

    python -m benchmarks.capture_speed --out FOLDER

The teacher is a random Llama of the 1B class with V = 128,256 in bf16, and the documents are random
tokens. Three runs are timed: the forward to hidden states, the forward to whole logits, and
`ll.store.capture` with K = 64 into a store on disk. Before the timing, a short capture is compared
with `capture_topk` of whole logits. After the timing, the store is verified. The target for the
capture is 80 % of the speed of the forward to whole logits. The script writes capture-speed.md and
needs the package transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import logitless as ll
from benchmarks.bench.clocks import wall_time
from logitless.cli import machine
from logitless.cli.report import table

AIM = 0.8


def teacher(small: bool, device: str) -> LlamaForCausalLM:
    sizes = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192}
    sizes |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    if small:  # sizes for a machine without a GPU
        sizes |= {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--small", action="store_true", help="use a tiny teacher, for a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = teacher(args.small, device)
    vocab = model.config.vocab_size
    shape = (args.batches, args.batch, args.context)
    batches = list(torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1)))

    @torch.no_grad()
    def hidden_states(_=None) -> None:
        for batch in batches:
            model.model(batch.to(device))

    @torch.no_grad()
    def whole_logits(_=None) -> None:
        for batch in batches:
            model(batch.to(device))

    with tempfile.TemporaryDirectory() as folder:

        def capture(name: str, batches=batches) -> None:
            with ll.store.Writer(Path(folder) / name, vocab_size=vocab, k=64) as writer:
                ll.store.capture(model, batches, writer)

        capture("warm", batches[:2])
        check(model, Path(folder) / "warm", batches[0])
        hidden_states()
        times = {
            "hidden states alone": wall_time(device, hidden_states),
            "whole logits": wall_time(device, whole_logits),
            "ll.store.capture, K = 64": wall_time(device, lambda _: capture("store")),
        }
        assert ll.store.Store(Path(folder) / "store").verify()
    tokens = args.batches * args.batch * args.context
    rows = []
    for name, ms in times.items():
        speed, share = f"{1e3 * tokens / ms:,.0f}", f"{times['whole logits'] / ms:.0%}"
        rows.append({"": name, "tokens/s": speed, "of the forward with whole logits": share})
    about = (
        f"{machine.device(device)['name']}, torch {torch.__version__}, commit {machine.commit()}"
    )
    text = f"# Capturing a teacher\n\n{about}; {tokens:,} tokens, V = {vocab:,}; aim {AIM:.0%}.\n\n"
    text += table(rows) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "capture-speed.md").write_text(text)
    print(text)


@torch.no_grad()
def check(model: LlamaForCausalLM, path: Path, batch: torch.Tensor) -> None:
    """Checks that a stored document equals a capture from whole logits, up to rounding."""
    store = ll.store.Store(path)
    _, got = store[store.find(batch[0])]
    want = ll.capture_topk(model(batch[:1].to(model.device)).logits, 64)[0].to("cpu")
    near = (got.logprobs[:, 0] - want.logprobs[:, 0]).abs().mean()
    assert near < 0.05, near
    assert (got.tail - want.tail).abs().mean() < 0.05


if __name__ == "__main__":
    main()
