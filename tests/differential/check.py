"""Run one case, and hold what came out against what it means."""

import contextlib
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import logitless as ll
from logitless.kernels import config
from tests.support.sizes import DEVICE

from .arguments import OUT_OF_RANGE
from .case import Case
from .functions import BAD_LOGITS, FUNCTIONS, UNKNOWN
from .sources import FROZEN, SHARDS, SOURCES, TENSORS, Given, Shards, given, named

# An error is measured against the largest number of a result, or against 1 (an upstream gradient is
# about 1). Ours may be twice PyTorch's own, in fp32 for 16 bits, and a few roundings more. In fp64,
# where PyTorch is the oracle, common offsets cost it digits too.
FACTOR = 2.0
FLOOR = {torch.float32: 16 * torch.finfo(torch.float32).eps, torch.float64: 1e-10}
ROUNDED = 2  # roundings to its own dtype of a gradient of logits: Triton's interpreter cuts bf16
SUMMED = 4  # the same of the gradients of a head, which are sums of such
RULE = re.compile(r"^.+ must .+(, got .*|, because .*)\.$", re.DOTALL)


class Outcome(NamedTuple):
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of each leaf, for a random upstream gradient


class Refusal(NamedTuple):
    kind: str
    words: str


class Wanted(NamedTuple):
    """Results with what they may be off by, in fp64."""

    values: dict[str, tuple[Tensor, Any]]
    gradients: dict[str, tuple[Tensor, Any]]


def check(case: Case) -> None:
    """Raise AssertionError where the case does not give what it should."""
    plain = run(case, "tensor", "eager")
    if case.bad is not None:
        if isinstance(plain, Refusal):
            assert RULE.match(plain.words), f"says neither rule nor value: {plain}"
            other = run(case, case.source, case.impl)
            told = other if isinstance(other, Refusal) else "accepted"
            assert other == plain, f"{case.source}, {case.impl}: {told}\nand not {plain}"
            return
        # A number out of range is no error where nothing reads it.
        assert case.arguments[case.bad].startswith(OUT_OF_RANGE), f"not refused: {case.bad}"
    assert not isinstance(plain, Refusal), f"refused: {plain}"
    wanted = defined(case, plain)
    agree(plain, wanted, "tensor, eager")
    if (case.source, case.impl) == ("tensor", "eager"):
        return
    other = run(case, case.source, case.impl)
    assert not isinstance(other, Refusal), f"{case.source}, {case.impl}: refused: {other}"
    if case.source not in TENSORS + SHARDS:
        wanted = wanted._replace(gradients=through_head(wanted.gradients, given(case), case))
    agree(other, wanted, f"{case.source}, {case.impl}")


def run(case: Case, source: str, impl: str) -> Outcome | Refusal:
    """What the library makes of it."""
    function, g, how = FUNCTIONS[case.function], given(case), arguments(case)
    logits, leaves = SOURCES[source](g)
    if case.bad == "logits":
        logits, leaves = BAD_LOGITS[case.arguments["logits"]](case.make("logits")), {}
    leaves |= wants_gradients(how)
    try:
        with by(impl, case.seed):
            if isinstance(logits, Shards):
                results = named(logits.call(function.call, how))
            else:
                results = named(function.call(logits, **how))
    except Exception as error:
        if case.bad is None:
            raise
        return Refusal(type(error).__name__, str(error))
    full = torch.promote_types(g.logits.dtype, torch.float32)
    for name, t in results.items():
        assert not t.requires_grad or t.dtype == full, f"{name} is {t.dtype}"
    with by(impl, case.seed):
        gradients = differentiated(case, results, leaves)
    if "logits" in leaves and not how.get("inplace"):
        same = torch.equal(leaves["logits"].nan_to_num(7), g.logits.nan_to_num(7))
        assert same, "logits were changed"
    return Outcome({name: t.detach() for name, t in results.items()}, gradients)


@contextlib.contextmanager
def by(impl: str, seed: int) -> Iterator[None]:
    """An implementation, of kernels with one block a row or with several."""
    with ll.impl(impl), config.override(**({"block_v": 16} if seed % 2 else {})):
        yield


def arguments(case: Case) -> dict[str, Any]:
    function, made = FUNCTIONS[case.function], {}
    for name, kind in case.arguments.items():
        if name == "logits":
            continue
        argument = function.arguments[name]
        kinds = argument.bad if name == case.bad else argument.good
        made[name] = kinds[kind](case.make(name))
    return made


def wants_gradients(how: dict[str, Any]) -> dict[str, Tensor]:
    """Arguments that are leaves, by name."""
    flat = {name: t for name, t in how.items() if isinstance(t, Tensor)}
    rows = how.get("rows", ())
    flat |= {f"rows[{i}]": t for i, t in enumerate(rows) if isinstance(t, Tensor)}
    return {name: t for name, t in flat.items() if t.requires_grad}


