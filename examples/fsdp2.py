"""Trains a fused Transformers model under FSDP2, on all GPUs or on two CPU processes.

    torchrun --nproc-per-node gpu examples/fsdp2.py     one process per GPU
    torchrun --nproc-per-node 2 examples/fsdp2.py       without a GPU

The script needs the package transformers, but neither a network nor a GPU. The text is the source
code of Python's standard library. The tokenizer is trained on this text. The model is small and
random. `fuse` is called first. Then `fully_shard` is called as for any model: for each layer, for
the head, and for the rest of the model. The weight of the head is gathered when the loss is
computed, and freed afterwards.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import logitless as ll
from demo import read_sources

VOCABULARY, LENGTH, BATCH = 2048, 64, 8  # BATCH rows of LENGTH tokens per process and step


def tokens_of(text: str) -> Tensor:
    """Trains a tokenizer on the text, and encodes the text. All processes get the same tokens."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(), VOCABULARY, show_progress=False)
    return torch.tensor(tokenizer.encode(text).ids)


def batches(tokens: Tensor, rank: int) -> Iterator[Tensor]:
    """Windows at random places of the text. The places differ between processes."""
    random = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=random)
        yield tokens[starts + torch.arange(LENGTH)]


def sharded_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = ll.fuse(LlamaForCausalLM(config))  # the only line that logitless needs
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.lm_head)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    device = "cpu"
    if torch.cuda.is_available():
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if processes > gpus:
            parser.error(
                f"--nproc-per-node must be at most {gpus}, the number of GPUs, got {processes}."
            )
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.set_default_device(device)
    model = sharded_model()
    torch.set_default_device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(tokens_of(read_sources(limit=200_000)), rank)
    for step in range(1, args.steps + 1):
        ids = next(data).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(args.steps // 5, 1) == 0 or step == 1:
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.SUM)
            if rank == 0:
                print(f"step {step:4}  loss {mean / processes:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
