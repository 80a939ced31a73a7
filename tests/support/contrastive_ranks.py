"""A contrastive loss over ranks, compared with the same loss in one process."""

import itertools
import os
from typing import NamedTuple

import torch

import logitless as ll
from tests.support.contrastive import FUNCTIONS, embeddings, gradients
from tests.support.laws import error

SIZES = {1: (9,), 2: (7, 12), 4: (5, 0, 9, 3)}  # pairs of each rank
EXTRA = 4  # rows of b without a pair, on each rank, if the loss has one direction

CASES = {
    "mean": ("contrastive", {}),
    "sum": ("contrastive", {"reduction": "sum", "averaged": False}),
    "none": ("contrastive", {"reduction": "none"}),
    "labels": ("contrastive", {"labels": True}),
    "mask": ("contrastive", {"mask": True, "reduction": "none"}),
    "one way": ("contrastive", {"symmetric": False}),
    "positives": ("contrastive", {"symmetric": False, "positives": True, "labels": True}),
    "sigmoid mean": ("sigmoid_contrastive", {}),
    "sigmoid sum": ("sigmoid_contrastive", {"reduction": "sum", "averaged": False}),
    "sigmoid none": ("sigmoid_contrastive", {"reduction": "none", "positives": True}),
}


class Shares(NamedTuple):
    """The rows of a and of b that each rank has, as slices of the rows of all ranks."""

    rows: list[slice]
    columns: list[slice]

    @staticmethod
    def of(sizes, extra: int) -> "Shares":
        ends = [0, *itertools.accumulate(sizes)]
        both = [end + extra * rank for rank, end in enumerate(ends)]
        return Shares(*([slice(*pair) for pair in itertools.pairwise(e)] for e in (ends, both)))


def options_of(case: str, rank: int, shares: Shares) -> tuple[dict, dict]:
    """The options of this rank's call, and the options of the oracle over all rows."""
    name, how = CASES[case]
    own, whole = dict(how), {k: value for k, value in how.items() if k != "averaged"}
    rows, columns = shares.rows[rank], shares.columns[rank]
    n, m = shares.rows[-1].stop, shares.columns[-1].stop
    local = [torch.arange(r.stop - r.start) for r in shares.rows]
    if how.get("positives"):
        local = [
            torch.randint(0, c.stop - c.start, (r.stop - r.start,))
            for r, c in zip(*shares, strict=True)
        ]
        own["positives"] = local[rank]
    if name == "sigmoid_contrastive" or how.get("symmetric") is False:
        columns_of = zip(local, shares.columns, strict=True)
        whole["positives"] = torch.cat([p + c.start for p, c in columns_of])
    if how.get("labels"):
        whole["labels"] = torch.randint(0, 4, (n,)), torch.randint(0, 4, (m,))
        own["labels"] = whole["labels"][0][rows], whole["labels"][1][columns]
    if how.get("mask"):
        whole["mask"] = torch.rand(n, m) < 0.4
        own["mask"] = whole["mask"][rows]
    return own, whole


def largest_error(
    case: str, group, rank: int, ranks: int, dtype=torch.float64, device="cpu"
) -> float:
    """The largest error of the value and of the gradients on this rank.

    The oracle's loss over the rows of all ranks is computed on every rank, from the same seed. The
    upstream gradient is random: the same number on all ranks for a mean or a sum, or one number per
    row.
    """
    torch.manual_seed(1)
    name, how = CASES[case]
    ours, naive = FUNCTIONS[name]
    one_way = how.get("symmetric") is False or how.get("positives")
    shares = Shares.of(SIZES[ranks], EXTRA if one_way else 0)
    rows, columns = shares.rows[rank], shares.columns[rank]
    n, m = shares.rows[-1].stop, shares.columns[-1].stop
    own, whole = options_of(case, rank, shares)
    a, b = embeddings(n, m, dtype)
    numbers = {"scale": torch.tensor(2.5, dtype=dtype)}
    if name == "sigmoid_contrastive":
        numbers["bias"] = torch.tensor(-1.0, dtype=dtype)
    by_row = how.get("reduction") == "none"
    upstream = torch.randn(n if by_row else (), dtype=torch.float64)
    value, *want = gradients(
        naive, a.double(), b.double(), upstream, numbers,
        **whole, **{k: t.double() for k, t in numbers.items()},
    )  # fmt: skip
    own = {k: moved(value, device) for k, value in (own | numbers).items()}
    got, *found = gradients(
        ours, a[rows].to(device), b[columns].to(device),
        (upstream[rows] if by_row else upstream).to(device), numbers,
        **own, group=group, workspace=4 * 32 * 8,
    )  # fmt: skip
    got, found = got.cpu(), [t.cpu() for t in found]
    factor = ranks if how.get("averaged", True) and not by_row else 1
    # The sum over ranks of the gradients of scale and bias is the whole gradient.
    found[2:] = [gathered_sum(group, t) for t in found[2:]]
    want[:2] = want[0][rows], want[1][columns]
    errors = [error(got, value[rows] if by_row else value) if got.numel() else 0.0]
    errors += [error(x, y * factor) for x, y in zip(found, want, strict=True) if x.numel()]
    return max(errors)


def moved(value, device):
    """The tensors of an option, on a device."""
    if isinstance(value, tuple):
        return tuple(t.to(device) for t in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def gathered_sum(group, t):
    from logitless.parallel.ranks import ranks_of

    return t if group is None else ranks_of(group).gather(t).sum(0)


def all_errors(rank: int, ranks: int, dtype=torch.float64, device="cpu") -> dict[str, float]:
    """The errors of all cases on this rank of a gloo group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        world = dist.group.WORLD
        return {case: largest_error(case, world, rank, ranks, dtype, device) for case in CASES}
    finally:
        dist.destroy_process_group()


def ring_on_the_gpu(rank: int) -> dict[str, float]:
    """The errors of all cases in fp32. All ranks use the first GPU, which `together` hides."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    return all_errors(rank, 2, torch.float32, "cuda")


# Keeps DDP models until the process ends. Otherwise the destructor of DDP and a thread of gloo can
# wait for each other forever.
KEPT = []


def trained_by_ddp(rank: int, ranks: int) -> list[float]:
    """The gradients of DDP's weights after one backward."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    try:
        towers, images, texts = tower_batch()
        mine = slice(rank * 6, rank * 6 + 6)
        model = DistributedDataParallel(towers)
        KEPT.append(model)
        a, b = model(images[mine], texts[mine])
        ll.contrastive(a, b, scale=5.0, group=dist.group.WORLD).backward()
        return [float(p.grad.abs().sum()) for p in towers.parameters()]
    finally:
        dist.destroy_process_group()


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(5, 4), torch.nn.Linear(7, 4)

    def forward(self, images, texts):
        return self.image(images), self.text(texts)


def tower_batch():
    torch.manual_seed(3)
    return Towers().double(), torch.randn(12, 5).double(), torch.randn(12, 7).double()
