"""The structs that losses and backends (`kernels` and `eager`) pass to each other.

A `Reading` lists the statistics to compute for each row, and `Statistics` holds their values.
`Coefficients` are those of the backward formula, which all losses over row statistics share:

    dz_i = p_i (a + b log p_i) + g_label [i = label] + Σ_k g_k [i = id_k] + g_c v_i

Here, z are the logits after softcap and temperature, p = softmax(z), and v are the class weights.
The gradient of y = z · temperature is dz / temperature, times the upstream gradient. A loss that
uses log p of the label at temperature 1 adds d ([i = label] - p1_i) to it, with p1 = softmax(y).
"""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")

# How a tensor is sliced together with the logits; `TENSORS` of a struct says so for each tensor.
PER_ROW = "per row"  # shape (...) or (..., K), sliced together with the rows of the logits
PER_CLASS = "per class"  # shape (V,), never sliced, not even for a shard of the vocabulary
TEACHER = "teacher"  # shape (..., V), sliced together with the rows and the columns of the logits

# The row statistics: fp32 (fp64 for fp64 logits), one per row if no other shape or dtype is given.
STATISTICS = (
    "lse",  # log Σ e^z
    "picked",  # z at the ids, (..., K), or z at the label if there are no ids
    "logprob",  # log p at the ids, (..., K), or log p of the label if there are no ids
    "nll",  # -log p of the label
    "entropy",  # -Σ p log p
    "total",  # Σ v z, where v are the class weights
    "log_total",  # Σ v log p
    "argmax",  # int64, the lowest column that holds the max; -1 for ignored rows
    "rank",  # int64, the number of logits above the logit of the label or first id
    "tail",  # log of the softmax mass outside the ids
    "logprob_t1",  # log p of the label at temperature 1
)


class Reading(NamedTuple):
    """The statistics to compute for each row x of logits, and the options of the softmax.

    The softmax is over z = softcap · tanh(x / softcap) / temperature.

    A row whose `label` is ignore_index is ignored: it is not read, its statistics and gradient are
    0, and its argmax and rank are -1. Labels are class ids, or a mask of rows (0 and 1) with
    ignore_index=0.
    """

    vocab: int  # V, the size of the whole vocabulary, even if the logits are only a shard
    label: Tensor | None = None  # (...), int8, int32 or int64
    ids: Tensor | None = None  # (..., K), int32 or int64; NO_ID marks a position without an id
    class_weight: Tensor | None = None  # (V,), the weights v in "total" and "log_total"
    row_temperature: Tensor | None = None  # (...), one temperature per row; replaces `temperature`
    temperature: float | None = 1.0  # None if row_temperature is given
    softcap: float | None = None
    ignore_index: int | None = None
    wants: tuple[str, ...] = ()  # the requested names from STATISTICS
    invariant: bool = False  # the same bits in every batch (core/invariant.py)

    TENSORS = (
        ("label", PER_ROW),
        ("ids", PER_ROW),
        ("class_weight", PER_CLASS),
        ("row_temperature", PER_ROW),
    )

    @property
    def at_temperature_1(self) -> bool:
        return self.temperature == 1

    @property
    def ids_per_row(self) -> int:
        return 0 if self.ids is None else self.ids.shape[-1]

    @property
    def sums(self) -> "Sums":
        return sums_of(self.wants, self.at_temperature_1)

    def fold_scale(self, scale: float, softcap: float | None) -> "Reading":
        """The `Reading` of scale · x with this softcap of scale · x."""
        if scale == 1:
            return self._replace(softcap=softcap)
        by_row = self.row_temperature
        return self._replace(
            row_temperature=None if by_row is None else by_row / scale,
            temperature=None if self.temperature is None else self.temperature / scale,
            softcap=None if softcap is None else softcap / scale,
        )

    @property
    def any_temperature(self) -> "float | Tensor | None":
        """The temperature, as one number or one per row. None means 1."""
        if self.temperature is None:
            return self.row_temperature
        return None if self.temperature == 1 else self.temperature

    def squared(self, dtype: torch.dtype) -> tuple[Tensor | None, float]:
        """The squared temperature as a product: a tensor per row in `dtype` (or None), a number."""
        if self.row_temperature is not None:
            return self.row_temperature.to(dtype).square(), 1.0
        assert self.temperature is not None
        return None, self.temperature**2

    def ignored_rows(self) -> Tensor | None:
        return None if self.ignore_index is None else self.label == self.ignore_index


