"""Compiles every kernel variant for a GPU without having this GPU, and prints its resources.

    python -m tests.support.aot cuda:90 [--all]      (TRITON_INTERPRET unset)

The real launchers are called with CPU tensors. Their launches are recorded and compiled, but not
run. So the compiled kernels are those that a GPU would run. The command prints one JSON line per
compiled kernel. With --all, all variants are compiled, in all their forms. Otherwise, only the main
variants are compiled. For Hopper, whose resources the tests check, these are all forms of the first
variant, and one form per kernel of each other variant. For the other GPUs, these are one form per
kernel.
"""

import contextlib
import itertools
import json
import sys
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from logitless import kernels
from logitless.contract import (
    COEFFICIENTS,
    PAIR_STATE,
    STATE,
    Coefficients,
    Pair,
    Reading,
    Slots,
)
from logitless.eager.pair_losses import LOSSES as PAIRS
from logitless.eager.sampled import Sampling
from logitless.kernels import config, pair_fwd, program_exchange
from tests.support.aot_launches import (
    launch_contrastive,
    launch_row_gemm,
    launch_sums,
    launch_table,
)
from tests.support.cubin import resources

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
PROCESSORS = 132
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def source_of(kernel, args, kwargs):
    """The source that Triton would compile for a launch, its options and its arguments.

    Arguments that are None or 1 become constants.
    """
    bound = dict(zip(kernel.arg_names, args, strict=False))
    options = {k: kwargs[k] for k in kwargs if k not in kernel.arg_names}
    bound.update({k: v for k, v in kwargs.items() if k in kernel.arg_names})
    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        frozen = param.do_not_specialize
        one = type(value) is int and value == 1 and not frozen
        if param.is_constexpr or value is None or one:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            size = ",".join(map(str, value.block_shape))
            signature[param.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{size}]>"
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not frozen:
                attrs[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attrs), options, bound


@contextlib.contextmanager
def recording():
    """Yields a list of the launches in this block. The launches are recorded but not run."""
    launches = []

    def record(self, *args, grid, warmup, **kwargs):
        launches.append(source_of(self, args, kwargs))

    with mock.patch.object(triton.runtime.JITFunction, "run", record):
        yield launches


class Variant(NamedTuple):
    """The arguments of one call of the launchers."""

    dtype: torch.dtype
    V: int = 32768  # with V = 50257, rows are not 16-byte aligned
    split: bool = False  # whether rows are split because few rows do not fill the GPU
    K: int = 1
    softcap: float | None = None
    everything: bool = False  # every statistic, class weights, one temperature per row

    def __str__(self) -> str:
        extras = " split" * self.split + " softcap" * bool(self.softcap)
        extras += " everything" * self.everything
        return f"{str(self.dtype)[6:]} V={self.V} K={self.K}{extras}"


def variants() -> list[Variant]:
    """All combinations of dtype, alignment and splits, and each option for some of them."""
    dtypes = (BF16, FP16, FP32)
    plain = [Variant(*v) for v in itertools.product(dtypes, (32768, 50257), (False, True))]
    capped = [Variant(dtype, softcap=30.0) for dtype in dtypes]
    full = [
        Variant(BF16, K=1, softcap=30.0, everything=True),
        Variant(BF16, 50257, K=8, softcap=30.0, everything=True),
        Variant(BF16, 50257, split=True, K=8, everything=True),
        Variant(FP32, K=8, softcap=30.0, everything=True),
        Variant(BF16, K=512, everything=True),
        Variant(FP32, 50257, split=True, softcap=30.0, everything=True),
        Variant(FP16, 50257, everything=True),
    ]
    sparse = [
        Variant(BF16, K=512),
        Variant(BF16, 50257, K=64, softcap=30.0),
        Variant(FP32, 50257, K=8),
        Variant(BF16, V=1, K=2),
    ]
    return plain + capped + full + sparse


def main_variants() -> list[Variant]:
    """Few variants that launch every kernel, with each dtype and each option at least once."""
    return [
        Variant(BF16),
        Variant(FP32, softcap=30.0),
        Variant(FP16, 50257, everything=True),
        Variant(FP32, 50257, split=True, softcap=30.0, everything=True),
        Variant(BF16, 50257, K=8, softcap=30.0, everything=True),
        Variant(BF16, V=1, K=2),
    ]


