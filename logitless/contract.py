"""The structs that pass between the losses and the two backends, `kernels` and `eager`.

A `Reading` says what is read of each row of logits, `Statistics` are what was found, and
`Coefficients` are what the one backward multiplies:

    dz_i = p_i (a + b log p_i) + g_label [i = label] + Σ_k g_k [i = id_k] + g_c v_i

with p = softmax(z) and v the class weights. A label at temperature 1 adds d ([i = label] - p1_i) to
dz_i · temperature, p1 = softmax(z · temperature). All of it is multiplied by an upstream gradient.
"""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# What may be asked of a row. Each is fp32 (fp64 for fp64), (...) but where it says (..., K).
STATISTICS = (
    "lse",  # log Σ e^z
    "picked",  # z of the ids, (..., K); without ids, z of the label
    "logprob",  # log p of the same
    "nll",  # -log p of the label
    "entropy",  # -Σ p log p
    "total",  # Σ v z, v the class weights
    "log_total",  # Σ v log p
    "argmax",  # int64, the lowest of equals; -1 where the row is ignored
    "tail",  # log of the mass outside the ids
    "logprob_t1",  # log p of the label at temperature 1
)


class Reading(NamedTuple):
    """What is read of each row x of logits, z = softcap · tanh(x / softcap) / temperature.

    The label is one integer a row: its label, or a mask. A row whose label is ignore_index is not
    read: its statistics are 0 (argmax -1), and so is its gradient.
    """

    vocab: int  # V, also where a rank or a block has only some columns
    label: Tensor | None = None  # (...), int8, int32 or int64
    ids: Tensor | None = None  # (..., K), int32 or int64; NO_ID in a slot that holds none
    class_weight: Tensor | None = None  # (V,), of the totals
    row_temperature: Tensor | None = None  # (...), instead of temperature
    temperature: float = 1.0
    softcap: float | None = None
    ignore_index: int | None = None
    wants: tuple[str, ...] = ()  # of STATISTICS

    @property
    def at_temperature_1(self) -> bool:
        return self.row_temperature is None and self.temperature == 1

    @property
    def sums(self) -> "Sums":
        return sums_of(self.wants, self.at_temperature_1)

    def of_scaled(self, scale: float, softcap: float | None) -> "Reading":
        """With this softcap, of logits that are not yet multiplied by `scale`."""
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
        """A number, one a row, or None for 1."""
        if self.row_temperature is not None:
            return self.row_temperature
        return None if self.temperature == 1 else self.temperature

    def squared(self, dtype: torch.dtype) -> tuple[Tensor | None, float]:
        """T² as (one number a row or None, one number for all); squared in this dtype."""
        if self.row_temperature is not None:
            return self.row_temperature.to(dtype).square(), 1.0
        return None, self.temperature**2


class RowStats(NamedTuple):
    """What a loss may know about a row. fp32 (fp64 for fp64), differentiable but for argmax.

    What was not asked for is None. `logprob` is exact under any common offset of the logits, which
    `picked - lse` is not.
    """

    lse: Tensor | None = None  # (...)      log Σ e^z
    picked: Tensor | None = None  # like ids  z[ids]
    entropy: Tensor | None = None  # (...)    -Σ p log p, in nats
    total: Tensor | None = None  # (...)      Σ z
    argmax: Tensor | None = None  # (...)     int64, the lowest of equals
    logprob: Tensor | None = None  # like ids  log p[ids]


class Statistics(NamedTuple):
    """What was found, None if not wanted. `state` is what the gradient reads again."""

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


# Fields of Statistics.state. A field that belongs to a statistic is written where that is wanted.
SHIFT = 0  # max y, y = z · temperature; 0 where that is infinite
LOG_S = 1  # log Σ e^((y - shift) / temperature)
LOG_S1 = 2  # log Σ e^(y - shift), with "logprob_t1"
ENTROPY = 3  # with "entropy"
TAIL = 4  # with "tail"
REPEATS = 5  # 1 where an id is in two slots, with "tail"
STATE = 6


class Partials(NamedTuple):
    """Statistics of parts of each row, before they are merged: blocks, splits or ranks.

    Parts merge in any order; a part of no columns is (-inf, 0, 0, ...).
    """

    state: Tensor  # (N, parts, part_width), its fields below
    picked: Tensor | None = None  # (N, K), y of the ids; 0 of one that no part here owns: they add


