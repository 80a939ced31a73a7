"""The structs that losses and backends (`kernels` and `eager`) pass to each other.

A `Reading` lists the statistics to compute for each row of logits. `Statistics` holds the values of
the statistics. `Coefficients` holds the coefficients of the backward formula, which all losses over
row statistics share:

    dz_i = p_i (a + b log p_i) + g_label [i = label] + Σ_k g_k [i = id_k] + g_c v_i

In this formula, z are the logits after softcap and temperature (see `Reading`), p = softmax(z), and
v are the class weights. Let y = z · temperature be the logits before the division by the
temperature. The gradient of y_i is dz_i / temperature. The backward multiplies the whole gradient
by the upstream gradient.

A loss that also uses the log-probability of the label at temperature 1 has one more coefficient, d.
Such a loss adds the term d ([i = label] - p1_i) to the gradient of y_i, where p1 = softmax(y).
"""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")

# These constants say how a tensor is sliced together with the logits. The attribute `TENSORS` of a
# struct gives one of these constants for each tensor of the struct.
PER_ROW = "per row"  # shape (...) or (..., K), sliced together with the rows of the logits
PER_CLASS = "per class"  # shape (V,), never sliced, not even for a shard of the vocabulary
TEACHER = "teacher"  # shape (..., V), sliced together with the rows and the columns of the logits

# The names of all row statistics. Every statistic except argmax and rank is fp32 (fp64 for fp64
# logits). A statistic has one number per row, unless its comment gives the shape (..., K).
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

    The logits of the softmax are z = softcap · tanh(x / softcap) / temperature.

    `label` holds one integer per row. A row is ignored if its integer is ignore_index. The integers
    are class ids, or the entries of a mask of rows. In a mask, ignored rows have the entry 0, all
    other rows have the entry 1, and ignore_index is 0. An ignored row is not read. The statistics
    and the gradient of an ignored row are 0, and its argmax and rank are -1.
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
    # If True, the results and the gradient of a row are bitwise the same in every batch (see
    # core/invariant.py).
    invariant: bool = False

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
        """Returns a `Reading` that first multiplies the logits x by `scale`. The argument `softcap`
        applies to scale · x, and replaces the softcap of `self`.
        """
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
        """The temperature, as one number or as a tensor with one number per row. None means 1."""
        if self.temperature is None:
            return self.row_temperature
        return None if self.temperature == 1 else self.temperature

    def squared(self, dtype: torch.dtype) -> tuple[Tensor | None, float]:
        """Returns the square of the temperature as two factors, a tensor and a number.

        If each row has its own temperature, the tensor holds the squares in `dtype`, and the number
        is 1. Otherwise, the tensor is None, and the number is the square.
        """
        if self.row_temperature is not None:
            return self.row_temperature.to(dtype).square(), 1.0
        assert self.temperature is not None
        return None, self.temperature**2

    def ignored_rows(self) -> Tensor | None:
        """Returns a bool mask of the ignored rows, or None if there is no ignore_index."""
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
    """The statistics that a `Reading` requests. A statistic that is not requested is None.

    `state` holds the numbers that the backward reads.
    """

    state: Tensor  # (N, STATE); the fields SHIFT, ..., REPEATS are listed below
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


# Fields of Statistics.state, one number per row. A field with the note "only with X" is written
# only if the `Reading` requests the statistic X.
SHIFT = 0  # max y, where y = z · temperature; 0 if the max is infinite
LOG_S = 1  # log Σ e^((y - shift) / temperature)
LOG_S1 = 2  # log Σ e^(y - shift); only with "logprob_t1"
ENTROPY = 3  # the entropy of the row; only with "entropy"
TAIL = 4  # the log of the softmax mass outside the ids; only with "tail"
REPEATS = 5  # 1 if two slots of the row hold the same id, otherwise 0; only with "tail"
STATE = 6


