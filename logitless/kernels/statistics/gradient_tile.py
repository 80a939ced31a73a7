"""The gradient of one tile of logits, by the formula of contract.py.

log p_i is ((y_i - shift) / T) - log_s, with T the temperature, y the logits x after the softcap,
shift = max y, and log_s = log Σ_j e^((y_j - shift) / T). This is exact even under a large common
offset of the logits.

For speed, kernels compute powers of 2. With d = (y - shift) / (T ln 2), e = 2^d, s = Σ e and
p = e / s, let c0 = (a - b log_s) / (T s) and c1 = b ln 2 / (T s). They and g_c (here already
divided by T) are the same for all columns of a row. Without the term of d_logprob_t1, the gradient
of y_i, which the derivative of the softcap turns into that of x_i, is

    dz_i / T = e_i (c0 + c1 d_i) + g_c v_i + the terms of the label and the ids
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ... import contract as _contract
from ..layout import fringe_tile, pack_of, walk
from ..numerics import INF, LN2, LOG2E, capped, load, only_if

COEF_A = tl.constexpr(_contract.A)
COEF_B = tl.constexpr(_contract.B)
COEF_G_LABEL = tl.constexpr(_contract.G_LABEL)
COEF_G_TOTAL = tl.constexpr(_contract.G_TOTAL)
COEF_A_IDS = tl.constexpr(_contract.A_IDS)
COEF_D_LOGPROB_T1 = tl.constexpr(_contract.D_LOGPROB_T1)


class Coefs(NamedTuple):
    """The coefficients of a row, times `row_gain`; 0 if the loss does not use them."""

    a: tl.tensor
    b: tl.tensor
    g_label: tl.tensor
    g_total: tl.tensor
    a_ids: tl.tensor
    d_logprob_t1: tl.tensor


class Terms(NamedTuple):
    """What the formula of the gradient needs of a row."""

    shift: tl.tensor
    c0: tl.tensor
    c1: tl.tensor
    c_logprob_t1: tl.tensor  # the factor of e^(y - shift) (see `row_gradient` in backward.py)
    g_c: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    # log2 e · `lift`, for columns outside the ids (see LEAST_TAIL in contract.py)
    lift: tl.tensor
    softcap: tl.tensor  # a number or None


class Tile(NamedTuple):
    X: tl.tensor
    W: tl.tensor  # class weights, starting at the same column as X, or None
    DX: tl.tensor
    terms: Terms
    HAS: tl.constexpr


@triton.constexpr_function
def uses(has, name):
    """Whether a loss uses the coefficient `name`.

    `has` can also contain "second": the loss uses log p of the label at temperature 1 and another
    temperature, so that the kernel needs a second normaliser, at temperature 1.
    """
    return name in has


@triton.jit
def row_gain(UPSTREAM, FACTOR, row, step_u, step_f):
    """Returns upstream gradient times factor of a row; a step of 0: one number for all rows."""
    gain = 1.0
    if UPSTREAM is not None:
        gain = tl.load(UPSTREAM + row * step_u).to(tl.float32)
    if FACTOR is not None:
        gain = gain * tl.load(FACTOR + row * step_f).to(tl.float32)
    return gain


@triton.jit
def _coef(COEF, gain, FIELD: tl.constexpr, USED: tl.constexpr):
    if USED:
        return tl.load(COEF + FIELD) * gain
    else:
        return 0.0


@triton.jit
def load_coefs(COEF, gain, HAS: tl.constexpr):
    return Coefs(
        _coef(COEF, gain, COEF_A, uses(HAS, "a")),
        _coef(COEF, gain, COEF_B, uses(HAS, "b")),
        _coef(COEF, gain, COEF_G_LABEL, uses(HAS, "label")),
        _coef(COEF, gain, COEF_G_TOTAL, uses(HAS, "total")),
        _coef(COEF, gain, COEF_A_IDS, uses(HAS, "a_ids")),
        _coef(COEF, gain, COEF_D_LOGPROB_T1, uses(HAS, "logprob_t1")),
    )


@triton.jit
def c0_of(a, b, log_s, inv_t, HAS: tl.constexpr):
    """Returns c0 (see the top of this file), or 0 for a row that is all -inf."""
    scale = inv_t * tl.exp2(-log_s * LOG2E)
    # without b, the product is skipped: 0 · log_s would be NaN for an infinite log_s
    if uses(HAS, "b"):
        a -= b * log_s
    return tl.where(log_s == -INF, 0.0, a * scale)


@triton.jit
def row_terms(coefs, a, shift, log_s, inv_t, HAS: tl.constexpr):
    """Returns `shift`, `c0`, `c1` and `g_c` of `Terms`, and a gradient of 0 if all is -inf."""
    dead = log_s == -INF
    c1 = coefs.b * LN2 * tl.where(dead, 0.0, inv_t * tl.exp2(-log_s * LOG2E))
    g_c = tl.where(dead, 0.0, coefs.g_total * inv_t)
    return tl.where(dead, INF, shift), c0_of(a, coefs.b, log_s, inv_t, HAS), c1, g_c


@triton.jit
def dz_of(y, W, at, mask, c0, lift, terms, HAS: tl.constexpr):
    """Returns the gradient of y at the columns `at`, without the terms of the label and the ids."""
    d = (y - terms.shift) * terms.rate
    if uses(HAS, "b"):
        tl.static_assert(not uses(HAS, "a_ids"))
        # d can be -inf where 2^d is 0, and 0 · -inf would be NaN
        dz = tl.exp2(d) * (c0 + terms.c1 * tl.maximum(d, -1e4))
    else:
        dz = tl.exp2(d - lift) * c0
    if uses(HAS, "second"):
        dz += tl.exp2((y - terms.shift) * LOG2E) * terms.c_logprob_t1
    if uses(HAS, "total"):
        if W is not None:
            dz += terms.g_c * load(W, at, mask).to(tl.float32)
        else:
            dz += terms.g_c
    return dz


@triton.jit
def write_tile(state, tile, start, offs, mask):
    """Writes the gradient of a tile for `walk`, without the terms of the label and the ids."""
    at = start + offs
    y, slope = capped(load(tile.X, at, mask), tile.terms.softcap)
    dz = dz_of(y, tile.W, at, mask, tile.terms.c0, tile.terms.lift, tile.terms, tile.HAS)
    # .cs: the gradient leaves the cache first; nothing reads it soon, and the next tiles' logits
    # may stay
    dx = (dz * slope).to(tile.DX.dtype.element_ty)
    tl.store(tile.DX + at, dx, mask=mask, cache_modifier=".cs")
    return state


class Fill(NamedTuple):
    """0 for all columns of an ignored row, or NaN if the label or an id is invalid."""

    DX: tl.tensor
    value: tl.tensor


@triton.jit
def fill_tile(state, fill, start, offs, mask):
    value = tl.full(offs.shape, fill.value, tl.float32).to(fill.DX.dtype.element_ty)
    tl.store(fill.DX + start + offs, value, mask=mask)
    return state


@triton.jit
def write_label(x, W, DXrow, label, g_label, terms, HAS: tl.constexpr):
    """Overwrites the label's gradient, once the tile around it is written, with all terms."""
    y, slope = capped(x, terms.softcap)
    dz = dz_of(y, W, label, None, terms.c0, terms.lift, terms, HAS) + g_label
    tl.debug_barrier()
    tl.store(DXrow + label, (dz * slope).to(DXrow.dtype.element_ty))