# Fields of Partials.state, of y = z · temperature and d = y - m. A field that belongs to a
# statistic, or to a label, is written where that is wanted. What most losses want comes first, and
# the fields behind the last one wanted are not there.
M = 0  # max y
S = 1  # Σ e^(d / temperature)
Y_LABEL = 2  # y of the label; 0 where another part owns it
W = 3  # Σ d e^(d / temperature), with "entropy"
ARG = 4  # the bits of the lowest column that reaches m, with "argmax"
S1 = 5  # Σ e^d, with "logprob_t1" at another temperature than 1
C = 6  # Σ v (y - ref), with "total" or "log_total"
N = 7  # Σ v, likewise
REF = 8  # a number near the mean of y, so that C does not cancel
PART = 9


class Sums(NamedTuple):
    """What a part holds besides M, S and Y_LABEL."""

    entropy: bool
    argmax: bool
    second: bool
    total: bool


def sums_of(wants: tuple[str, ...], at_temperature_1: bool) -> Sums:
    total = "total" in wants or "log_total" in wants
    second = "logprob_t1" in wants and not at_temperature_1
    return Sums("entropy" in wants, "argmax" in wants, second, total)


def part_width(entropy: bool, argmax: bool, second: bool, total: bool) -> int:
    """How many fields a part has that holds these Sums: up to the last one that it holds.

    A field before that which is not wanted holds anything, and nobody reads it. So ranks may send a
    few numbers too many, but what they gather is read as it lies.
    """
    if total:
        return PART
    if second:
        return S1 + 1
    return ARG + 1 if argmax else W + 1 if entropy else Y_LABEL + 1


NOWHERE = 2**31 - 1  # as ARG: no column


def as_bits(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of 32-bit integers as numbers of this dtype: to be stored, not computed with."""
    return whole.to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def of_bits(t: Tensor) -> Tensor:
    """The integers again."""
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int64)


class Coefficients(NamedTuple):
    """Of the one backward, at an upstream gradient of 1."""

    rows: Tensor | None  # (N, COEFFICIENTS), or (1, COEFFICIENTS) for all; None without fields
    has: tuple[str, ...]  # which fields are used: "a", "b", "label", "total", "a_ids", "logprob_t1"
    ids: Tensor | None = None  # (N, K) or (..., K), g_k


# Fields of Coefficients.rows.
A = 0  # a
B = 1  # b
G_LABEL = 2  # g of z at the label
G_TOTAL = 3  # g_c
A_IDS = 4  # a of the columns that are among the ids, where those leave a tail; not beside b
D_LOGPROB_T1 = 5  # of log p of the label at temperature 1
COEFFICIENTS = 6
FIELDS = ("a", "b", "label", "total", "a_ids", "logprob_t1")

# The gradient of a tail is a share of it, p_i / e^tail. Of a small tail p_i is 0 in fp32, and
# 1 / e^tail infinite. So with "a_ids" the columns outside the ids take p_i e^-lift for p_i, and
# their `a` comes times e^lift; lift = min(tail - LEAST_TAIL, 0), or 0 where nothing is outside.
LEAST_TAIL = -32.0

NO_ID = -(2**31)  # in a slot that holds no id: not read, no gradient, not a bad id


class Slots(NamedTuple):
    """A teacher that is known on K slots a row, and how it is compared."""

    teacher: Tensor  # (..., K), log p
    mask: Tensor | None  # (..., K), bool: slots that count
    tail: Tensor | None  # (...), log mass of the teacher outside; None is 1 - Σ p
    row_weight: Tensor | None  # (...), of the divergence
    divergence: str  # "forward_kl", "reverse_kl", "jsd" or "tvd"
    # "truncate", "renorm_teacher", "renorm", "tail"; or, of logits that are gathered already,
    # "gathered" (the student over all slots) and "gathered_renorm" (over those that count)
    support: str
    beta: float  # of "jsd"
    kd_weight: float  # of the divergence
    ce_weight: float  # of -log p of the label; 0 without one


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
    """A teacher of whole rows, and how it is compared."""

    teacher: Tensor  # (..., V), logits; probabilities for "soft"
    kind: str  # "forward", "reverse", "jsd" or "soft"
    blend: float  # β of "jsd", the label smoothing of "soft"


PAIR_STATE = 5  # numbers saved of a row: shift and s of student and teacher, and a mean

# Of statistics and losses, by the dtype of the logits.
PRECISION = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class made_once(dict, Generic[T]):
    """A function of a key, or of a tuple of them: found[key] is make(key), remembered.

    It is made outside of inference mode, whose tensors autograd cannot save. What is made while a
    CUDA graph is captured belongs to that graph, and is not remembered.
    """

    def __init__(self, make: Callable[..., T]):
        super().__init__()
        self.make = make

    def __missing__(self, key) -> T:
        with torch.inference_mode(False):
            found = self.make(*key) if isinstance(key, tuple) else self.make(key)
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self[key] = found
        return found
