"""Bugs for planted.py in contrastive losses."""

from tests.support.planted_bug import Bug

INFO_NCE, SIGMOID = (f"tests/contrastive/test_{x}.py" for x in ("info_nce", "sigmoid"))
CALLS, RING = "tests/contrastive/test_calls.py", "tests/contrastive/test_ring.py"
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
    Bug("upstream of columns", "kernels", BWD, "q *= g_column", "q *= 1.0", (INFO_NCE,)),
    Bug("positives of columns", "kernels", BWD, "q -= y", "q -= 0.0", (INFO_NCE,)),
    Bug("log(1 + e) of tiny e", "kernels", OF_SIGMOIDS,
        "return (p * e + 0.99999997) * e", "return tl.log(1.0 + e)", (SIGMOID,)),
    Bug("the sign of a positive's gradient", "kernels", OF_SIGMOIDS,
        "dz = tl.where(positive, -dz, dz)", "dz = tl.where(positive, dz, dz)", (SIGMOID,)),

    # contrastive/
    Bug("the diagonal of a later chunk", "eager", "logitless/eager/contrastive.py",
        "diagonal=None if diagonal is None else diagonal + rows.start", "diagonal=diagonal",
        (INFO_NCE,)),
    Bug("the scale of the gradient", "contrastive", "logitless/contrastive/info_nce.py",
        "factored = factor * pairs.scale", "factored = factor", (INFO_NCE,)),
    Bug("half of a symmetric loss", "contrastive", "logitless/contrastive/info_nce.py",
        "0.5 if how.symmetric else 1.0", "1.0", (INFO_NCE,)),
    Bug("ignored rows in a mean", "contrastive", "logitless/contrastive/info_nce.py",
        "count = (~ignored).sum().double()", "count = count", (INFO_NCE,)),
    Bug("the backend of backward", "contrastive", "logitless/contrastive/info_nce.py",
        "Similarities(pairs.a, how.ring.largest, how.workspace, backend)",
        "Similarities(pairs.a, how.ring.largest, how.workspace)", (CALLS,)),
    Bug("stale gradients in a second backward", "contrastive", "logitless/contrastive/sigmoid.py",
        "sums, ctx.sums = ctx.sums, None", "sums = ctx.sums", (SIGMOID,)),
    Bug("sums that stay on another rank", "contrastive", "logitless/contrastive/ring.py",
        "sums = self.ranks.shift(sums, coming, len(given)).wait()",
        "sums = sums if step == self.count - 1 else self.ranks.shift(sums, coming).wait()",
        (RING,)),
    Bug("columns of the mask of another rank", "contrastive", "logitless/contrastive/ring.py",
        "return sum(self.columns[:owner])", "return 0", (RING,)),
    Bug("gradients that DDP averages", "contrastive", "logitless/contrastive/info_nce.py",
        "factor = factor * pairs.ring.count", "factor = factor * 1", (RING,)),
    Bug("a scale beyond its bound", "contrastive", "logitless/contrastive/modules.py",
        "self.log_scale.clamp_(max=math.log(self.max_scale))", "pass", (CALLS,)),
)  # fmt: skip
