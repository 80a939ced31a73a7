"""A model whose head and loss are spread over ranks trains as in one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py      head and loss over two ranks
    torchrun --nproc-per-node 4 examples/tensor_parallel.py      and over 2 x 2, with FSDP2

On GPUs by NCCL, else on the CPU by gloo. Every rank has the model's body; the head's weight, and
with it the logits, are cut along the vocabulary. Prints how far the weights are, after some steps,
from those of a process that trains alone.
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
    """Embeddings, a layer, and a head whose logits are never whole anywhere."""

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
        tokens[:, -1] = tokens[:, 0]  # so that there is something to learn
        yield tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def train(model: nn.Module, steps: int, device: str, data: DeviceMesh | None) -> list[Tensor]:
    """Weights after so many steps; each rank of `data` has its rows of every batch."""
    share, place = (1, 0) if data is None else (data.size(), data.get_local_rank())
    group = None if data is None else data.get_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens, target in batches(steps, device):
        tokens, target = (t.chunk(share)[place] for t in (tokens, target))
        optimizer.zero_grad()
        total = model(tokens, target)
        loss = total / target.numel() if group is None else global_mean(total, target, group)
        loss.backward()
        optimizer.step()
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]  # pyright: ignore


def global_mean(total: Tensor, target: Tensor, group) -> Tensor:
    """Over the tokens of all ranks, whose gradients FSDP averages."""
    return ll.global_mean(total, target.numel(), group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
        found = train(model, steps, device, data)
        far = max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))
        if dist.get_rank() == 0:
            cut = " x ".join(map(str, shape))
            print(f"{name}, {cut} ranks: weights within {far:.1e} of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