class RowStats(NamedTuple):
    """The statistics of each row, in fp32 (fp64 for fp64 logits).

    All statistics except argmax and rank are differentiable. A statistic that was not requested is
    None. Here, z are the logits after softcap and temperature, and p = softmax(z). If a large
    constant is added to all logits, `logprob` stays exact, but `picked - lse` does not.
    """

    lse: Tensor | None = None  # (...)      log Σ e^z
    picked: Tensor | None = None  # like ids  z[ids]
    entropy: Tensor | None = None  # (...)    -Σ p log p, in nats
    total: Tensor | None = None  # (...)      Σ z
    argmax: Tensor | None = None  # (...)     int64, the lowest column that holds the max
    logprob: Tensor | None = None  # like ids  log p[ids]
    rank: Tensor | None = None  # (...)       int64, number of logits above the first id's logit


class Statistics(NamedTuple):
    """The statistics that a `Reading` requests, and None for the others."""

    state: Tensor  # (N, STATE), what backward reads: the fields SHIFT, ..., REPEATS below
    lse: Tensor | None = None
    picked: Tensor | None = None
    logprob: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None
    total: Tensor | None = None
    log_total: Tensor | None = None
    argmax: Tensor | None = None
    rank: Tensor | None = None
    tail: Tensor | None = None
    logprob_t1: Tensor | None = None


# Fields of Statistics.state. One that names a statistic is written only if this is requested.
SHIFT = 0  # max y, where y = z · temperature; 0 if the max is infinite
LOG_S = 1  # log Σ e^((y - shift) / temperature)
LOG_S1 = 2  # log Σ e^(y - shift); only with "logprob_t1"
ENTROPY = 3  # the entropy of the row; only with "entropy"
TAIL = 4  # the log of the softmax mass outside the ids; only with "tail"
REPEATS = 5  # 1 if two slots of the row hold the same id, otherwise 0; only with "tail"
STATE = 6


class Partials(NamedTuple):
    """Partial statistics of rows, for several disjoint sets of columns, merged in any order.

    A set is a split (the columns that one program reads), a block of columns that a head computes
    at once, or the shard of one rank. In an empty set, the max M is -inf, and all sums are 0.
    """

    state: Tensor  # (N, number of sets, part_width); the fields M, ..., REF are listed below
    picked: Tensor | None = None  # (N, K), y at the ids; 0 for an id outside these columns


# Fields of Partials.state, the most needed first; m is the max of y over the columns, d is y - m.
# The state ends after the last field that is needed. An earlier one that is not needed is allocated
# but undefined, and ranks send it too, so that all gathered tensors have the same layout.
M = 0  # max y
S = 1  # Σ e^(d / temperature)
Y_LABEL = 2  # y at the label; 0 if the label is outside these columns
W = 3  # Σ d e^(d / temperature); needed by "entropy"
ARG = 4  # the lowest column whose y is m, stored as bits (see as_bits); needed by "argmax"
S1 = 5  # Σ e^d; needed by "logprob_t1" at a temperature other than 1
C = 6  # Σ v (y - ref); needed by "total" and "log_total"
N = 7  # Σ v; needed by "total" and "log_total"
REF = 8  # `ref`, a number close to the mean of y, subtracted in C to avoid cancellation
PART = 9


class Sums(NamedTuple):
    """Which optional fields of Partials.state are needed. M, S and Y_LABEL always are."""

    entropy: bool  # the field W
    argmax: bool  # the field ARG
    second: bool  # the field S1
    total: bool  # the fields C, N and REF


def sums_of(wants: tuple[str, ...], at_temperature_1: bool) -> Sums:
    total = "total" in wants or "log_total" in wants
    second = "logprob_t1" in wants and not at_temperature_1
    return Sums("entropy" in wants, "argmax" in wants, second, total)


def part_width(entropy: bool, argmax: bool, second: bool, total: bool) -> int:
    """The number of fields of Partials.state."""
    if total:
        return PART
    if second:
        return S1 + 1
    return ARG + 1 if argmax else W + 1 if entropy else Y_LABEL + 1


NOWHERE = 2**31 - 1  # the value of ARG for an empty set of columns


def as_bits(whole: Tensor, dtype: torch.dtype) -> Tensor:
    return whole.to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def of_bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int64)


class Coefficients(NamedTuple):
    """Coefficients of the formula at the top of this file, for an upstream gradient of 1."""

    rows: Tensor | None  # (N, COEFFICIENTS), or (1, COEFFICIENTS) if equal for all rows
    has: tuple[str, ...]  # the names from FIELDS that the loss uses
    ids: Tensor | None = None  # g_k, (N, K) or (..., K)


# Fields of Coefficients.rows.
A = 0  # a
B = 1  # b
G_LABEL = 2  # g_label
G_TOTAL = 3  # g_c
# replaces `a` in the columns of the ids; needs the statistic "tail", and no coefficient B
A_IDS = 4
D_LOGPROB_T1 = 5  # d, the gradient of logprob_t1
COEFFICIENTS = 6
FIELDS = ("a", "b", "label", "total", "a_ids", "logprob_t1")