class Partials(NamedTuple):
    """Partial statistics of the logits, for several disjoint sets of columns.

    A set of columns can be a split (the columns that one program reads), a block of columns that a
    head computes at once, or the shard of one rank. Partial statistics can be merged in any order.
    For an empty set of columns, the max M is -inf, and all sums are 0.
    """

    state: Tensor  # (N, number of sets, part_width); the fields M, ..., REF are listed below
    picked: Tensor | None = None  # (N, K), y at the ids; 0 for an id outside these columns


# Fields of Partials.state. In the comments, y is z · temperature, m is the max of y over the set of
# columns, and d is y - m. The order of the fields is fixed, and the fields that most losses need
# come first. Partials.state ends after the last field that a requested statistic needs. All earlier
# fields are allocated too. An earlier field that no requested statistic needs has undefined values.
M = 0  # max y
S = 1  # Σ e^(d / temperature)
Y_LABEL = 2  # y at the label; 0 if the label is outside these columns
W = 3  # Σ d e^(d / temperature); needed by "entropy"
ARG = 4  # the lowest column whose y is m, stored as bits (see as_bits); needed by "argmax"
S1 = 5  # Σ e^d; needed by "logprob_t1" at a temperature other than 1
C = 6  # Σ v (y - ref); needed by "total" and "log_total"
N = 7  # Σ v; needed by "total" and "log_total"
REF = 8  # `ref`, a number close to the mean of y; C subtracts `ref` to avoid cancellation
PART = 9


class Sums(NamedTuple):
    """Flags for the optional fields of Partials.state. A flag is True if its fields are needed.

    The fields M, S and Y_LABEL are always computed, and have no flag.
    """

    entropy: bool  # the field W
    argmax: bool  # the field ARG
    second: bool  # the field S1
    total: bool  # the fields C, N and REF


def sums_of(wants: tuple[str, ...], at_temperature_1: bool) -> Sums:
    total = "total" in wants or "log_total" in wants
    second = "logprob_t1" in wants and not at_temperature_1
    return Sums("entropy" in wants, "argmax" in wants, second, total)


def part_width(entropy: bool, argmax: bool, second: bool, total: bool) -> int:
    """Returns the number of fields of Partials.state. The arguments are the flags of `Sums`.

    Partials.state ends with the last field that is needed. All earlier fields are allocated too. If
    an earlier field is not needed, its values are undefined. Ranks send the undefined values too,
    so that the gathered tensors have the same layout.
    """
    if total:
        return PART
    if second:
        return S1 + 1
    return ARG + 1 if argmax else W + 1 if entropy else Y_LABEL + 1


NOWHERE = 2**31 - 1  # the value of ARG for an empty set of columns


