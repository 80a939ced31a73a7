"""Trains with head and loss sharded over ranks, and compares the weights with one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py      head and loss over two ranks
    torchrun --nproc-per-node 4 examples/tensor_parallel.py      also over 2 x 2 ranks, with FSDP2

The ranks use GPUs and NCCL, or the CPU and gloo if there is no GPU. Every rank has the whole body
of the model. The head's weight, and thus the logits, are sharded along the vocabulary. A single
process trains the same model for comparison. The script prints the largest difference between the
weights of the two models after some steps.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import logitless as ll

VOCAB, WIDTH, LENGTH, BATCH = 1000, 32, 16, 8


class Model(nn.Module):
    """Embeddings, a layer, and a head. With a mesh, the rows of the head are sharded over ranks."""

    def __init__(self, mesh: DeviceMesh | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Parameter(torch.randn(VOCAB, WIDTH) / WIDTH**0.5)
        self.mesh = mesh
        if mesh is not None:  # this rank's rows of the head
            self.head = nn.Parameter(distribute_tensor(self.head.detach(), mesh, [Shard(0)]))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(tokens)))
        if self.mesh is not None:
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()])
        return ll.cross_entropy(ll.LinearLogits(hidden, self.head), target, reduction="sum")


def batches(steps: int, device: str):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=g)
        tokens[:, -1] = tokens[:, 0]  # gives the model something to learn
        yield tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def train(model: nn.Module, steps: int, device: str, data: DeviceMesh | None) -> list[Tensor]:
    """Returns the trained weights. Each rank of `data` trains on its own rows of every batch."""
    ranks, rank = (1, 0) if data is None else (data.size(), data.get_local_rank())
    group = None if data is None else data.get_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens, target in batches(steps, device):
        tokens, target = (t.chunk(ranks)[rank] for t in (tokens, target))
        optimizer.zero_grad()
        total = model(tokens, target)
        loss = total / target.numel() if group is None else global_mean(total, target, group)
        loss.backward()
        optimizer.step()
    weights = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]  # type: ignore


def global_mean(total: Tensor, target: Tensor, group) -> Tensor:
    """The mean over the tokens of all ranks, for gradients that FSDP averages over ranks."""
    return ll.global_mean(total, target.numel(), group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    ways = {"tensor parallel": (1, world)}
    if world % 2 == 0 and world > 2:
        ways["FSDP2 x tensor parallel"] = (2, world // 2)
    alone = train(Model().to(device), steps, device, None)
    for name, shape in ways.items():
        mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "model"))
        model = Model(mesh["model"]).to(device)
        data = mesh["data"] if shape[0] > 1 else None
        if data is not None:
            fully_shard(model, mesh=data)
        weights = train(model, steps, device, data)
        far = max(float((a - b).abs().max()) for a, b in zip(weights, alone, strict=True))
        if dist.get_rank() == 0:
            cut = " x ".join(map(str, shape))
            print(f"{name}, {cut} ranks: weights within {far:.1e} of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
