"""The structs that pass between the losses and the two backends, `kernels` and `eager`.

A `Reading` says which numbers are read from each row of logits, `Statistics` holds those numbers,
and `Coefficients` are the factors of the one backward formula that serves every loss:

    dz_i = p_i (a + b log p_i) + g_label [i = label] + Σ_k g_k [i = id_k] + g_c v_i

with p = softmax(z) and v the class weights. The log-probability of the label at temperature 1 adds
d ([i = label] - p1_i) to dz_i · temperature, with p1 = softmax(z · temperature). The whole gradient
is multiplied by an upstream gradient.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# How a tensor beside the logits belongs to them. Each struct below declares its tensors once.
PER_ROW = "per row"  # (...) or (..., K): cut when rows are
PER_CLASS = "per class"  # (V,): the whole vocabulary, also beside some columns
TEACHER = "teacher"  # (..., V): logits or probabilities, cut when rows or columns are

# The statistics of a row. Each is fp32 (fp64 for fp64) and (...), except where (..., K) stands.
STATISTICS = (
    "lse",  # log Σ e^z
    "picked",  # z at the ids, (..., K); without ids, z at the label
    "logprob",  # log p at the same places
    "nll",  # -log p of the label
    "entropy",  # -Σ p log p
    "total",  # Σ v z, v the class weights
    "log_total",  # Σ v log p
    "argmax",  # int64, the lowest of equals; -1 where the row is ignored
    "tail",  # log of the mass outside the ids
    "logprob_t1",  # log p of the label at temperature 1
)


class Reading(NamedTuple):
    """Which numbers are read from each row x of logits.

    z = softcap · tanh(x / softcap) / temperature

    The label is one integer per row: a class, or a mask (0 is then ignore_index). A row whose label
    is ignore_index is not read: its statistics are 0 (argmax -1), and so is its gradient.
    """

    vocab: int  # V, also where a rank or a block has only some columns
    label: Tensor | None = None  # (...), int8, int32 or int64
    ids: Tensor | None = None  # (..., K), int32 or int64; NO_ID in an empty slot
    class_weight: Tensor | None = None  # (V,), of the totals
    row_temperature: Tensor | None = None  # (...), instead of temperature
    temperature: float = 1.0
    softcap: float | None = None
    ignore_index: int | None = None
    wants: tuple[str, ...] = ()  # names of STATISTICS

    TENSORS = (
        ("label", PER_ROW),
        ("ids", PER_ROW),
        ("class_weight", PER_CLASS),
        ("row_temperature", PER_ROW),
    )

    @property
    def at_temperature_1(self) -> bool:
        return self.row_temperature is None and self.temperature == 1

    @property
    def sums(self) -> "Sums":
        return sums_of(self.wants, self.at_temperature_1)

    def fold_scale(self, scale: float, softcap: float | None) -> "Reading":
        """The same reading of logits that are not yet multiplied by `scale`, with this softcap."""
        if scale == 1:
            return self._replace(softcap=softcap)
        by_row = self.row_temperature
        return self._replace(
            row_temperature=None if by_row is None else by_row / scale,
            temperature=self.temperature / scale,
            softcap=None if softcap is None else softcap / scale,
        )

    @property
    def any_temperature(self) -> "float | Tensor | None":
        """One number, or one per row, or None for 1."""
        if self.row_temperature is not None:
            return self.row_temperature
        return None if self.temperature == 1 else self.temperature

    def squared(self, dtype: torch.dtype) -> tuple[Tensor | None, float]:
        """T² as (one number per row or None, one number for all rows), squared in this dtype."""
        if self.row_temperature is not None:
            return self.row_temperature.to(dtype).square(), 1.0
        return None, self.temperature**2

    def ignored_rows(self) -> Tensor | None:
        """(...) bool, True where a row is ignored; None where none can be."""
        return None if self.ignore_index is None else self.label == self.ignore_index


class RowStats(NamedTuple):
    """The statistics of each row. fp32 (fp64 for fp64), differentiable except argmax.

    A statistic that was not requested is None. `logprob` is exact under any common offset of the
    logits; `picked - lse` is not.
    """

    lse: Tensor | None = None  # (...)      log Σ e^z
    picked: Tensor | None = None  # like ids  z[ids]
    entropy: Tensor | None = None  # (...)    -Σ p log p, in nats
    total: Tensor | None = None  # (...)      Σ z
    argmax: Tensor | None = None  # (...)     int64, the lowest of equals
    logprob: Tensor | None = None  # like ids  log p[ids]


class Statistics(NamedTuple):
    """The numbers of a Reading; None where not wanted. The gradient reads `state` again."""

    state: Tensor  # (N, STATE), its fields below
    lse: Tensor | None = None
    picked: Tensor | None = None
    logprob: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None
    total: Tensor | None = None
    log_total: Tensor | None = None
    argmax: Tensor | None = None
    tail: Tensor | None = None
    logprob_t1: Tensor | None = None


# Fields of Statistics.state. A field that belongs to a statistic is written if that is wanted.
SHIFT = 0  # max y, y = z · temperature; 0 where that is infinite
LOG_S = 1  # log Σ e^((y - shift) / temperature)
LOG_S1 = 2  # log Σ e^(y - shift), with "logprob_t1"
ENTROPY = 3  # with "entropy"
TAIL = 4  # with "tail"
REPEATS = 5  # 1 where an id is in two slots, with "tail"
STATE = 6


class Partials(NamedTuple):
    """Statistics of disjoint sets of columns, before they are merged: blocks, splits or ranks.

    Parts merge in any order. The part of no columns is (-inf, 0, 0, ...).
    """

    state: Tensor  # (N, parts, part_width), its fields below
    picked: Tensor | None = None  # (N, K), y at the ids; 0 for an id outside these columns


# Fields of Partials.state, with y = z · temperature and d = y - m. The fields that most losses want
# come first. Fields behind the last wanted one do not exist; an unwanted field before it is
# undefined.
M = 0  # max y
S = 1  # Σ e^(d / temperature)
Y_LABEL = 2  # y at the label; 0 where the label is outside these columns
W = 3  # Σ d e^(d / temperature), with "entropy"
ARG = 4  # the lowest column that reaches m, as bits (as_bits), with "argmax"
S1 = 5  # Σ e^d, with "logprob_t1" at another temperature than 1
C = 6  # Σ v (y - ref), with "total" or "log_total"
N = 7  # Σ v, likewise
REF = 8  # a number near the mean of y, so that C does not cancel
PART = 9


class Sums(NamedTuple):
    """Which sums a part holds besides M, S and Y_LABEL."""

    entropy: bool
    argmax: bool
    second: bool
    total: bool


def sums_of(wants: tuple[str, ...], at_temperature_1: bool) -> Sums:
    total = "total" in wants or "log_total" in wants
    second = "logprob_t1" in wants and not at_temperature_1
    return Sums("entropy" in wants, "argmax" in wants, second, total)


def part_width(entropy: bool, argmax: bool, second: bool, total: bool) -> int:
    """The number of fields of a part with these Sums.

    Unwanted fields before the last wanted one are undefined. Ranks send them too, so that gathered
    parts need no repacking.
    """
    if total:
        return PART
    if second:
        return S1 + 1
    return ARG + 1 if argmax else W + 1 if entropy else Y_LABEL + 1


NOWHERE = 2**31 - 1  # ARG of a part without columns


def as_bits(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of 32-bit integers as numbers of this dtype: for storage, not for arithmetic."""
    return whole.to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def of_bits(t: Tensor) -> Tensor:
    """The integers that as_bits stored."""
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int64)


