"""What a hunt for failures found, by its numbers: each a test of what was seen and its neighbours.

Elsewhere:
5   test_distributed.py, every case: training on two ranks equals one process
8   test_targets.py: log-probabilities above 0, masses above 1
12  test_targets.py and test_stats.py: ids of narrow and of unsigned dtypes
16  test_slots.py, `gathered` and `gathered_renorm`: the student over all slots, or those that count
19  test_slots.py::test_logits_may_have_an_offset, at every temperature
23  `make test-newest`, benchmarks/results/versions.txt
How many fail with the library they were found in: benchmarks/results/hunt.txt.
What was said badly is in test_messages.py, what was done by hand in test_targets.py, test_lazy.py.
"""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from calls import CALLS, CLASSES, MASK, TARGET, TEACHER, N, V, leaves, made, normal, outcome
from sizes import DEVICE
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless.cli import memory as _memory
from logitless.core import loss as _loss

WEIGHED = {
    "cross_entropy": lambda x, w: ll.cross_entropy(x, TARGET, row_weight=w),
    "kl_div": lambda x, w: ll.kl_div(x, TEACHER, direction="forward", row_weight=w),
    "soft_cross_entropy": lambda x, w: ll.soft_cross_entropy(x, TEACHER.softmax(-1), row_weight=w),
    "topk_distill": lambda x, w: ll.topk_distill(
        x, ll.capture_topk(TEACHER, 3), divergence="forward_kl", support="tail", row_weight=w
    ),
}


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("weight", [1.0, [1.0] * N, "heavy", torch.ones(N, 2), torch.ones(1)])
@pytest.mark.parametrize("loss", WEIGHED.values(), ids=WEIGHED.keys())
def test_number_01_a_row_weight_that_fits_no_rows(loss, weight, source):
    """Over a head row_weight=1.0 gave the sum for the mean, and (4, 2) weighed rows 1, 9, 1, 9."""
    with pytest.raises((TypeError, ValueError), match="row_weight must"):
        loss(made(source, leaves(source)), weight)


@pytest.mark.parametrize(
    ("dtype", "label", "ignored"),
    [
        (torch.uint8, 156, -100),
        (torch.int8, -1, 255),
        (torch.int32, 0, 2**32),
        (torch.int16, -100, 65436),
    ],
)
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_number_02_a_label_that_equals_ignore_index_only_in_its_own_dtype(
    dtype, label, ignored, source
):
    """Over a head uint8 label 156 was -100, and int32 zeros were 2**32: their loss was 0."""
    hidden, weight = normal(2, 5, seed=1), normal(200, 5, seed=2)
    logits = ll.LinearLogits(hidden, weight) if source == "head" else hidden @ weight.T
    labels = torch.full((2,), label, dtype=dtype, device=weight.device)
    if label < 0:  # no class, and not ignored either
        with pytest.raises(IndexError, match=f"got {label} at row 0"):
            ll.cross_entropy(logits, labels, ignore_index=ignored)
        return
    got = ll.cross_entropy(logits, labels, ignore_index=ignored)
    torch.testing.assert_close(got, F.cross_entropy(hidden @ weight.T, labels.long()))


DIFFERENTIABLE = ("cross_entropy", "kl_div", "jsd", "topk_distill", "row_loss", "score")


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_number_03_a_second_derivative_is_refused_not_zero(name, source):
    """hessian and hvp were zeros; over a head a gradient penalty had no history."""
    parts = [t.requires_grad_() for t in leaves(source)]
    out = CALLS[name](made(source, parts))[0].sum()
    (first, *_) = torch.autograd.grad(out, parts, create_graph=True)
    with pytest.raises(RuntimeError, match="must not be differentiated twice"):
        first.square().sum().backward()


def test_number_03_a_hessian_is_refused_not_zero():
    x = leaves("tensor")[0]
    with pytest.raises(RuntimeError, match="must not be differentiated twice"):
        torch.autograd.functional.hessian(lambda x: ll.cross_entropy(x, TARGET), x)