def reading_of(v: Variant) -> Reading:
    """A Reading with labels, with ids if K > 1, and with the statistics of the variant."""
    wants = ("nll",) if v.K == 1 else ("logprob",)
    if v.everything:
        wants += ("lse", "picked", "entropy", "total", "log_total", "argmax", "rank")
        wants += () if v.K == 1 else ("tail", "logprob_t1")
    return Reading(
        v.V,
        label=torch.zeros(2, dtype=torch.int64),
        ids=None if v.K == 1 else torch.zeros(2, v.K, dtype=torch.int64),
        class_weight=torch.ones(v.V) if v.everything else None,
        row_temperature=torch.ones(2) if v.everything else None,
        temperature=None if v.everything else 1.0,
        softcap=v.softcap,
        ignore_index=-100,
        wants=wants,
    )


def launches_of(v: Variant):
    """The launches of a variant, on tensors of two rows."""
    x, reading = torch.zeros(2, v.V, dtype=v.dtype), reading_of(v)
    with recording() as launches:
        with mock.patch.object(config, "processors", return_value=PROCESSORS if v.split else 1):
            found = kernels.read(x, reading)
        if not v.split:
            # On a GPU, programs may wait for each other.
            with mock.patch.object(program_exchange, "may_wait", return_value=True):
                launch_gradients(x, reading, found, v)
            kernels.scale_(x, torch.zeros(2))
            kernels.scale_two_(x, torch.zeros_like(x), torch.zeros(()))
            kernels.zero_ignored(x, reading._replace(label=torch.zeros(2, dtype=torch.int64)))
            if v.K == 1:
                launch_pairs(x, reading, v.everything)
        with mock.patch.object(config, "processors", return_value=PROCESSORS):
            if v in (Variant(BF16), Variant(FP32, 50257, split=True)):
                kernels.topk(x, 64, 1.0, None)
                kernels.sampled(x, torch.rand(2, 50, dtype=torch.float64), Sampling(1.0, 1.0, None))
            if v == Variant(BF16):
                launch_sums(x)
            if v in CONTRASTIVE:
                launch_contrastive(v.dtype, **CONTRASTIVE[v])
            if v in (Variant(BF16), Variant(FP32, softcap=30.0)):
                launch_table(v.dtype)
            if v in ROW_GEMM:
                launch_row_gemm(x, ROW_GEMM[v])
        if v in (Variant(BF16), Variant(BF16, 50257, K=8, softcap=30.0, everything=True)):
            launch_shard(x, reading)
        if v in NARROW:
            for width in NARROW[v]:
                launch_narrow(v, width)
    return launches


def launch_gradients(x, reading: Reading, found, v: Variant) -> None:
    """Launches the kernels of values, coefficients and gradients, in new memory and in place."""
    row, one, full = torch.zeros(2), torch.zeros(()), v.everything
    if v.K == 1:
        value, coefficients = kernels.cross_entropy(
            found, reading, 0.1 if full else 0.0, 1e-4 if full else 0.0
        )
        mass = kernels.label_mass(reading, torch.float32) if full else None
        kernels.label_coefficients(reading, torch.float32)
        kernels.weighted_nll(value, reading)
        kernels.share(reading, mass, len(row), x)
        _, factor = kernels.reduce(value, reading, row if full else None, mass, mean=True)
        label = Coefficients(coefficients.rows, ("a", "label"))
        for into in (x, torch.empty_like(x)):
            kernels.one_pass(x, reading, label, one, into)
        if not full:
            kernels.one_pass(x, reading, label, None, torch.empty(x.shape), mean=True)
            hidden = torch.zeros(2, 4096, dtype=x.dtype)
            kernels.plan_mean(2, x.stride(0), reading, label, hidden, True)(x, row.int(), hidden)
        has = ("a", "b", "label", "total") if full else ("a", "label")
        coefficients = Coefficients(coefficients.rows, has)
    else:
        teacher = torch.zeros(2, v.K)
        given = Slots(teacher, teacher > 0, None, row, "jsd", "tail", 0.5, 1.0, float(full))
        kernels.slots(teacher, reading, given, row, row if full else None)
        kernels.slots(teacher, reading, given._replace(support="gathered", ce_weight=0.0))
        picked = kernels.gather(x, reading)
        kernels.gather_gradient(x, reading, picked, picked, one)
        factor = None
        has = ("a", "b", "total", "logprob_t1") if full else ("a", "a_ids")
        coefficients = Coefficients(torch.zeros(2, COEFFICIENTS), has, teacher)
        if full:
            beside = coefficients._replace(has=("a", "a_ids", "logprob_t1"))
            kernels.gradient(x, reading, found.state, beside, one)
    for into in (None, x):
        kernels.gradient(x, reading, found.state, coefficients, one, factor, into)
    launch_coefficients(x, reading, found.state, v)
    if v in (Variant(BF16), Variant(FP32), Variant(FP32, 50257), Variant(BF16, K=512)):
        launch_of_a_head(x, reading, found, coefficients, one, v)