@triton.jit
def is_class(label, V, vocab):
    if vocab is not None:
        return (label >= 0) & (label < vocab)
    else:
        return (label >= 0) & (label < V)


@triton.jit
def local_column(label, start):
    """Returns the label's column in x, which can be outside x."""
    if start is not None:
        return label - start
    else:
        return label


class Span(NamedTuple):
    """The columns of a row that one program writes (layout.py defines body and fringe).

    They are [lo, hi) of the body and, if lo = 0, the fringe.
    """

    head: tl.tensor
    body: tl.tensor
    V: tl.tensor
    lo: tl.tensor
    hi: tl.tensor  # ≤ body


@triton.jit
def in_span(ids, span, ALIGNED: tl.constexpr):
    inside = (ids >= span.head + span.lo) & (ids < span.head + span.hi)
    if not ALIGNED:
        after = span.head + span.body
        fringe = ((ids >= 0) & (ids < span.head)) | ((ids >= after) & (ids < span.V))
        inside = inside | only_if(span.lo == 0, fringe)
    return inside


@triton.jit
def _over_span(
    f: tl.constexpr, in_body, in_row, span, PACK: tl.constexpr,
    ALIGNED: tl.constexpr, ONE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Calls f on every tile of a span. If ONE is True, the body of the span is a single tile."""
    if ONE:
        offs = tl.arange(0, BLOCK_V)
        f(span.lo, in_body, span.lo, offs, span.lo + offs < span.hi)
        if not ALIGNED:
            if span.lo == 0:
                ends, mask_ends = fringe_tile(span.head, span.body, span.V, PACK, 2 * PACK)
                f(span.lo, in_row, 0, ends, mask_ends)
    else:
        walk(
            f, span.lo, in_body, in_row, span.head, span.body, span.V, span.lo, span.hi,
            PACK, ALIGNED, True, BLOCK_V, 2 * PACK,
        )  # fmt: skip


@triton.jit
def fill_span(
    DXrow, value, span,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, ONE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    _over_span(
        fill_tile, Fill(tl.multiple_of(DXrow + span.head, 16), value), Fill(DXrow, value),
        span, PACK, ALIGNED, ONE, BLOCK_V,
    )  # fmt: skip


@triton.jit
def write_span(
    Xrow, W, DXrow, terms, span, HAS: tl.constexpr,
    ALIGNED: tl.constexpr, X_ALIGNED: tl.constexpr, ONE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a span, without the terms of the label and the ids.

    Its body starts on a 16-byte boundary, that of X only with X_ALIGNED.
    """
    Xbody = Xrow + span.head
    if X_ALIGNED:
        Xbody = tl.multiple_of(Xbody, 16)
    if W is not None:
        Wbody = W + span.head
    else:
        Wbody = None
    _over_span(
        write_tile, Tile(Xbody, Wbody, tl.multiple_of(DXrow + span.head, 16), terms, HAS),
        Tile(Xrow, W, DXrow, terms, HAS), span, pack_of(Xrow), ALIGNED, ONE, BLOCK_V,
    )  # fmt: skip
