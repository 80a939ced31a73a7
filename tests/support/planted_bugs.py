"""The bugs that planted.py plants, over all rooms of the library.

A bug replaces one text of one file by another text. The replaced text occurs once in the file. Each
bug is a mistake that is easy to make. Most bugs show only for some inputs.
"""

from typing import NamedTuple


class Bug(NamedTuple):
    name: str
    room: str
    file: str
    right: str  # occurs once in the file
    wrong: str
    tests: tuple[str, ...]  # the files or folders that should find the bug


LOSSES = "tests/losses/test_"
CROSS_ENTROPY, DENSE = f"{LOSSES}cross_entropy.py", f"{LOSSES}dense_teacher.py"
SPARSE, ROW_LOSS = f"{LOSSES}sparse_teacher.py", f"{LOSSES}row_loss.py"
STATISTICS = f"{LOSSES}statistics.py"
LINEAR, BLOCKS, SUMS = (f"tests/heads/test_{x}.py" for x in ("linear", "blocks", "gradient_sums"))
SHARD, SHARD_HEADS = "tests/parallel/test_shard.py", "tests/parallel/test_shard_heads.py"
TOPK = "tests/kernels/test_topk.py"
FUNCTIONS, VIEWS = "tests/lazy/test_torch_functions.py", "tests/lazy/test_views.py"
LAZY_TEACHERS = "tests/lazy/test_teachers.py"