def differentiated(case: Case, results: dict, leaves: dict) -> dict[str, Tensor]:
    """Gradients of the leaves, for random ones of the results, a few of which are not used."""
    used, upstream = [], []
    for name, t in results.items():
        g = torch.Generator().manual_seed(case.seed ^ zlib.crc32(name.encode()))
        d = torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.device)
        dropped = len(results) > 1 and torch.rand((), generator=g) < 0.25
        if t.requires_grad and not dropped:
            used.append(t)
            upstream.append(d.to(t.dtype))
    if not used:
        return {}
    found = torch.autograd.grad(used, list(leaves.values()), upstream, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if d is None else d
        for (name, leaf), d in zip(leaves.items(), found, strict=True)
    }


def defined(case: Case, plain: Outcome) -> Wanted:
    """What the definition gives in fp64, and how far PyTorch is from it in our precision.

    A number the definition cannot give is that of the plain tensor: in rows with a NaN or +inf or
    nothing but -inf, and where autograd multiplies 0 by inf and the contract says 0.
    """
    full = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    truth, size, lost, endless = by_definition(case, torch.float64)
    torchs = truth if full == torch.float64 else by_definition(case, full)[0]
    base = FLOOR[full] + softcap_error(case)
    values, gradients = {}, {}
    x, live = given(case).logits, counts(case)
    odd = (x.isnan() | (x == torch.inf)).any(-1) | (x == -torch.inf).all(-1)
    odd = (odd | lost) & live
    assert plain.values.keys() == truth.values.keys()
    for name, want in truth.values.items():
        got = plain.values[name]
        assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}"
        if not got.is_floating_point():
            values[name] = (want, torch.where(want == UNKNOWN, torch.inf, 0.0))
            continue
        off = allowed(torchs.values[name], want, base, size)
        own = want.isnan() | at_rows(odd, want)
        own |= want.isinf() & (torchs.values[name] != want)  # by a mass that fp32 takes for none
        want = torch.where(own, got.double(), want)
        values[name] = (want, max(off, base * largest(want)))
    for name, got in plain.gradients.items():
        # In place, and of numbers beside the rows, it is rounded before it is scaled, and after.
        twice = "inplace" in case.arguments or name != "logits"
        roundings = ROUNDED * (2 if twice else 1)
        want = truth.gradients.get(name, torch.zeros_like(got)).double()
        if want.shape[: live.dim()] == live.shape:  # or there is one number per group
            want = want.masked_fill(at_rows(~live, want), 0.0)  # whatever an ignored row holds
        most = torch.finfo(got.dtype).max  # of fp16, soon reached
        want = torch.where(want.abs() > most, want.sign() * torch.inf, want)
        floor = base + roundings * torch.finfo(got.dtype).eps / 2
        off = allowed(torchs.gradients.get(name, want), want, floor, multiplier(case))
        own = ~want.isfinite() | at_rows(odd | endless, want)
        want = torch.where(own, got.double(), want)
        off = max(off, floor * largest(want))
        if name == "logits":  # of a row with +inf, or an infinite loss, only the value is promised
            none = (x == torch.inf).any(-1) | endless | (lost & ~got.isfinite().all(-1))
            off = torch.where(none.unsqueeze(-1), torch.inf, off).expand_as(x)
        gradients[name] = (want, off)
    return Wanted(values, gradients)


def multiplier(case: Case) -> float:
    """What the terms of a gradient are multiplied with: so are their roundings, if they cancel.

    (With one class they do: the gradient is 0, and kd_weight=-2 has twice the error of -1.)
    """
    how = arguments(case)
    weight = abs(how.get("kd_weight", 1.0))
    if how.get("t_squared") and 0 not in case.lead:
        weight *= torch.as_tensor(how.get("temperature", 1.0)).max().item() ** 2
    return max(1.0, weight)


def softcap_error(case: Case) -> float:
    """Of the kernels' own tanh, for logits in 16 bits: 2e-6 of the softcap (numerics.py)."""
    how, half = arguments(case), case.dtype in ("float16", "bfloat16")
    if case.impl != "triton" or not half or how.get("softcap") is None or 0 in case.lead:
        return 0.0
    least = torch.as_tensor(how.get("temperature", 1.0)).min().item()
    return 4e-6 * max(1.0, how["softcap"] / least)


def at_rows(rows: Tensor, t: Tensor) -> Tensor:
    """Which elements of t are of these rows; of a number for all rows, whether any is."""
    if t.shape[: rows.dim()] != rows.shape:
        return rows.any().expand(t.shape)
    return rows.reshape((*rows.shape, *(1,) * (t.dim() - rows.dim()))).expand(t.shape)


def counts(case: Case) -> Tensor:
    """Which rows are not ignored, (...)."""
    how = arguments(case)
    mark, ids, mask = how.get("target", how.get("labels")), how.get("ids"), how.get("mask")
    if ids is not None and "logprobs" not in how and "ignore_index" in how:
        mark = ids if ids.shape == case.lead else ids[..., 0]
    if mark is not None:
        return mark.long() != how.get("ignore_index", -100)
    if mask is not None and mask.shape == case.lead:
        return mask != 0
    return torch.ones(case.lead, device=DEVICE).bool()


