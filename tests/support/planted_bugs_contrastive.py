"""Bugs for planted.py in contrastive losses."""

from tests.support.planted_bug import Bug

ROOM = "contrastive_losses"
INFO_NCE_PY, SIGMOID_PY, RING_PY, MODULES_PY = (
    f"logitless/{ROOM}/{x}.py" for x in ("info_nce", "sigmoid", "ring", "modules")
)
INFO_NCE, SIGMOID = (f"tests/contrastive_losses/test_{x}.py" for x in ("info_nce", "sigmoid"))
CALLS, RING = "tests/contrastive_losses/test_calls.py", "tests/contrastive_losses/test_ring.py"
FWD, BWD = (f"logitless/kernels/contrastive_{x}.py" for x in ("fwd", "bwd"))
TILE, OF_SIGMOIDS = (
    f"logitless/kernels/{x}.py" for x in ("contrastive_tile", "sigmoid_contrastive")
)

CONTRASTIVE = (
    # kernels/
    Bug("the max of a column of an earlier tile", "kernels", FWD,
        "s_c = s_c * tl.exp2(move(m_c, m_new, s_c)) + e", "s_c = s_c + e", (INFO_NCE,)),
    Bug("the max of a row of an earlier strip", "kernels", FWD,
        "s = s * tl.exp2(move(m, m_new, s)) + e", "s = s + e", (INFO_NCE,)),
    Bug("columns of the last lane alone", "kernels", FWD,
        "m_all = tl.max(m_c, 0)", "m_all = tl.min(m_c, 0)", (INFO_NCE,)),
    Bug("a positive that is left out", "kernels", TILE,
        "        out = _same_label(pairs, rows, cols, n, m)\n        if HAS_POSITIVES:",
        "        out = _same_label(pairs, rows, cols, n, m)\n        if not HAS_POSITIVES:",
        (INFO_NCE,)),
    Bug("labels ignored beside a mask", "kernels", TILE,
        "out = out | _same_label(pairs, rows, cols, n, m)", "out = out", (INFO_NCE,)),
    Bug("padding that counts", "kernels", TILE,
        "z = tl.where((rows < n) & (cols < m), z, -INF)", "z = tl.where(rows < n, z, -INF)",
        (INFO_NCE,)),
    Bug("upstream of columns", "kernels", BWD,
        "dz += (tl.exp2(z - m_c - log_c) - y) * g_columns", "dz += tl.exp2(z - m_c - log_c) - y",
        (INFO_NCE,)),
    Bug("positives of columns", "kernels", BWD,
        "dz += (tl.exp2(z - m_c - log_c) - y) * g_columns",
        "dz += tl.exp2(z - m_c - log_c) * g_columns", (INFO_NCE,)),
    Bug("upstream of columns, 16 bits", "kernels", BWD,
        "tl.exp2(middle - m_c - log_c) * g_columns", "tl.exp2(middle - m_c - log_c)",
        (INFO_NCE,)),
    Bug("positives of columns, 16 bits", "kernels", BWD,
        "g_rows + g_columns, 0.0)", "g_rows, 0.0)", (INFO_NCE,)),
    Bug("sums outside of their range, 16 bits", "kernels", FWD,
        "if exact:\n            return", "if True:\n            return", (INFO_NCE,)),
    Bug("log(1 + e) of tiny e", "kernels", OF_SIGMOIDS,
        "return (p * e + 0.99999997) * e", "return tl.log(1.0 + e)", (SIGMOID,)),
    Bug("the sign of a positive's gradient", "kernels", OF_SIGMOIDS,
        "dz = _flipped(dz, pairs, rows, cols, n)", "dz = dz", (SIGMOID,)),

    # contrastive_losses/
    Bug("the diagonal of a later chunk", "eager", "logitless/eager/contrastive.py",
        "diagonal=None if diagonal is None else diagonal + rows.start", "diagonal=diagonal",
        (INFO_NCE,)),
    Bug("the scale of the gradient", ROOM, INFO_NCE_PY,
        "factored = factor * pairs.scale", "factored = factor", (INFO_NCE,)),
    Bug("half of a symmetric loss", ROOM, INFO_NCE_PY,
        "0.5 if how.symmetric else 1.0", "1.0", (INFO_NCE,)),
    Bug("ignored rows in a mean", ROOM, INFO_NCE_PY,
        "count = (~ignored).sum().double()", "count = count", (INFO_NCE,)),
    Bug("the backend of backward", ROOM, INFO_NCE_PY,
        "Similarities(pairs.a, how.ring.largest, how.workspace, ctx.backend)",
        "Similarities(pairs.a, how.ring.largest, how.workspace)", (CALLS,)),
    Bug("stale gradients in a second backward", ROOM, SIGMOID_PY,
        "sums, ctx.sums = ctx.sums, None", "sums = ctx.sums", (SIGMOID,)),
    Bug("sums that stay on another rank", ROOM, RING_PY,
        "sums = self.ranks.shift(sums, coming, len(given)).wait()",
        "sums = sums if step == self.count - 1 else self.ranks.shift(sums, coming).wait()",
        (RING,)),
    Bug("columns of the mask of another rank", ROOM, RING_PY,
        "return sum(self.columns[:owner])", "return 0", (RING,)),
    Bug("gradients that DDP averages", ROOM, INFO_NCE_PY,
        "factor = factor * pairs.ring.count", "factor = factor * 1", (RING,)),
    Bug("a scale beyond its bound", ROOM, MODULES_PY,
        "self.log_scale.clamp_(max=math.log(self.max_scale))", "pass", (CALLS,)),
)  # fmt: skip
