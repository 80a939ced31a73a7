"""Cases over a head: losses of hidden states and a weight, whose logits are never all there.

The floor is the matrix products that the work cannot do without, by cuBLAS at full size: three for
a mean or sum, four where results a row come back. `workspace` bounds the memory; Liger is compared
at the memory that it takes itself.
"""

from functools import partial
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll

from . import reference
from .cases import DTYPES, Case, Inputs, Mode
from .teachers import TAIL, distill, sparse_teacher
from .timing import MIB

LARGE, EXACT, CPU = (8192, 4096, 128256), (8192, 1024, 32768), ((256, 512, 32000), "fp32")
LIGER_MIB = {LARGE: 64, (8192, 2048, 151936): 37, (16384, 2304, 256000): 128}
QUICK = {"cuda": ((1024, 1024, 32000), "bf16"), "cpu": ((64, 32, 4001), "fp32")}


def cases(device: str, quick: bool) -> list[Case]:
    if device == "cpu" or quick:
        shape, dtype = QUICK[device] if quick else CPU
        return [*at(device, shape, dtype), *others(shape, dtype)]
    large = [case for shape in LIGER_MIB for case in at(device, shape, "bf16")]
    return [*large, *others(LARGE, "bf16"), *exactness(), *growing()]


def at(device: str, shape: tuple[int, ...], dtype: str) -> list[Case]:
    """Cross-entropy in several workspaces, and with its sums in other dtypes."""
    if len(shape) != 3:
        return []
    plain = partial(Case, "heads", "cross_entropy", Mode.BACKWARD, shape, dtype)
    case = partial(plain, alone=True)
    found = [plain(targets={"floor": 1.06}, yardstick="3 GEMMs")]
    for mib in sorted({128, 64, LIGER_MIB.get(shape, 64)}, reverse=True):
        targets = {"floor": 1.25} if mib == 128 else {}
        targets |= {"liger": 1.0} if mib == LIGER_MIB.get(shape) else {}
        given = {"workspace": mib * MIB}
        found.append(case(f"{mib} MiB", given, targets, yardstick="3 GEMMs"))
    small = {"workspace": 128 * MIB, "accumulate": "weight"}
    return [
        *found,
        case("128 MiB, summed in the weight's dtype", small),
        case("summed in fp32", {"accumulate": "fp32"}),
    ]


def others(shape: tuple[int, ...], dtype: str) -> list[Case]:
    """Other losses over one head."""

    def case(op: str, variant: str, given: dict, targets: dict, yardstick="", **how) -> Case:
        where = (op, Mode.BACKWARD, shape, dtype, variant)
        return Case("heads", *where, given, targets, yardstick=yardstick, **how)

    grpo, half = "GRPO mean by row_loss", "half of the rows ignored"
    beside, floor = "cross_entropy", "floor"
    return [
        case("policy_loss", grpo, {}, {floor: 1.06}, "3 GEMMs", needs="row_loss"),
        case("score", "with entropy", {}, {floor: 1.08}, "4 GEMMs", alone=True),
        case("topk_distill", "tail, K=64", TAIL, {beside: 1.05}, alone=True),
        case("cross_entropy", half, {"ignored": True}, {beside: 0.56}, alone=True),
    ]


def exactness() -> list[Case]:
    """The error of the weight's gradient, summed over more and more chunks: see its column."""
    case = partial(Case, "heads", "cross_entropy", Mode.BACKWARD, EXACT, "bf16", study=True)
    found = [case("beside an unfused head", compiled=False)]
    for chunks in (1, 2, 4, 8, 16, 64):
        for way in ("auto", "fp32", "weight"):
            given = {"workspace": EXACT[0] // chunks * EXACT[2] * 2, "accumulate": way}
            found.append(case(f"{chunks} chunks, accumulate={way}", given, alone=True))
    return found


def growing() -> list[Case]:
    """Memory for more and more rows: see its column."""
    case = partial(Case, "heads", "cross_entropy", Mode.BACKWARD, dtype="bf16", study=True)
    given = {"default workspace": {}, "128 MiB": {"workspace": 128 * MIB}}
    return [
        case((rows, *LARGE[1:]), variant=f"{name}, growing rows", given=how, alone=True)
        for rows in (4096, 8192, 16384, 32768, 65536)
        for name, how in given.items()
    ]


def inputs(case: Case, device: str) -> Inputs:
    """Hidden states and a weight whose logits have variance 4."""
    (N, D, V), options = case.shape, dict(case.given)
    hidden = torch.randn(N, D, device=device, dtype=DTYPES[case.dtype])
    weight = torch.randn(V, D, device=device, dtype=DTYPES[case.dtype]) * (2 / D**0.5)
    target = torch.randint(V, (N,), device=device)
    rows = (target,)
    if options.pop("ignored", False):
        target[torch.randperm(N, device=device)[: N // 2]] = reference.IGNORED
    if case.op == "topk_distill":
        rows = sparse_teacher(N, V, device, options)
    if case.op == "policy_loss":  # a policy that has hardly moved: log Σ e^z is close to log V + 2
        noise, advantage = torch.randn(2, N, device=device)
        picked = (hidden.float() * weight[target].float()).sum(-1)
        rows = (target, picked - (log(V) + 2) + 0.03 * noise, advantage)
    head = {name: options.pop(name) for name in ("workspace", "accumulate") if name in options}
    return Inputs((hidden, weight), rows, options, {"head": head})


def policy_loss(logits, target, old, advantage) -> Tensor:
    def formula(stats, old, advantage):
        return reference.clipped(stats.logprob, old, advantage)

    return ll.row_loss(formula, logits, target, rows=(old, advantage))  # pyright: ignore


def over_head(loss):
    def call(hidden, weight, *rows, head, **options):
        return loss(ll.LinearLogits(hidden, weight, **head), *rows, **options)

    return call


def ours() -> dict:
    losses = {"cross_entropy": ll.cross_entropy, "score": ll.score, "topk_distill": distill}
    return {op: over_head(loss) for op, loss in (losses | {"policy_loss": policy_loss}).items()}


def over_linear(loss):
    return lambda hidden, weight, *rows: loss(F.linear(hidden, weight), *rows)


def fused(loss) -> dict:
    return {"cross_entropy": loss}


def liger(module) -> dict:
    loss = module.LigerFusedLinearCrossEntropyLoss()
    return fused(lambda hidden, weight, target: loss(weight, hidden, target))


def fla(module) -> dict:
    loss = module.FusedLinearCrossEntropyLoss()
    return fused(lambda hidden, weight, target: loss(hidden, target, weight))


EAGER_OPS = {op: over_linear(reference.OPS[op]) for op in ("cross_entropy", "policy_loss")}
RIVALS = {
    "liger": ("liger_kernel.transformers", liger),
    "fla": ("fla.modules", fla),
    "cce": ("cut_cross_entropy", lambda module: fused(module.linear_cross_entropy)),
}