BUGS = (
    # contract.py
    Bug("t_squared is T", "contract.py", "logitless/contract.py",
        "return None, self.temperature**2", "return None, self.temperature", (DENSE,)),
    Bug("softcap not folded", "contract.py", "logitless/contract.py",
        "softcap=None if softcap is None else softcap / scale,", "softcap=softcap,",
        (LAZY_TEACHERS,)),
    Bug("row temperature not folded", "contract.py", "logitless/contract.py",
        "row_temperature=None if by_row is None else by_row / scale,", "row_temperature=by_row,",
        (FUNCTIONS,)),
    Bug("constants made in inference", "contract.py", "logitless/contract.py",
        "with torch.inference_mode(False):", "with torch.no_grad():",
        ("tests/test_contract.py",)),

    # eager/
    Bug("eager: ignored rows counted", "eager", "logitless/eager/rows.py",
        "total = live.sum()", "total = torch.ones_like(live).sum()", (CROSS_ENTROPY,)),
    Bug("eager: smoothing by V - 1", "eager", "logitless/eager/cross_entropy.py",
        "label_smoothing / reading.vocab", "label_smoothing / (reading.vocab - 1)",
        (CROSS_ENTROPY,)),
    Bug("eager: weights in fp32", "eager", "logitless/eager/cross_entropy.py",
        "v, live = weight.to(full)[", "v, live = weight.float()[", (CROSS_ENTROPY,)),
    Bug("eager: smoothing without weights", "eager", "logitless/eager/stats_fwd.py",
        "- mass * log_s", "- reading.vocab * log_s", (CROSS_ENTROPY,)),
    Bug("eager: entropy of merged parts", "eager", "logitless/eager/stats_fwd.py",
        "(state[..., fields.W] * scale + moved * (s * scale)).sum(1)",
        "(state[..., fields.W] * scale).sum(1)", (SHARD,)),
    Bug("eager: last row of a chunk", "eager", "logitless/eager/rows.py",
        "for i in range(0, x.shape[0], step))", "for i in range(0, x.shape[0] - 1, step))",
        ("tests/eager/test_rows.py",)),
    Bug("eager: bad id is 0", "eager", "logitless/eager/stats_bwd.py",
        "self.a = torch.where(bad, torch.nan, self.a)", "self.a = torch.where(bad, 0.0, self.a)",
        (BLOCKS,)),
    Bug("eager: softcap slope at ids", "eager", "logitless/eager/gather.py",
        "(picked.reshape(at.shape) / reading.softcap).square()",
        "(picked.reshape(at.shape) / reading.softcap)", (SPARSE,)),
    Bug("eager: slots' JSD beta", "eager", "logitless/eager/slot_divergence.py",
        "return beta * f_p + (1 - beta) * f_q, (1 - beta) * f_q",
        "return (1 - beta) * f_p + beta * f_q, beta * f_q", (SPARSE,)),
    Bug("eager: JSD gradient beta", "eager", "logitless/eager/pair.py",
        "gain = gain * (1 - pair.blend)", "gain = gain * pair.blend", (DENSE,)),
    Bug("eager: ties to the higher id", "eager", "logitless/eager/topk.py",
        "keys |= LAST ^ torch.arange(x.shape[1], device=x.device)\n"
        "    return keys.topk(k, dim=1).values & LAST ^ LAST",
        "keys |= torch.arange(x.shape[1], device=x.device)\n"
        "    return keys.topk(k, dim=1).values & LAST", (TOPK,)),

    # kernels/
    Bug("kernels: padding is logit 0", "kernels", "logitless/kernels/state.py",
        "y = tl.where(mask, y, -INF)", "y = tl.where(mask, y, 0.0)",
        ("tests/kernels/test_stats_fwd.py",)),
    Bug("kernels: reference of parts", "kernels", "logitless/kernels/stats_merge.py",
        "c = tl.sum(c_p + n_p * (ref_p - ref), axis=0)", "c = tl.sum(c_p, axis=0)", (SHARD,)),
    Bug("kernels: bad label has gradient", "kernels", "logitless/kernels/label_bwd.py",
        'a = tl.where(valid, a, float("nan"))', "a = coefs.a",
        ("tests/kernels/test_bounds.py",)),
    Bug("kernels: softcap slope", "kernels", "logitless/kernels/bwd_tile.py",
        "dx = (dz * slope).to(tile.DX.dtype.element_ty)",
        "dx = dz.to(tile.DX.dtype.element_ty)", (CROSS_ENTROPY,)),
    Bug("kernels: rank's start in backward", "kernels", "logitless/kernels/bwd_tile.py",
        "return label - start", "return label", (SHARD,)),
    Bug("kernels: rank's start of argmax", "kernels", "logitless/kernels/stats_split_fwd.py",
        "arg = tl.where(arg == NOWHERE, NOWHERE, arg + start)",
        "arg = tl.where(arg == NOWHERE, NOWHERE, arg)", (SHARD,)),
    Bug("kernels: repeated ids overwrite", "kernels", "logitless/kernels/ids_bwd.py",
        "repeated = tl.load(STATE + STATE_REPEATS) != 0", "repeated = False", (SPARSE,)),
    Bug("kernels: -0 below 0", "kernels", "logitless/kernels/topk_keys.py",
        "_flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))",
        "_flip(x.to(tl.int32, bitcast=True))", (TOPK,)),
    Bug("kernels: ignored rows counted", "kernels", "logitless/kernels/reduce.py",
        "return rows, mask, mask & is_live(label, ignore_index)", "return rows, mask, mask",
        (CROSS_ENTROPY,)),
    Bug("kernels: weights of smoothing", "kernels", "logitless/kernels/cross_entropy.py",
        "n = tl.load(SUM_W).to(tl.float32)", "n = V.to(tl.float32)", (CROSS_ENTROPY,)),
    Bug("kernels: KL without temperature", "kernels", "logitless/kernels/pair_fwd.py",
        "value = state.c / state.s_p * inv_t", "value = state.c / state.s_p", (DENSE,)),
    Bug("kernels: bad label unwritten", "kernels", "logitless/kernels/nll_fwd_bwd.py",
        "mask=has_label | ((lo == 0) & (not valid))", "mask=has_label",
        ("tests/kernels/test_bounds.py",)),

    # core/
    Bug("mean without class weights", "core", "logitless/core/evaluate.py",
        "mass = loss.mass(backend, x.dtype)", "mass = None", (CROSS_ENTROPY,)),
    Bug("ignored row times inf", "core", "logitless/core/loss.py",
        "return values if ignored is None else torch.where(ignored, 0.0, values)",
        "return values", (f"{LOSSES}sparse_teacher_autograd.py",)),
    Bug("class weight not saved", "core", "logitless/core/loss.py",
        "label=label, ids=ids, class_weight=class_weight, row_temperature=row_temperature",
        "label=label, ids=ids, row_temperature=row_temperature", (CROSS_ENTROPY,)),
    Bug("in place: fp16 without share", "core", "logitless/core/in_place.py",
        "scale = upstream if ctx.share is None else upstream * ctx.share", "scale = upstream",
        ("tests/core/test_in_place.py",)),
    Bug("shapes compared by size", "core", "logitless/core/checks.py",
        "    if t.shape != x.shape[:-1]:\n", "    if t.numel() != x.shape[:-1].numel():\n",
        ("tests/core/test_checks.py",)),
    Bug("a passed check forgets grad", "core", "logitless/core/call.py",
        "(a.__class__, a.shape, a.dtype, a.device, a.requires_grad)",
        "(a.__class__, a.shape, a.dtype, a.device)", (DENSE,)),
    Bug("uint64 target wraps", "core", "logitless/core/call.py",
        "ids = torch.where(ids < 0, 2**63 - 1, ids)", "pass", (STATISTICS,)),
    Bug("operator returns a constant", "core", "logitless/core/operators.py",
        "saved = [t.clone() if t.shape[:1] == (1,) else t for t in saved]", "saved = list(saved)",
        ("tests/core/test_operators.py",)),

    # heads/
    Bug("main_grad overwritten", "heads", "logitless/heads/total.py",
        "head.main_grad.addcmul_(gradients.weight, scale)",
        "head.main_grad.copy_(gradients.weight * scale)", (SUMS,)),
    Bug("second backward scaled twice", "heads", "logitless/heads/total.py",
        "gradients, self.gradients = self.gradients, None", "gradients = self.gradients",
        (LINEAR,)),
    Bug("row_weight without share", "heads", "logitless/heads/total.py",
        "d_row_weight = values if share is None else values * share", "d_row_weight = values",
        (LINEAR,)),
    Bug("index of rows used twice", "heads", "logitless/heads/chunks.py",
        "slice(start, end) if self.index is None else self.index[start:end]",
        "slice(start, end) if self.index is None else self.index[self.index[start:end]]",
        ("tests/heads/test_chunks.py",)),
    Bug("kept block overlaps its rows", "heads", "logitless/heads/plan.py",
        "if (len(kept) + 1) * rows <= block * width:",
        "if (len(kept) + 1) * rows <= (block + 1) * width:", ("tests/heads/test_plan.py",)),
    Bug("argmax 0 of an ignored row", "heads", "logitless/heads/per_row.py",
        "fill = 0.0 if t.is_floating_point() else -1", "fill = 0",
        ("tests/heads/test_per_row.py",)),
    Bug("bias gradient of the last group", "heads", "logitless/heads/blocks.py",
        "self.d_bias[columns] += dz.sum(0, dtype=self.d_bias.dtype)",
        "self.d_bias[columns] = dz.sum(0, dtype=self.d_bias.dtype)", (BLOCKS,)),
    Bug("fp16 summed in fp16", "heads", "logitless/heads/gradient_sums.py",
        "if dtype == torch.float16 or (dtype", "if (dtype", (SUMS,)),
    Bug("capped teacher scaled inside", "heads", "logitless/heads/head.py",
        "return self.replace(cap=self.cap * factor)",
        "return self.replace(scale=self.scale * factor)", (FUNCTIONS,)),

    # targets/
    Bug("padding has probability 1", "targets", "logitless/targets/sparse.py",
        "pad(logprobs, (0, missing), value=-torch.inf)", "pad(logprobs, (0, missing))",
        ("tests/targets/test_sparse.py",)),
    Bug("masked mass counted", "targets", "logitless/targets/checks.py",
        "p = torch.where(mask != 0, p, 0.0)", "p = p.clone()", ("tests/targets/test_checks.py",)),
    Bug("repeated id counted twice", "targets", "logitless/targets/checks.py",
        "repeated[..., 1:] = ids[..., 1:] == ids[..., :-1]", "repeated[..., 1:] = False",
        ("tests/targets/test_checks.py",)),
    Bug("gap in a file accepted", "targets", "logitless/targets/safetensors.py",
        "if entry.begin != end:", "if entry.begin < end:",
        ("tests/targets/test_safetensors.py",)),

    # losses/
    Bug("sign of the entropy's gradient", "losses", "logitless/losses/statistics.py",
        "sums.add(contract.A, -d * sums.state[:, contract.ENTROPY])",
        "sums.add(contract.A, d * sums.state[:, contract.ENTROPY])", (STATISTICS,)),
    Bug("merge moves w the wrong way", "losses", "logitless/losses/statistics.py",
        "w = w + part.w * d.exp() + d * (part.s * d.exp())",
        "w = w + part.w * d.exp() - d * (part.s * d.exp())", (f"{LOSSES}partial.py",)),
    Bug("masked slot is id 0", "losses", "logitless/losses/sparse_teacher.py",
        "ids = torch.where(real, ids, NO_ID)", "ids = torch.where(real, ids, 0)", (SPARSE,)),
    Bug("gathered mean over slots", "losses", "logitless/losses/sparse_teacher.py",
        "max(rows_in(student_logits.shape[:-1]), 1)", "max(rows_in(student_logits.shape), 1)",
        (f"{LOSSES}gathered_kl.py",)),
    Bug("ends of JSD exchanged", "losses", "logitless/losses/dense_teacher.py",
        'kind = "reverse" if blend else "forward"', 'kind = "forward" if blend else "reverse"',
        (DENSE,)),
    Bug("teacher scaled twice", "losses", "logitless/losses/dense_teacher.py",
        "scaled_teacher(self.pair.teacher, 1 / scale)", "scaled_teacher(self.pair.teacher, scale)",
        (LAZY_TEACHERS,)),
    Bug("formula returns the user's tensor", "losses", "logitless/losses/row_loss.py",
        "return (value.detach().clone(),)", "return (value.detach(),)", (ROW_LOSS,)),
    Bug("ignored row's input times inf", "losses", "logitless/losses/row_loss.py",
        "flat = torch.where(ignored.unsqueeze(-1), 0.0, flat)", "flat = flat.clone()",
        (ROW_LOSS,)),

    # parallel/
    Bug("class weights from column 0", "parallel", "logitless/parallel/rank_merge.py",
        "weight = weight[self.start : self.start + self.width]", "weight = weight[: self.width]",
        (SHARD,)),
    Bug("rank's start of the top k", "parallel", "logitless/parallel/rank_merge.py",
        "ids.view(rows, own) + self.start", "ids.view(rows, own)", (SHARD,)),
    Bug("tail moved the wrong way", "parallel", "logitless/parallel/rank_merge.py",
        "moved = shift - state[:, contract.SHIFT]", "moved = state[:, contract.SHIFT] - shift",
        (SHARD,)),
    Bug("d_hidden not all-reduced", "parallel", "logitless/parallel/shard.py",
        "backend.all_reduce = self.ranks.all_reduce", "pass", (SHARD_HEADS,)),
    Bug("global mean not averaged", "parallel", "logitless/parallel/mean.py",
        "(share * ranks.count if averaged else share)", "(share * 1 if averaged else share)",
        ("tests/parallel/test_rank_processes.py",)),

    # lazy/
    Bug("pieces of equal length", "lazy", "logitless/lazy/views.py",
        "narrow(z, dim, sum(sizes[:i]), size)", "narrow(z, dim, i * size, size)", (FUNCTIONS,)),
    Bug("rows not permuted", "lazy", "logitless/lazy/views.py",
        "order = [rows.index(dim) for dim in dims if dim != at]",
        "order = list(range(len(rows)))", (FUNCTIONS,)),
    Bug("log-probabilities not scaled", "lazy", "logitless/lazy/recipe.py",
        "z = z if self.factor == 1 else z * self.factor", "z = z.clone()", (FUNCTIONS,)),
    Bug("second dense gradient dropped", "lazy", "logitless/lazy/gradient.py",
        "dense if more is None else dense + more", "dense", (FUNCTIONS,)),
    Bug("mean of no rows is 0", "lazy", "logitless/lazy/reductions.py",
        "loss = torch.where(mass.sum() == 0, torch.nan, loss)", "loss = loss.clone()",
        (FUNCTIONS,)),
    Bug("sum of log p forgets V", "lazy", "logitless/lazy/reductions.py",
        "stats.total - z.shape[-1] * stats.lse", "stats.total - stats.lse", (FUNCTIONS,)),
    Bug("changed hidden not noticed", "lazy", "logitless/lazy/nodes.py",
        "z.recipe.check(numbers=False)\n        ctx.set_materialize_grads(False)\n"
        "        ctx.like, ctx.back",
        "ctx.set_materialize_grads(False)\n        ctx.like, ctx.back", (VIEWS,)),

    # store/
    Bug("shared beginning taken for one document's", "store", "logitless/store/index.py",
        "torch.maximum(before[place], after[place]) >= length", "before[place] < 0",
        ("tests/store/test_lookup.py",)),
    Bug("last block not compared", "store", "logitless/store/blocks.py",
        "for at in range(0, len(data), BLOCK)]", "for at in range(0, len(data) - BLOCK, BLOCK)]",
        ("tests/store/test_blocks.py",)),
    Bug("mass lost in rounding", "store", "logitless/store/rows.py",
        "top = torch.where(top == -torch.inf, top, mass - rounded_mass)", "top = top.clone()",
        ("tests/store/test_format.py",)),
    Bug("tokens from inside a byte", "store", "logitless/store/shard.py",
        "[(begin - begin % 8, end", "[(begin - begin % 2, end",
        ("tests/store/test_format.py",)),
    Bug("journal of a written shard", "store", "logitless/store/journal.py",
        "if not is_known:", "if True:", ("tests/store/test_journal.py",)),
    Bug("pending document added twice", "store", "logitless/store/writer.py",
        "if _digest(tokens) in self.digests:", "if False:", ("tests/store/test_journal.py",)),
    Bug("rows with holes in them", "store", "logitless/store/capture.py",
        "contiguous = int(places[-1] - places[0]) + 1 == len(places)", "contiguous = True",
        ("tests/store/test_capture.py",)),
    Bug("server's rows not moved", "store", "logitless/store/importers.py",
        "[*entries[1:], after]", "[*entries[:-1], after]",
        ("tests/store/test_importers.py",)),

    # nn.py, hf.py
    Bug("module passes ce_weight", "nn.py", "logitless/nn.py",
        '"kd_weight": kd_weight,', '"kd_weight": ce_weight,', ("tests/test_nn.py",)),
    Bug("module forgets z_loss", "nn.py", "logitless/nn.py",
        '            "z_loss": self.z_loss,\n', "", ("tests/test_nn.py",)),
    Bug("module's beta", "nn.py", "logitless/nn.py",
        'super().__init__({"beta": beta,', 'super().__init__({"beta": 1 - beta,',
        ("tests/test_nn.py",)),
    Bug("log counts one batch's tokens", "hf.py", "logitless/hf.py",
        "items = count if num_items_in_batch is None else num_items_in_batch", "items = count",
        ("tests/test_hf.py",)),
    Bug("padded teacher's head", "hf.py", "logitless/hf.py",
        "logits = logits[..., : self._vocabulary()]", "logits = logits[..., :]",
        ("tests/test_hf.py",)),

    # cli/
    Bug("all-reduce moves half", "cli", "logitless/cli/scale.py",
        "reduce=latency + 2 * (tp - 1)", "reduce=latency + (tp - 1)", ("tests/cli/test_scale.py",)),
    Bug("least strict reference", "cli", "logitless/cli/bench/results.py",
        "factor * min(known.values())", "factor * max(known.values())",
        ("tests/cli/test_bench.py",)),
    Bug("reference counts ignored rows", "cli", "logitless/cli/formulas.py",
        "kept = target[target != IGNORED]", "kept = target.clamp(min=0)",
        ("tests/cli/test_bench.py",)),
)  # fmt: skip