def launch_coefficients(x, reading: Reading, state: torch.Tensor, v: Variant) -> None:
    """Launches kernels with gradients of statistics: one, three, or five gradients."""
    row, at_ids = torch.zeros(2), torch.zeros(2) if v.K == 1 else torch.zeros(2, v.K)
    scores = {"logprob": at_ids, "entropy": row[:1].expand(2), "lse": row}
    for gradients in ({"logprob": at_ids}, {**scores, "picked": at_ids, "total": row}):
        kernels.coefficients(reading._replace(wants=tuple(gradients)), state, gradients)
    kernels.stats_gradient(x, reading, state, scores, row)


def launch_of_a_head(x, reading: Reading, found, coefficients, one, v: Variant) -> None:
    """Launches kernels on blocks of columns, and on fp32 logits with a 16-bit gradient."""
    if v.dtype == BF16:
        reading = reading._replace(vocab=4 * v.V)
        several = [kernels.partial(x, reading, 1024)] * 2
        kernels.finish(kernels.merge(several, reading), reading)
        kernels.gradient(x, reading, found.state, coefficients, one, None, x, 1024)
    else:
        into = torch.empty(2, -(-v.V // 8) * 8, dtype=BF16)[:, : v.V]
        kernels.gradient(x, reading, found.state, coefficients, one, None, into)
        if v.K == 1:
            coefficients = Coefficients(coefficients.rows, ("a", "label"))
            kernels.one_pass(x, reading, coefficients, one, into)


TWICE = [kind for kind in PAIRS if PAIRS[kind].twice]


def launch_pairs(x: torch.Tensor, reading: Reading, full: bool) -> None:
    """Launches losses against a dense teacher, and JSD and TVD with several programs per row."""
    state, row = torch.zeros(2, PAIR_STATE), torch.zeros(2)
    reading = reading._replace(ignore_index=None)
    if full:
        reading = reading._replace(label=row.to(torch.int8), ignore_index=0)
    for kind in PAIRS:
        pair = Pair(x, kind, 0.5)
        kernels.pair_read(x, reading, pair)
        kernels.pair_gradient(x, reading, pair, state, row, row[0] if full else None)
    with mock.patch.object(pair_fwd, "may_wait", return_value=True):
        for kind in TWICE:
            kernels.pair_read(x, reading, Pair(x, kind, 0.5))


def launch_shard(x: torch.Tensor, reading: Reading) -> None:
    """Launches the kernels for a shard of the columns."""
    wants = tuple({*reading.wants} - {"tail", "rank"})
    part = reading._replace(vocab=2 * x.shape[1], wants=wants)
    kernels.finish(kernels.partial(x, part, 100), part)
    kernels.above(x, part, torch.zeros(2))
    whole = torch.zeros(2, PAIR_STATE)
    for kind in PAIRS:
        kernels.pair_partial(x, reading, Pair(x, kind, 0.5))
        sums = kernels.pair_sums(x, reading, Pair(x, kind, 0.5), whole) if kind in TWICE else None
        kernels.pair_finish(whole, sums, reading, Pair(x, kind, 0.5))


# The widths of narrow heads. A row of 72 numbers is 16-byte aligned and not a power of two.
NARROW = {
    Variant(BF16): (64, 128, 256),
    Variant(FP32, softcap=30.0): (64,),
    Variant(FP16, 50257, everything=True): (128,),
    Variant(BF16, 50257, K=8, softcap=30.0, everything=True): (72, 100, 256),
}


def launch_narrow(v: Variant, width: int) -> None:
    """Launches the kernels of a narrow head, with several splits of the vocabulary."""
    N, full = 256, v.everything
    reading = reading_of(v)._replace(
        label=torch.zeros(N, dtype=torch.int64),
        ids=None if v.K == 1 else torch.zeros(N, v.K, dtype=torch.int64),
        row_temperature=torch.ones(N) if full else None,
        wants=tuple(name for name in reading_of(v).wants if name not in ("tail", "rank")),
    )
    hidden, weight = torch.zeros(N, width, dtype=v.dtype), torch.zeros(v.V, width, dtype=v.dtype)
    bias, d_bias = (torch.zeros(v.V), torch.zeros(v.V)) if full else (None, None)
    has = ("a", "b", "total", *(("label",) if v.K == 1 else ("logprob_t1",)))
    coefficients = Coefficients(
        torch.zeros(N, COEFFICIENTS), has if full else ("a", "label"),
        None if v.K == 1 else torch.zeros(N, v.K),
    )  # fmt: skip
    state = torch.zeros(N, STATE)
    with mock.patch.object(config, "processors", return_value=PROCESSORS):
        expected = None
        if not full and v.K == 1:  # a cross-entropy
            only_nll = reading._replace(wants=("nll",), softcap=None)
            _, expected = kernels.narrow_partial(hidden, weight, bias, only_nll, True)
        kernels.narrow_partial(hidden, weight, bias, reading)
        for sums in (None,) if expected is None else (None, expected):
            kernels.narrow_gradients(
                hidden, weight, bias, reading, state, coefficients, torch.zeros(()), None,
                torch.empty_like(hidden), torch.empty_like(weight), d_bias, False, sums,
            )  # fmt: skip


# The variants of contrastive losses. Sizes of 512 are whole tiles.
CONTRASTIVE = {
    Variant(BF16): {"size": 512},
    Variant(FP32, softcap=30.0): {"size": 512},
    Variant(FP16, 50257, everything=True): {"size": 501, "everything": True},
    Variant(BF16, 50257, K=8, softcap=30.0, everything=True): {"size": 500, "everything": True},
}

# The variants to compile, and whether the logits are fp32 although the hidden states are not.
ROW_GEMM = {
    Variant(BF16): False,
    Variant(FP32, softcap=30.0): False,
    Variant(FP16, 50257, everything=True): True,
}


def profile_of(source, kernel, bound) -> dict:
    """The name and the bytes that a profiler shows for a launch."""
    return source.fn.launch_metadata((1, 1, 1), kernel.metadata, bound)


class Driver:
    """A Triton driver that reports the GPU for which kernels are compiled."""

    def __init__(self, target: GPUTarget):
        self.get_current_target = lambda: target


def main(target: str, everything: bool) -> None:
    triton.runtime.driver.set_active(Driver(TARGETS[target]))
    seen, plain = set(), Variant(BF16)
    for variant in variants() if everything else main_variants():
        for source, options, bound in launches_of(variant):
            form = (source.hash(), *sorted(options.items()))
            if everything or (target == "cuda:90" and variant == plain):
                key = form
            else:
                key = (source.name, variant) if target == "cuda:90" else source.name
            if not seen.isdisjoint((form, key)):
                continue
            seen |= {form, key}
            kernel = triton.compile(source, target=TARGETS[target], options=options)
            row = {"target": target, "kernel": f"{source.name} {variant}"}
            row |= {"compiled": kernel.metadata.name, "profile": profile_of(source, kernel, bound)}
            if target.startswith("cuda"):
                row |= resources(kernel.asm)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--all" in sys.argv)