@pytest.mark.parametrize("name", ["jsd", "kl_div", "topk_distill", "cross_entropy"])
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_number_04_backward_outside_of_the_block_that_chose_the_implementation(name, source):
    """The gradient of a jsd by the kernels was 20 to 36 % off outside `with ll.impl("triton")`."""
    want = outcome(name, source)
    parts = [t.requires_grad_() for t in leaves(source)]
    with ll.impl("triton"):
        out = CALLS[name](made(source, parts))[0]
    got = torch.autograd.grad(out, parts)
    for a, b in zip(got, want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_number_06_what_backward_reads_may_not_change(reduction, source, monkeypatch):
    """A target written to between forward and backward over a head gave a wrong gradient."""
    monkeypatch.setattr(_loss, "SMALL", 0)  # else the gradient of few logits is made in forward
    labels = TARGET.clone()
    parts = [t.requires_grad_() for t in leaves(source)]
    loss = ll.cross_entropy(made(source, parts), labels, reduction=reduction).sum()
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_number_07_classes_in_dimension_1_are_told_where_shapes_cannot_tell():
    """(B, V, T) logits with V = T: another loss than F.cross_entropy's, and nothing can see it."""
    x, labels = normal(2, 4, 4, seed=1), torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    want = F.cross_entropy(x, labels)
    assert not torch.allclose(ll.cross_entropy(x, labels), want)
    torch.testing.assert_close(ll.cross_entropy(x.movedim(1, -1), labels), want)
    page = (Path(__file__).parent.parent / "docs/migrating.md").read_text()
    for words in (ll.cross_entropy.__doc__, ll.nn.CrossEntropyLoss.__doc__, page):
        assert "movedim(1, -1)" in words


@pytest.mark.parametrize("name", ["score", "cross_entropy, none", "row_stats", "row_loss"])
def test_number_09_checkpointing_over_a_head(name):
    """Results a row over a head raised CheckpointError."""
    want = outcome(name, "head")
    parts = [t.requires_grad_() for t in leaves("head")]
    found = checkpoint(lambda *p: CALLS[name](made("head", p)), *parts, use_reentrant=False)
    real = [t for t in found if t.is_floating_point()]
    sum((t.double() * (i + 1)).sum() for i, t in enumerate(real)).backward()
    for part, grad in zip(parts, want[len(found) :], strict=True):
        torch.testing.assert_close(part.grad, grad)


def test_number_10_one_row_alone_over_a_head():
    """A hidden state of one dimension: TypeError from reshape."""
    hidden, weight, bias = leaves("head")
    head = ll.LinearLogits(hidden[0], weight, bias)
    logits, label = F.linear(hidden[0], weight, bias), torch.tensor(3, device=DEVICE)
    torch.testing.assert_close(ll.cross_entropy(head, label), F.cross_entropy(logits, label))
    torch.testing.assert_close(ll.logsumexp(head), logits.logsumexp(-1))
    torch.testing.assert_close(
        ll.kl_div(head, TEACHER[0], direction="forward"),
        ll.kl_div(logits, TEACHER[0], direction="forward"),
    )
    assert torch.equal(ll.capture_topk(head, 3).ids, ll.capture_topk(logits, 3).ids)


def test_number_11_a_student_and_a_teacher_by_name():
    """ll.kl_div(student=a, teacher=b), as documented: "missing 'logits'"."""
    x = leaves("tensor")[0]
    for f, how in ((ll.kl_div, {"direction": "reverse"}), (ll.jsd, {})):
        assert torch.equal(f(student=x, teacher=TEACHER, **how), f(x, TEACHER, **how))


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """A GPU looks at ids and temperatures too."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")


@pytest.fixture
def restored_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("restored_default_dtype")
def test_number_13_the_default_dtype_changes_nothing(name, impl):
    """jsd of topk_distill and the in-place path changed result or dtype, or crashed."""
    cases = [("tensor", torch.float32), ("head of two chunks", torch.bfloat16)]
    defaults = (torch.float64,)
    if impl == "eager":
        cases += [("tensor", torch.float64), ("head", torch.float32)]
        defaults += (torch.bfloat16, torch.float16)
    for source, dtype in cases:
        torch.set_default_dtype(torch.float32)
        want = outcome(name, source, dtype)
        for default in defaults:
            torch.set_default_dtype(default)
            got = outcome(name, source, dtype)
            assert [t.dtype for t in got] == [t.dtype for t in want]
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (source, dtype, default)


FUNC = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x),
    "vmap": lambda f: torch.func.vmap(lambda row: f(row.expand(N, -1))),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "forward_ad": lambda f: lambda x: forward_ad(f, x),
    "is_grads_batched": lambda f: lambda x: batched(f, x),
}
WORDS = "|".join((
    "logits must be a Tensor under torch.func", "logits must not be mapped over by torch.func.vmap",
    "logits must be differentiated in reverse, by torch.autograd.grad or torch.func.grad",
))  # fmt: skip


def forward_ad(f, x):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, x))


def batched(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, torch.ones(2, device=x.device), is_grads_batched=True)


def test_number_14_a_sharded_weight_is_refused_by_name():
    """Its part would be taken for the whole, or mixed with plain tensors, deep in PyTorch."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.randn(V, 3), mesh, [Shard(0)])
        logits = distribute_tensor(torch.randn(N, V), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"hidden must be a DTensor on the mesh of weight, got"):
            ll.LinearLogits(torch.randn(N, 3), weight)
        with pytest.raises(
            TypeError, match=r"logits must be replicated, or sharded .*Shard\(dim=0"
        ):
            ll.cross_entropy(logits, TARGET)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.15 on itself
@pytest.mark.parametrize("transform", FUNC)
@pytest.mark.parametrize("name", ["cross_entropy", "row_loss", "topk_distill", "jsd"])
def test_number_15_torch_func_is_right_or_says_what_to_do(name, transform):
    """Transforms over a head, vmap and jacrev: errors of internal names."""
    x = leaves("tensor")[0]
    hidden, weight, bias = leaves("head")

    def over_logits(x):
        return CALLS[name](x)[0]

    def over_a_head(hidden):
        return CALLS[name](ll.LinearLogits(hidden, weight, bias))[0]

    with pytest.raises(RuntimeError, match=WORDS):
        FUNC[transform](over_a_head)(hidden)
    if transform == "grad":
        torch.testing.assert_close(torch.func.grad(over_logits)(x), outcome(name, "tensor")[1])
    elif transform != "vjp":
        with pytest.raises(RuntimeError, match=WORDS):
            FUNC[transform](over_logits)(x)


def test_number_15_in_place_and_capture_under_transforms():
    x = leaves("tensor")[0].requires_grad_()
    loss = ll.cross_entropy(x * 1, TARGET, inplace=True)
    with pytest.raises(RuntimeError, match="logits must not be mapped"):
        torch.autograd.grad(loss, x, torch.ones(2, device=x.device), is_grads_batched=True)
    weight = normal(V, V, seed=1)
    for source in (lambda x: x, lambda x: ll.LinearLogits(x, weight)):
        with pytest.raises(RuntimeError, match="logits must not be mapped"):
            torch.func.vmap(lambda x, f=source: ll.capture_topk(f(x), 2).ids)(TEACHER)


@pytest.mark.parametrize("source", ["tensor", "head", "head of two chunks"])
@pytest.mark.parametrize(
    ("row", "value"), [(4, V), (5, -1)], ids=["of the second chunk", "of the last row"]
)
def test_number_17_rows_in_errors_count_from_the_first(row, value, source):
    """Over a head a bad target's row was counted within its chunk."""
    labels = TARGET.clone()
    labels[row] = value
    with pytest.raises(IndexError, match=f"got {value} at row {row}"):
        ll.cross_entropy(made(source, leaves(source)), labels)


@pytest.mark.parametrize("loss", ["jsd", "forward", "reverse", "soft"])
def test_number_18_two_heads_stay_near_their_workspace(loss):
    """jsd of two heads on a CPU peaked at 410 MiB with a workspace of 64.

    Two workspaces, one of each head, the weight's gradient, and what is in work beside them.
    """
    rows, width, vocab, space = 256, 8, 16384, 4 << 20
    student, teacher = (
        (torch.randn(rows, width).requires_grad_(), torch.randn(vocab, width).requires_grad_())
        for _ in range(2)
    )

    def run(_):
        q, p = (ll.LinearLogits(*parts, workspace=space) for parts in (student, teacher))
        if loss == "jsd":
            ll.jsd(q, p).backward()
        elif loss == "soft":
            ll.soft_cross_entropy(q, p).backward()
        else:
            ll.kl_div(q, p, direction=loss).backward()

    gradients = sum(t.numel() * t.element_size() for t in student)
    peak = _memory.extra_memory("cpu", None, run)
    assert peak <= 2 * space + 2 * gradients + (32 << 20)


def test_number_20_autocast_leaves_fp64_as_linear_does():
    """Autocast made bf16 of an fp64 head."""
    parts = leaves("head", torch.float64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert F.linear(*parts).dtype == ll.LinearLogits(*parts).dtype == torch.float64
        assert ll.LinearLogits(*(t.float() for t in parts)).dtype == torch.bfloat16
        got = ll.cross_entropy(ll.LinearLogits(*parts), TARGET)
        with pytest.raises(TypeError, match="weight must be"):  # as F.linear refuses the two
            ll.LinearLogits(parts[0], parts[1].float())
    assert torch.equal(got, ll.cross_entropy(ll.LinearLogits(*parts), TARGET))


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_number_20_class_weights_of_an_fp64_head_are_summed_in_fp64(dtype, source):
    """The mass that a mean divides by was summed in fp32."""
    parts = leaves(source, torch.float64)
    weight = (CLASSES.double() / 3).to(dtype)
    got = ll.cross_entropy(made(source, parts), TARGET, weight=weight, label_smoothing=0.1)
    x = parts[0] if source == "tensor" else F.linear(*parts)
    want = F.cross_entropy(x, TARGET, weight=weight.double(), label_smoothing=0.1)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


EXTREMES = [
    ({"softcap": 1e39}, "softcap must be in [1e-12, 1e+12], got 1e+39."),
    ({"softcap": 1e-46}, "softcap must be in [1e-12, 1e+12], got 1e-46."),
    ({"temperature": 1e-40}, "temperature must be in [1e-12, 1e+12], got 1e-40."),
    ({"temperature": 1e39}, "temperature must be in [1e-12, 1e+12], got 1e+39."),
    ({"z_loss": 1e39}, "z_loss must be in [0, 1e+12], got 1e+39."),
]


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize(("how", "words"), EXTREMES)
def test_number_21_extreme_options_are_refused(how, words, source):
    """softcap 1e39 and temperature 1e-40 gave NaN."""
    with pytest.raises(ValueError, match="must be in") as refused:
        ll.cross_entropy(made(source, leaves(source)), TARGET, **how)
    assert str(refused.value) == words


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40, 1e39, float("nan")])
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_number_21_extreme_temperatures_of_rows_are_refused_on_a_cpu(temperature, source):
    each = torch.ones(N, dtype=torch.float64, device=DEVICE)
    each[2] = temperature  # which is ignored
    logits = made(source, leaves(source))
    assert ll.cross_entropy(logits, TARGET, temperature=each).isfinite()
    each[4] = temperature
    for f in (lambda: ll.cross_entropy(logits, TARGET, temperature=each),
              lambda: ll.entropy(logits, temperature=each.roll(-4))):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"temperature must be in \[1e-12, 1e\+12\], got .* at"
        ):
            f()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1e-12}, {"temperature": 1e12}, {"softcap": 1e12}, {"softcap": 1e-12},
        {"temperature": 1e-12, "softcap": 1e12}, {"z_loss": 1e12},
    ],
    ids=str,
)  # fmt: skip
def test_number_21_the_limits_themselves_are_finite(how, dtype, impl):
    x = leaves("tensor", dtype)[0].requires_grad_()
    loss = ll.cross_entropy(x, TARGET, **how)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("source", ["tensor", "head"])