def by_definition(case: Case, dtype: torch.dtype) -> tuple[Outcome, float, Tensor, Tensor]:
    """Results in this precision, the size of what they are made of, rows of NaN, and of inf."""
    means = FUNCTIONS[case.function].means
    x = given(case).logits.to(dtype).requires_grad_()
    how = arguments(case)
    leaves = {"logits": x} | wants_gradients(how)
    how.pop("inplace", None)
    for name in ("target", "labels", "ids"):  # that no number is taken for another
        if how.get(name) is not None and case.function != "SparseTargets":
            how[name] = how[name].long()
    if isinstance(how.get("temperature"), Tensor):
        how["temperature"] = how["temperature"].to(dtype)
    results = named(means(x, **how))
    size, lost = 1.0, torch.zeros(case.lead, device=DEVICE).bool()
    endless = lost
    if "reduction" in FUNCTIONS[case.function].arguments:
        rows = named(means(x, **{**how, "reduction": "none"}))["result"].detach().abs()
        lost, endless = rows.isnan(), rows.isinf()
        if rows.shape != case.lead:  # of groups
            lost, endless = (t.any().expand(case.lead) for t in (lost, endless))
        total = rows[rows.isfinite()].sum().item()
        if how.get("reduction") != "none":
            size = total if how.get("reduction") == "sum" else total / max(rows.numel(), 1)
    values = {name: t.detach() for name, t in results.items()}
    return Outcome(values, differentiated(case, results, leaves)), size, lost, endless


def allowed(torchs: Tensor, want: Tensor, floor: float, size: float) -> float:
    """What a result may be off by."""
    both = torchs.isfinite() & want.isfinite()
    if not both.any():
        return floor * max(size, 1.0)
    error = (torchs.double() - want)[both].abs().max().item()
    return FACTOR * error + floor * max(size, 1.0, want[both].abs().max().item())


def largest(t: Tensor) -> float:
    found = t[t.isfinite()].abs()
    return found.max().item() if found.numel() else 0.0


def through_head(gradients: dict, g: Given, case: Case) -> dict:
    """Gradients of hidden, weight and bias, which those of logits say.

    A hidden state that is no number is not read if its row is dropped; else it may be, times 0.
    """
    if "logits" not in gradients:
        return gradients
    dz, off = (t.reshape(-1, g.logits.shape[-1]) if isinstance(t, Tensor) else t
               for t in gradients["logits"])  # fmt: skip
    off = off + SUMMED * torch.finfo(g.weight.dtype).eps * dz.abs()
    still = (dz == 0).all(1, keepdim=True)  # 0 · NaN is not 0
    h = g.hidden.reshape(len(dz), g.hidden.shape[-1]).double()
    unread, W = still & ~h.isfinite(), g.weight.double()
    h = h.masked_fill(unread, 0.0)
    kept = case.source == "head, nothing dropped" or not drops_rows(case)
    heads = {
        "hidden": ((dz @ W).view(g.hidden.shape), (off @ W.abs()).view(g.hidden.shape)),
        "weight": (dz.T @ h, torch.inf if kept and unread.any() else off.T @ h.abs()),
        "bias": (dz.sum(0), off.sum(0)),
    }
    rest = {name: want for name, want in gradients.items() if name != "logits"}
    trained = ("hidden",) if case.source == FROZEN else g.parts()
    return {name: want for name, want in heads.items() if name in trained} | rest


def drops_rows(case: Case) -> bool:
    """Whether rows without a gradient are rows that are ignored."""
    return not {"logprobs", "teacher_logprobs", "kept"} & case.arguments.keys()


def agree(got: Outcome, wanted: Wanted, where: str) -> None:
    for found, wants, what in (
        (got.values, wanted.values, "value"),
        (got.gradients, wanted.gradients, "gradient"),
    ):
        assert found.keys() == wants.keys(), f"{where}: {what}s of {list(found)}, not {list(wants)}"
        for name, (want, off) in wants.items():
            close(found[name], want, off, f"{where}: {what} {name}")


def close(got: Tensor, want: Tensor, off: Any, what: str) -> None:
    """As far apart as allowed, with NaN and infinities at the same places."""
    got, want = got.double(), want.double()
    odd = ~want.isfinite()
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(odd, ~same, ~((got - want).abs() <= off) & ~same)
    apart &= torch.as_tensor(off, device=got.device) < torch.inf
    if apart.any():
        at = tuple(apart.nonzero()[0].tolist())
        bound = off[at] if isinstance(off, Tensor) else off
        raise AssertionError(
            f"{what}: {got[at].item():.9g} at {at}, and not {want[at].item():.9g} ± {bound:.2g}"
        )
