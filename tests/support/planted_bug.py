"""The class `Bug`, and the paths of the test files that should find the planted bugs."""

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
SLOT_LOSS, TVD = f"{LOSSES}slot_loss.py", f"{LOSSES}tvd.py"
SAMPLED, COUNTS = f"{LOSSES}capture_sampled.py", "tests/store/test_counts.py"
STATISTICS, KEPT_SCORES = f"{LOSSES}statistics.py", f"{LOSSES}kept_scores.py"
RANK, SAMPLED_SOFTMAX = f"{LOSSES}rank.py", f"{LOSSES}sampled_softmax.py"
ON_CHIP = "tests/heads/test_on_chip.py"
ONE_PASS = "tests/kernels/test_nll_fwd_bwd.py"
LINEAR, BLOCKS, SUMS = (f"tests/heads/test_{x}.py" for x in ("linear", "blocks", "gradient_sums"))
PRODUCTS, SMALL = "tests/heads/test_gemms.py", "tests/heads/test_small.py"
SMALL_TOTAL, TOTAL = "tests/heads/test_small_total.py", "logitless/heads/small_total.py"
LOW_RANK, QUANTIZED = "tests/heads/test_low_rank.py", "tests/heads/test_quantized.py"
LAZY_SUMS, NEIGHBOURS = "tests/lazy/test_sums.py", "tests/lazy/test_neighbours.py"
ANSWERS = "tests/lazy/test_metrics_after_loss.py"
SHARD, SHARD_HEADS = "tests/parallel/test_shard.py", "tests/parallel/test_shard_heads.py"
TOPK, NARROW, COEFFICIENTS = (
    f"tests/kernels/test_{x}.py" for x in ("topk", "narrow", "stats_coefficients")
)
FUNCTIONS, VIEWS = "tests/lazy/test_torch_functions.py", "tests/lazy/test_views.py"
LAZY_TEACHERS = "tests/lazy/test_teachers.py"
ELEMENTWISE, GRADIENT = "tests/lazy/test_elementwise.py", "tests/lazy/test_gradient.py"
INFERENCE, REPORT = "tests/lazy/test_inference.py", "tests/lazy/test_report.py"
COMPILED, DORA = "tests/lazy/test_compiled_models.py", "tests/lazy/test_dora.py"
SEVERAL_HEADS = "tests/lazy/test_several_heads.py"
