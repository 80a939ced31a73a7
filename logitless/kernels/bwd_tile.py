"""The gradient of one tile of logits: one formula for every loss, written once.

    dz_i = p_i (a + b log p_i) + g_label [i = label] + Σ_k g_k [i = id_k] + g_c v_i

a, b, g_c are per row; log p_i is taken as ((y_i - shift) / temperature) - log_s, which is exact
under any common offset, and dx_i = dz_i dz/dx_i. A label at temperature 1 adds
d ([i = label] - p1_i) to dy_i. With d = (y - shift) rate and e = 2^d, p = e / s and
log p = d ln 2 - log s:

    dz_i / T = e_i (c0 + c1 d_i) + g_c v_i + what label and ids add
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .. import contract as _contract
from .layout import fringe_tile, walk
from .numerics import INF, LN2, LOG2E, capped, load, only_if
from .state import pack_of

COEF_A = tl.constexpr(_contract.A)
COEF_B = tl.constexpr(_contract.B)
COEF_G_LABEL = tl.constexpr(_contract.G_LABEL)
COEF_G_TOTAL = tl.constexpr(_contract.G_TOTAL)
COEF_A_IDS = tl.constexpr(_contract.A_IDS)
COEF_D_LOGPROB_T1 = tl.constexpr(_contract.D_LOGPROB_T1)


class Coefs(NamedTuple):
    """A row's coefficients, times its upstream gradient; 0 where the loss has none."""

    a: tl.tensor
    b: tl.tensor
    g_label: tl.tensor
    g_total: tl.tensor
    a_ids: tl.tensor
    d_logprob_t1: tl.tensor


class Terms(NamedTuple):
    """What the columns of a row share, so that each costs one exponential and one product."""

    shift: tl.tensor
    c0: tl.tensor
    c1: tl.tensor
    c_logprob_t1: tl.tensor  # what e^(y - shift) is multiplied with, for a label at temperature 1
    g_c: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    lift: tl.tensor  # of e outside the ids, in bits: see contract.py
    softcap: tl.tensor  # or None


class Tile(NamedTuple):
    """Where columns are read and written."""

    X: tl.tensor
    W: tl.tensor  # class weights from the same column on, or None
    DX: tl.tensor
    terms: Terms
    HAS: tl.constexpr


@triton.constexpr_function
def uses(has, name):
    """Whether a loss has a coefficient; or, "second", a label at a temperature of its own."""
    return name in has


@triton.jit
def row_gain(UPSTREAM, FACTOR, row, step_u, step_f):
    """What a row's coefficients are multiplied with; a step of 0 means one number for all."""
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
    """Of the row that COEF points to."""
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
    """The constant in what e is multiplied with; 0 for a row of -inf, where nothing flows."""
    scale = inv_t * tl.exp2(-log_s * LOG2E)
    if uses(HAS, "b"):  # else 0 · inf would not be 0
        a -= b * log_s
    return tl.where(log_s == -INF, 0.0, a * scale)


@triton.jit
def row_terms(coefs, a, shift, log_s, inv_t, HAS: tl.constexpr):
    """(shift, c0, c1, g_c) of Terms. A row of -inf has no distribution, and no gradient."""
    dead = log_s == -INF
    c1 = coefs.b * LN2 * tl.where(dead, 0.0, inv_t * tl.exp2(-log_s * LOG2E))
    g_c = tl.where(dead, 0.0, coefs.g_total * inv_t)
    return tl.where(dead, INF, shift), c0_of(a, coefs.b, log_s, inv_t, HAS), c1, g_c


@triton.jit
def dz_of(y, W, at, mask, c0, lift, terms, HAS: tl.constexpr):
    """dz / T of the columns `at`, but for what label and ids add."""
    d = (y - terms.shift) * terms.rate
    if uses(HAS, "b"):
        tl.static_assert(not uses(HAS, "a_ids"))
        # 0 · -inf is 0 here: any d will do where e is 0, if c1 times it is finite.
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
    """Read a tile of logits, write its gradient, but for what label and ids add.

    Nothing is carried from tile to tile: `state` is any number.
    """
    at = start + offs
    y, slope = capped(load(tile.X, at, mask), tile.terms.softcap)
    dz = dz_of(y, tile.W, at, mask, tile.terms.c0, tile.terms.lift, tile.terms, tile.HAS)
    # Streamed: nobody reads it back soon, and the cache is better used for logits.
    dx = (dz * slope).to(tile.DX.dtype.element_ty)
    tl.store(tile.DX + at, dx, mask=mask, cache_modifier=".cs")
    return state


class Fill(NamedTuple):
    """One number for columns that are not read: 0 of an ignored row, NaN of a bad id."""

    DX: tl.tensor
    value: tl.tensor


@triton.jit
def fill_tile(state, fill, start, offs, mask):
    value = tl.full(offs.shape, fill.value, tl.float32).to(fill.DX.dtype.element_ty)
    tl.store(fill.DX + start + offs, value, mask=mask)
    return state


@triton.jit
def write_label(x, W, DXrow, label, g_label, terms, HAS: tl.constexpr):
    """Rewrite the gradient at a row's label, once the tile around it is written."""
    y, slope = capped(x, terms.softcap)
    dz = dz_of(y, W, label, None, terms.c0, terms.lift, terms, HAS) + g_label
    tl.debug_barrier()
    tl.store(DXrow + label, (dz * slope).to(DXrow.dtype.element_ty))


@triton.jit
def is_class(label, V, vocab):
    """Whether a label is a class: one of `vocab`, or of V where these are all."""
    if vocab is not None:
        return (label >= 0) & (label < vocab)
    else:
        return (label >= 0) & (label < V)


@triton.jit
def own_column(label, start):
    """A class as a column of x, whose first is `start`; it may lie outside."""
    if start is not None:
        return label - start
    else:
        return label


class Span(NamedTuple):
    """The columns of a row that a program writes: [lo, hi) of its body, the fringe if lo = 0."""

    head: tl.tensor
    body: tl.tensor
    V: tl.tensor
    lo: tl.tensor
    hi: tl.tensor  # ≤ body


@triton.jit
def in_span(ids, span, ALIGNED: tl.constexpr):
    """Which ids are among the columns of a span."""
    mine = (ids >= span.head + span.lo) & (ids < span.head + span.hi)
    if not ALIGNED:
        after = span.head + span.body
        fringe = ((ids >= 0) & (ids < span.head)) | ((ids >= after) & (ids < span.V))
        mine = mine | only_if(span.lo == 0, fringe)
    return mine


@triton.jit
def _over_span(
    f: tl.constexpr, in_body, in_row, span, PACK: tl.constexpr,
    ALIGNED: tl.constexpr, ONE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """f over a span, which is ONE block or several."""
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
    """One number for a whole span."""
    _over_span(
        fill_tile, Fill(tl.multiple_of(DXrow + span.head, 16), value), Fill(DXrow, value),
        span, PACK, ALIGNED, ONE, BLOCK_V,
    )  # fmt: skip


@triton.jit
def write_span(
    Xrow, W, DXrow, terms, span, HAS: tl.constexpr,
    ALIGNED: tl.constexpr, X_ALIGNED: tl.constexpr, ONE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of a span, but for what label and ids add.

    The body of X starts on a 16-byte boundary where X_ALIGNED, and that of DX always.
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