def test_number_22_a_batch_of_ignored_rows_is_checked_too(source):
    """With all rows ignored, nothing was validated over a head."""
    logits, ignored = made(source, leaves(source)), torch.full((N,), -100, device=DEVICE)
    bad = [
        {"row_weight": torch.ones(N + 1)}, {"weight": torch.ones(V - 1)}, {"reduction": "avg"},
        {"label_smoothing": 2}, {"temperature": torch.ones(N, 1)},
    ]  # fmt: skip
    for how in bad:
        with pytest.raises(ValueError, match="must"):
            ll.cross_entropy(logits, ignored, **how)
    with pytest.raises(ValueError, match="teacher must have shape"):
        ll.kl_div(logits, TEACHER[:, 1:], direction="forward", mask=MASK & False)
    assert ll.cross_entropy(logits, ignored) == 0


def test_number_24_tests_of_a_gpu_call_what_there_is():
    """A GPU test passed an argument that `measure` no longer had: nobody had run it.

    Without a GPU those tests run at small sizes; the few that cannot are marked with the reason.
    """
    here = Path(__file__).parent / "gpu"
    assert "skip" not in (here / "conftest.py").read_text()
    for path in sorted(here.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        tests = [f for f in tree.body if isinstance(f, ast.FunctionDef) and "test_" in f.name]
        marked = [f for f in tests if any("mark.gpu" in ast.unparse(d) for d in f.decorator_list)]
        assert len(marked) < len(tests), f"{path.name} runs nowhere but on a GPU"