class Coefficients(NamedTuple):
    """The factors of the one backward formula, at an upstream gradient of 1."""

    rows: Tensor | None  # (N, COEFFICIENTS), or (1, COEFFICIENTS) if all rows share them
    has: tuple[str, ...]  # the names of the FIELDS in use
    ids: Tensor | None = None  # g_k, (N, K) or (..., K)


# Fields of Coefficients.rows.
A = 0  # a
B = 1  # b
G_LABEL = 2  # g_label
G_TOTAL = 3  # g_c
A_IDS = 4  # `a` for columns among the ids, for losses with a tail; never together with B
D_LOGPROB_T1 = 5  # d, the gradient of logprob_t1
COEFFICIENTS = 6
FIELDS = ("a", "b", "label", "total", "a_ids", "logprob_t1")

# The gradient of the tail is p_i / e^tail. For a small tail, p_i is 0 in fp32 and 1 / e^tail is
# infinite. So with "a_ids" the columns outside the ids use p_i e^-lift instead of p_i, and their
# `a` is multiplied by e^lift. lift = min(tail - LEAST_TAIL, 0), or 0 where no column is outside.
LEAST_TAIL = -32.0

NO_ID = -(2**31)  # marks an empty slot: not read, no gradient, not a bad id


class Slots(NamedTuple):
    """A teacher known on K slots per row, and how the student is compared with it."""

    teacher: Tensor  # (..., K), log p
    mask: Tensor | None  # (..., K), bool, True for slots that count
    tail: Tensor | None  # (...), log of the teacher's mass outside the slots; None is 1 - Σ p
    row_weight: Tensor | None  # (...), of the divergence
    divergence: str  # "forward_kl", "reverse_kl", "jsd" or "tvd"
    # "truncate", "renorm_teacher", "renorm" or "tail"; for logits that are already gathered,
    # "gathered" (softmax over all slots) or "gathered_renorm" (over the slots that count)
    support: str
    beta: float  # of "jsd"
    kd_weight: float  # of the divergence
    ce_weight: float  # of -log p of the label; 0 without one

    TENSORS = (
        ("teacher", PER_ROW),
        ("mask", PER_ROW),
        ("tail", PER_ROW),
        ("row_weight", PER_ROW),
    )