def as_bits(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a floating-point tensor of `dtype` with the same bits as the integers in `whole`."""
    return whole.to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def of_bits(t: Tensor) -> Tensor:
    """The inverse of `as_bits`: reads the bits of the floating-point tensor t as integers."""
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int64)


class Coefficients(NamedTuple):
    """The coefficients of the formula at the top of this file, for an upstream gradient of 1."""

    rows: Tensor | None  # (N, COEFFICIENTS), or (1, COEFFICIENTS) if equal for all rows
    has: tuple[str, ...]  # the names from FIELDS that the loss uses
    ids: Tensor | None = None  # g_k, (N, K) or (..., K)


# Fields of Coefficients.rows.
A = 0  # a
B = 1  # b
G_LABEL = 2  # g_label
G_TOTAL = 3  # g_c
# The coefficient that replaces `a` in the columns of the ids. A loss with the coefficient A_IDS
# needs the statistic "tail", and has no coefficient B.
A_IDS = 4
D_LOGPROB_T1 = 5  # d, the gradient of logprob_t1
COEFFICIENTS = 6
FIELDS = ("a", "b", "label", "total", "a_ids", "logprob_t1")

# The tail is the log of the softmax mass outside the ids. In a column i outside the ids, the
# gradient of the tail has the term p_i / e^tail. If e^tail is very small, p_i underflows to 0 in
# fp32, and 1 / e^tail overflows to infinity. A loss with the coefficient "a_ids" avoids the
# underflow and the overflow. Let `lift` be min(tail - LEAST_TAIL, 0), or 0 if the tail is -inf. In
# the columns outside the ids, backward computes p_i · e^-lift instead of p_i. The field A holds
# `a` · e^lift instead of `a`. So the product of the two factors is still `a` · p_i.
LEAST_TAIL = -32.0

NO_ID = -(2**31)  # the id of a masked slot; a masked slot is not read and has no gradient


class Slots(NamedTuple):
    """A sparse teacher with K ids per row, and the options of a loss against this teacher.

    A slot is one of the K positions of a row.
    """

    teacher: Tensor  # (..., K), log p of the teacher at the ids
    mask: Tensor | None  # (..., K), bool, True for unmasked slots
    # The log of the teacher's mass outside the slots, (...). If `tail` is None, this mass is
    # computed as 1 - Σ p.
    tail: Tensor | None
    row_weight: Tensor | None  # (...), multiplies each row's divergence
    divergence: str  # "forward_kl", "reverse_kl", "jsd" or "tvd"
    # How probabilities are normalised over the slots (see kernels/slot_divergence.py): "truncate",
    # "renorm_teacher", "renorm" or "tail". If the logits are already gathered at the teacher's ids,
    # `support` is "gathered" or "gathered_renorm". With "gathered", the softmax is over all K
    # slots. With "gathered_renorm", the softmax is over the unmasked slots.
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


# With these values of `support`, the teacher's p is divided by the sum of p over the slots.
RENORM_TEACHER = ("renorm_teacher", "renorm")
# With these values of `support`, the student's q is divided by the sum of q over the slots.
RENORM_STUDENT = ("renorm", "gathered", "gathered_renorm")

# Rounding the teacher's p to 16 bits changes Σ p. Therefore 1 - Σ p can be up to 2^-6, even if the
# teacher has no mass outside the slots.
LOG_ROUNDING = math.log(2.0**-6)


def at_the_ends(divergence: str, beta: float) -> tuple[str, float | None]:
    """Returns the divergence to compute, and its β.

    Only JSD has a β. For all other divergences, β is None. JSD is replaced by forward KL at β = 0,
    and by reverse KL at β = 1.
    """
    if divergence == "jsd":
        return {0.0: ("forward_kl", None), 1.0: ("reverse_kl", None)}.get(beta, (divergence, beta))
    return divergence, None


class Pair(NamedTuple):
    """A dense teacher, and the options of a loss against this teacher."""

    # The teacher's logits (..., V), or the teacher's probabilities if `kind` is "soft". The teacher
    # is a Tensor or a ScaledHead. If the student's logits are sharded over ranks, the teacher can
    # also be a `Shard`. parallel/shard.py replaces the `Shard` by the teacher's columns on this
    # rank.
    teacher: Any
    # "forward", "reverse", "skewed_forward", "skewed_reverse", "jsd", "tvd" or "soft"
    kind: str
    blend: float  # α for the skewed kinds, β for "jsd", the label smoothing for "soft"

    TENSORS = (("teacher", TEACHER),)


# The number of values saved per row for a loss against a dense teacher. The first two values are
# the max and the sum of exponentials of the student's logits. The next two values are the max and
# the sum of exponentials of the teacher's logits. For "tvd", the fifth value is a ratio of two
# masses. For all other losses, the fifth value is an expectation under the student's probabilities.
# eager/pair.py defines this expectation for each loss.
PAIR_STATE = 5

# The kinds of `Pair` whose loss needs two passes over the logits. The first pass computes the
# normalisers of the student and of the teacher. The second pass needs these normalisers to compute
# the terms of the loss. If the columns of a row are divided into parts, the second pass computes
# PAIR_SUMS[kind] sums for each part. The first sum is the loss over the columns of the part. The
# other sums are written to the last columns of the state (see eager/pair.py).
PAIR_SUMS = {"jsd": 2, "skewed_forward": 2, "skewed_reverse": 2, "tvd": 3}

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
        return self[key] if has_values(t) else self.make(*key)


def is_capturing() -> bool:  # a CUDA graph
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_values(t: Tensor) -> bool:
    """Whether t has values to read. Fake tensors and tensors on "meta" have none."""
    return t.__class__ is not FakeTensor and not t.is_meta