# Outside the ids, the gradient of the tail has the term p_i / e^tail. For a tiny e^tail, p_i
# underflows to 0 in fp32, and 1 / e^tail overflows. So a loss with "a_ids" computes p_i · e^-lift
# times the field A, which holds a · e^lift, with lift = min(tail - LEAST_TAIL, 0), or 0 if the tail
# is -inf.
LEAST_TAIL = -32.0

NO_ID = -(2**31)  # the id of a masked slot; a masked slot is not read and has no gradient


class Total(NamedTuple):
    """A mean or sum of cross-entropies, which one launch can compute with its gradient."""

    mean: bool
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Slots(NamedTuple):
    """A sparse teacher with K ids (slots) per row, and the options of a loss against it."""

    teacher: Tensor  # (..., K), log p of the teacher at the ids
    mask: Tensor | None  # (..., K), bool, True for unmasked slots
    tail: Tensor | None  # (...), log of the teacher's mass outside the slots; None: log(1 - Σ p)
    row_weight: Tensor | None  # (...), multiplies each row's divergence
    divergence: str  # "forward_kl", "reverse_kl", "jsd" or "tvd"
    # How probabilities are normalised over the slots (kernels/at_ids/slot_divergence.py):
    # "truncate", "renorm_teacher", "renorm" or "tail". For logits that are already gathered at the
    # ids, "gathered" is a softmax over all K slots, and "gathered_renorm" over the unmasked ones.
    support: str
    beta: float  # β of "jsd"
    kd_weight: float  # multiplies the divergence
    ce_weight: float  # multiplies -log p of the label; 0 without a label

    TENSORS = (
        ("teacher", PER_ROW),
        ("mask", PER_ROW),
        ("tail", PER_ROW),
        ("row_weight", PER_ROW),
    )


RENORM_TEACHER = ("renorm_teacher", "renorm")  # divide the teacher's p by its sum over the slots
RENORM_STUDENT = ("renorm", "gathered", "gathered_renorm")  # divide the student's q by its sum

# Rounding p to 16 bits changes 1 - Σ p by up to 2^-6, even without mass outside the slots.
LOG_ROUNDING = math.log(2.0**-6)


def at_the_ends(divergence: str, beta: float) -> tuple[str, float | None]:
    """The divergence to compute and its β (None if not JSD): at β = 0 and 1, JSD is a KL."""
    if divergence == "jsd":
        return {0.0: ("forward_kl", None), 1.0: ("reverse_kl", None)}.get(beta, (divergence, beta))
    return divergence, None


class Pair(NamedTuple):
    """A dense teacher, and the options of a loss against this teacher."""

    # The teacher's logits (..., V), or probabilities if `kind` is "soft": a Tensor, a ScaledHead,
    # or, beside a sharded student, a `Shard`, which parallel/shard.py replaces by its columns.
    teacher: Any
    kind: str  # a loss of eager/pair_losses.py
    blend: float  # α for the skewed kinds, β for "jsd", the label smoothing for "soft"

    TENSORS = (("teacher", TEACHER),)


# Per row: shift and sum of exponentials of the student, then of the teacher, and the `mean` that
# the gradient of the loss needs (eager/pair_losses.py).
PAIR_STATE = 5
PAIR_SUMS = 3  # sums per row of a loss whose terms need the normalisers: a second pass

# The dtype of statistics and losses for each dtype of logits.
PRECISION = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class made_once(dict, Generic[T]):
    """A cache of small constants. cache[key] is make(key), or make(*key) if the key is a tuple.

    Tensors are created outside of inference mode, because autograd cannot save inference tensors.
    Nothing is cached while a CUDA graph is captured, or under a mode, whose tensors can be fake.
    """

    def __init__(self, make: Callable[..., T]):
        super().__init__()
        self.make = make

    def __missing__(self, key) -> T:
        with torch.inference_mode(False):
            value = self.make(*key) if isinstance(key, tuple) else self.make(key)
        if not (is_capturing() or torch._C._len_torch_dispatch_stack()):
            self[key] = value
        return value

    def beside(self, t: Tensor, *key: Any) -> T:
        """Returns cache[key] for an operation with t. A fake t needs a constant that is fake."""
        real = has_values(t) and not torch._C._len_torch_dispatch_stack()
        return self[key] if real else self.make(*key)


def is_capturing() -> bool:  # a CUDA graph
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_values(t: Tensor) -> bool:
    """Whether t has values to read. Fake tensors and tensors on "meta" have none."""
    return t.__class__ is not FakeTensor and not t.is_meta