RENORM_TEACHER = ("renorm_teacher", "renorm")  # supports that divide p by its sum over the slots
RENORM_STUDENT = ("renorm", "gathered", "gathered_renorm")  # supports that divide q by its sum

# log of the mass that rounding to 16 bits may leave in a tail that is empty.
LOG_ROUNDING = math.log(2.0**-6)


def at_the_ends(divergence: str, beta: float) -> tuple[str, float | None]:
    """The divergence to compute, and its β: JSD is forward KL at β = 0 and reverse KL at β = 1.

    Only JSD has a β.
    """
    if divergence == "jsd":
        return {0.0: ("forward_kl", None), 1.0: ("reverse_kl", None)}.get(beta, (divergence, beta))
    return divergence, None


class Pair(NamedTuple):
    """A teacher of whole rows, and how the student is compared with it."""

    teacher: Any  # (..., V), a Tensor or a ScaledHead: logits, or probabilities for "soft"
    kind: str  # "forward", "reverse", "jsd" or "soft"
    blend: float  # β of "jsd", the label smoothing of "soft"

    TENSORS = (("teacher", TEACHER),)


PAIR_STATE = 5  # numbers saved per row: shift and s of student and teacher, and a mean

# The dtype of statistics and losses, by the dtype of the logits.
PRECISION = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class made_once(dict, Generic[T]):
    """A cache of small constant tensors: cache[key] is make(key), or make(*key) for a tuple.

    Entries are created outside of inference mode, because autograd cannot save inference tensors.
    An entry created while a CUDA graph is captured belongs to that graph and is not cached.
    """

    def __init__(self, make: Callable[..., T]):
        super().__init__()
        self.make = make

    def __missing__(self, key) -> T:
        with torch.inference_mode(False):
            value = self.make(*key) if isinstance(key, tuple) else self.make(key)
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self[key] = value
        return value
