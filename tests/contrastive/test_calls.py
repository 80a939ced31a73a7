"""What all contrastive losses share: refusals, autograd, GEMMs, memory, autocast, torch.compile."""

import copy
import pickle
from unittest import mock

import pytest
import torch

import logitless as ll
from logitless.contrastive import similarities
from logitless.heads import gemms, gradient_sums
from logitless.parallel.ranks import Alone
from tests.support.contrastive import FUNCTIONS, SMALL, embeddings
from tests.support.laws import host_reads_nothing
from tests.support.refusals import refuses

A, B = torch.zeros(4, 3), torch.zeros(6, 3)
ONE_WAY = {"symmetric": False}

BOTH = {
    "a list": (([1.0], B), {}, TypeError, "a must be a Tensor, got list."),
    "a number": ((A, 1.0), {}, TypeError, "b must be a Tensor, got float."),
    "integers": ((A, B.int()), {}, TypeError,
                 "b must be float16, bfloat16, float32 or float64, got torch.int32."),
    "three dimensions": ((A[None], B), {}, ValueError,
                         "a must have shape (rows, D) with at least one column, got (1, 4, 3)."),
    "no columns": ((A[:, :0], B), {}, ValueError,
                   "a must have shape (rows, D) with at least one column, got (4, 0)."),
    "widths": ((A, B[:, :2]), {}, ValueError,
               "b must have shape (M, 3) to match a (4, 3), got (6, 2)."),
    "dtypes": ((A, B.double()), {}, TypeError,
               "b must be torch.float32 like a, got torch.float64."),
    "scale": ((A, A), {"scale": "2"}, TypeError, "scale must be a number, got '2'."),
    "infinite scale": ((A, A), {"scale": float("inf")}, ValueError,
                       "scale must be in [-1e+12, 1e+12], got inf."),
    "large scale": ((A, A), {"scale": 3e38}, ValueError,
                    "scale must be in [-1e+12, 1e+12], got 3e+38."),
    "huge scale": ((A, A), {"scale": 10**400}, ValueError,
                   f"scale must be in [-1e+12, 1e+12], got {10**400}."),
    "group": ((A, A), {"group": "x"}, TypeError,
              "group must be a process group, a DeviceMesh or None, got 'x'."),
    "scales": ((A, A), {"scale": torch.ones(2)}, ValueError,
               "scale must hold one number, got shape (2,)."),
    "integer scale": ((A, A), {"scale": torch.tensor(1)}, TypeError,
                      "scale must hold floating-point numbers, got torch.int64."),
    "reduction": ((A, A), {"reduction": "avg"}, ValueError,
                  "reduction must be one of 'mean', 'sum', 'none', got 'avg'."),
    "workspace": ((A, A), {"workspace": 0}, ValueError, "workspace must be positive, got 0."),
    "averaged": ((A, A), {"averaged": 1}, TypeError, "averaged must be True or False, got 1."),
}  # fmt: skip
ONE = {
    "rows": ((A, B), {}, ValueError,
             "b must have as many rows as a (4) with symmetric=True, got (6, 3); pass "
             "symmetric=False for different numbers of rows."),
    "symmetric": ((A, A), {"symmetric": None}, TypeError,
                  "symmetric must be True or False, got None."),
    "both": ((A, A), {"positives": torch.zeros(4).long()}, ValueError,
             "positives must be None with symmetric=True, because both directions use the pairs "
             "(i, i), got a tensor; pass symmetric=False."),
    "no mask": ((A, A), {"mask": [True]}, TypeError, "mask must be a Tensor, got list."),
    "mask dtype": ((A, A), {"mask": torch.ones(4, 4)}, TypeError,
                   "mask must be torch.bool, True for pairs that are left out, got torch.float32."),
    "mask shape": ((A, A), {"mask": torch.ones(4, 3) > 0}, ValueError,
                   "mask must have shape (4, 4), one entry for each row of a and each row of b, "
                   "got (4, 3)."),
    "labels": ((A, A), {"labels": 3}, TypeError,
               "labels must be a Tensor, or a pair (labels of a, labels of b), got int."),
    "three labels": ((A, A), {"labels": [A, A, A]}, TypeError,
                     "labels must be a Tensor, or a pair (labels of a, labels of b), got 3 items."),
    "half of the labels": ((A, A), {"labels": (torch.zeros(4).long(), None)}, TypeError,
                           "labels of b must be a Tensor of integers, got NoneType."),
    "float labels": ((A, A), {"labels": torch.zeros(4)}, TypeError,
                     "labels of a must hold integers, got torch.float32."),
    "labels shape": ((A, B), {**ONE_WAY, "labels": torch.zeros(4).long()}, ValueError,
                     "labels of b must have shape (6,) to match b (6, 3), got (4,)."),
    "ignore_index": ((A, A), {"ignore_index": None}, TypeError,
                     "ignore_index must be an int, got None."),
}  # fmt: skip
POSITIVES = {
    "too few": ((B, A), {}, ValueError,
                "b must have at least 6 rows, one positive for each row of a, got (4, 3). "
                "If row i of b is not the positive of row i of a, pass positives."),
    "float": ((A, B), {"positives": torch.zeros(4)}, TypeError,
              "positives must hold integers, got torch.float32."),
    "shape": ((A, B), {"positives": torch.zeros(6).long()}, ValueError,
              "positives must have shape (4,) to match a (4, 3), got (6,)."),
    "nothing": ((A, B[:0]), {"positives": torch.zeros(4).long()}, ValueError,
                "b must have at least one row, got (0, 3)."),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_refusals(name, case):
    tensors, how, kind, message = BOTH[case]
    with refuses(kind, message):
        FUNCTIONS[name][0](*tensors, **how)


@pytest.mark.parametrize("case", ONE)
def test_refusals_of_contrastive(case):
    tensors, how, kind, message = ONE[case]
    with refuses(kind, message):
        ll.contrastive(*tensors, **how)


@pytest.mark.parametrize("case", POSITIVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_refusals_of_positives(name, case):
    tensors, how, kind, message = POSITIVES[case]
    more = ONE_WAY if name == "contrastive" else {}
    with refuses(kind, message):
        FUNCTIONS[name][0](*tensors, **how, **more)


def test_refusals_of_values():
    positives = torch.tensor([0, 1, 6, 3])
    message = "positives must be in [0, 6) or ignore_index (-100), got 6 at row 2."
    with refuses(IndexError, message):
        ll.contrastive(A, B, symmetric=False, positives=positives)
    with refuses(IndexError, "positives must be in [0, 6), got 6 at row 2."):
        ll.sigmoid_contrastive(A, B, positives=positives)
    with refuses(TypeError, "bias must be a number, got None."):
        ll.sigmoid_contrastive(A, A, bias=None)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_positives_of_every_integer_dtype(name, dtype):
    """Row 156 is -100 in 8 bits, and row 200 is -56 in 8 bits."""
    a, b = embeddings(3, 300, torch.float32)
    more = ONE_WAY if name == "contrastive" else {}
    few = torch.iinfo(dtype).max < 200
    positives = torch.tensor([5, 99, 127] if few else [5, 156, 200])
    want = FUNCTIONS[name][0](a, b, positives=positives, **more)
    assert torch.equal(FUNCTIONS[name][0](a, b, positives=positives.to(dtype), **more), want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_not_inside_invariant_or_func(name):
    function = FUNCTIONS[name][0]
    with ll.invariant(), pytest.raises(RuntimeError, match=r"inside ll\.invariant\(\)"):
        function(A, A)
    with pytest.raises(RuntimeError, match=r"differentiated by torch\.autograd"):
        torch.func.grad(lambda a: function(a, A))(A)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_gradient_alone(name, reduction, which, impl, device):
    """A tensor gets a gradient exactly when it requires one, with the same bits."""
    function, tensors = FUNCTIONS[name][0], [*embeddings(9, 9, torch.float32, device)]
    tensors.append(torch.tensor(2.0, device=device))

    def found(needed):
        a, b, scale = (t.clone().requires_grad_(i in needed) for i, t in enumerate(tensors))
        function(a, b, scale=scale, reduction=reduction).sum().backward()
        return [a.grad, b.grad, scale.grad]

    together, alone = found((0, 1, 2)), found((which,))
    for i in range(3):
        assert (alone[i] is not None) == (i == which)
    assert torch.equal(alone[which], together[which])
    assert together[which].any()


@pytest.mark.parametrize("how", [{}, {"reduction": "sum"}, {"reduction": "none"}, ONE_WAY], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("impl")
def test_backward_twice(name, how, device):
    """The second backward computes the gradients again."""
    if how is ONE_WAY and name != "contrastive":
        how = {}
    a, b = (t.requires_grad_() for t in embeddings(9, 9, torch.float32, device))
    loss = 3 * FUNCTIONS[name][0](a, b, workspace=SMALL, **how).sum()
    first = [t.clone() for t in torch.autograd.grad(loss, (a, b), retain_graph=True)]
    for x, y in zip(first, torch.autograd.grad(loss, (a, b)), strict=True):
        torch.testing.assert_close(x, y)
        assert x.any()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("impl")
def test_not_differentiated_twice(name, device):
    a, b = (t.requires_grad_() for t in embeddings(4, 4, torch.float32, device))
    (d_a,) = torch.autograd.grad(FUNCTIONS[name][0](a, b), a, create_graph=True)
    with pytest.raises(RuntimeError, match="must not be differentiated twice"):
        d_a.sum().backward()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_after_the_choice_of_a_backend(name, impl, device):
    """The numbers that forward saves have the units of its backend."""
    a, b = (t.requires_grad_() for t in embeddings(9, 9, torch.float32, device))
    want = torch.autograd.grad(FUNCTIONS[name][0](a, b, reduction="none").sum(), (a, b))
    other = {"eager": "triton", "triton": "eager"}[impl]
    loss = FUNCTIONS[name][0](a, b, reduction="none").sum()
    with ll.impl(other):
        got = torch.autograd.grad(loss, (a, b))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("nobody_looks")
def test_the_host_reads_nothing(name, device):
    a, b = (t.requires_grad_() for t in embeddings(9, 9, torch.float32, device))
    more = ONE_WAY if name == "contrastive" else {}
    positives = torch.arange(9, device=device)
    FUNCTIONS[name][0](a, b, positives=positives, **more).backward()  # compiles the kernels
    with host_reads_nothing():
        FUNCTIONS[name][0](a, b, positives=positives, **more).backward()
        FUNCTIONS[name][0](a, b, scale=torch.ones((), device=device)).backward()


GEMMS = {  # in one chunk, and in four chunks
    ("contrastive", "mean", True): (3, 15),  # the second pass finds one chunk in memory
    ("contrastive", "none", True): (4, 16),
    ("contrastive", "mean", False): (3, 12),
    ("contrastive", "none", False): (4, 16),
    ("sigmoid_contrastive", "mean", None): (3, 12),
    ("sigmoid_contrastive", "none", None): (4, 16),
}


@pytest.mark.parametrize(("name", "reduction", "symmetric"), GEMMS)
def test_number_of_gemms(name, reduction, symmetric, device):
    """Every chunk is smaller than the workspace, and backward finds no chunk of forward."""
    in_one, in_four = GEMMS[name, reduction, symmetric]
    a, b = (t.requires_grad_() for t in embeddings(64, 64, torch.float32, device))
    calls, sizes, how = [], [], {"reduction": reduction}
    if symmetric is not None:
        how["symmetric"] = symmetric

    def counted(function):
        def call(*args, **how):
            calls.append(function.__name__)
            return function(*args, **how)

        return call

    def one_sum(self, dz, h):
        calls.append("sum")
        sizes.append(dz.numel())
        return add(self, dz, h)

    add = gradient_sums.Sum.add
    with (
        mock.patch.object(similarities, "add_product", counted(gemms.add_product)),
        mock.patch.object(gradient_sums.Sum, "add", one_sum),
    ):
        FUNCTIONS[name][0](a, b, **how).sum().backward()
        assert len(calls) == in_one
        calls.clear()
        sizes.clear()
        with torch.no_grad():
            FUNCTIONS[name][0](a, b, **how)
        assert len(calls) == 1
        part = similarities.EAGER_PART if device == "cpu" else 1
        workspace = part * 16 * 64 * 4
        calls.clear()
        FUNCTIONS[name][0](a, b, **how, workspace=workspace).sum().backward()
        assert len(calls) == in_four
        assert max(sizes) == 16 * 64


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast(name, device):
    """Similarities are computed in the dtype of autocast. The gradients are fp32."""
    function, (a, b) = FUNCTIONS[name][0], embeddings(9, 9, torch.float32, device)
    a.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = function(a, b, scale=3.0)
    assert loss.dtype == torch.float32
    loss.backward()
    assert a.grad.dtype == torch.float32
    assert torch.equal(loss, function(a.bfloat16(), b.bfloat16(), scale=3.0))
    with torch.autocast(device, torch.bfloat16):
        mixed = function(a, b.bfloat16(), scale=3.0)  # towers can return different dtypes
    assert torch.equal(loss, mixed)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.few(1)
def test_compiled(name, device):
    """torch.compile breaks its graph at the loss, and computes the same numbers."""
    function, (a, b) = FUNCTIONS[name][0], embeddings(9, 9, torch.float32, device)
    linear = torch.nn.Linear(a.shape[1], a.shape[1]).to(device)
    compiled = torch.compile(lambda a, b: function(linear(a), b, scale=2.0) * 3, backend="eager")
    loss = compiled(a, b)
    loss.backward()
    got, linear.weight.grad = linear.weight.grad, None
    want = function(linear(a), b, scale=2.0) * 3
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, linear.weight.grad)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(a, b)


def test_modules(device):
    a, b = embeddings(9, 9, torch.float32, device)
    labels, mask = torch.arange(9, device=device) % 3, torch.rand(9, 9, device=device) < 0.3
    module = ll.nn.ContrastiveLoss(scale=5.0, reduction="none").to(device)
    want = ll.contrastive(a, b, scale=5.0, reduction="none", labels=labels, mask=mask)
    torch.testing.assert_close(module(a, b, labels=labels, mask=mask), want)
    module = ll.nn.ContrastiveLoss(scale=5.0, symmetric=False, trainable=False).to(device)
    want = ll.contrastive(a, b, scale=5.0, symmetric=False, positives=labels)
    torch.testing.assert_close(module(a, b, labels), want)
    assert not list(module.parameters())
    assert module.state_dict().keys() == {"log_scale"}
    module = ll.nn.SigmoidContrastiveLoss(scale=5.0, bias=-3.0).to(device)
    want = ll.sigmoid_contrastive(a, b, scale=5.0, bias=-3.0, positives=labels)
    torch.testing.assert_close(module(a, b, labels), want)
    module(a, b).backward()
    assert all(p.grad.isfinite() and p.grad != 0 for p in module.parameters())
    assert len(list(module.parameters())) == 2
    assert "reduction=mean" in repr(module)
    assert copy.deepcopy(module).bias == -3


def test_copies_of_a_module_share_the_group():
    """A process group cannot be copied, and belongs to one process."""

    class Uncopied(Alone):
        def __deepcopy__(self, memo):
            raise AssertionError

    module = ll.nn.ContrastiveLoss(group=Uncopied())
    for copied in (copy.deepcopy(torch.nn.Sequential(module))[0], copy.copy(module)):
        assert copied.group is module.group
        assert torch.equal(copied(A, A), module(A, A))
    with pytest.raises(TypeError, match="must have group=None to be pickled"):
        pickle.dumps(module)
    again = pickle.loads(pickle.dumps(ll.nn.ContrastiveLoss()))
    assert again.group is None
    assert torch.equal(again(A, A), module(A, A))


def test_the_scale_of_a_module_is_clamped(device):
    """After a step beyond the bound, the next step can reduce the scale again."""
    a, b = embeddings(9, 9, torch.float32, device)
    module = ll.nn.ContrastiveLoss(max_scale=20.0).to(device)
    with torch.no_grad():
        module.log_scale.fill_(9.0)
    loss = module(a, b)
    torch.testing.assert_close(loss, ll.contrastive(a, b, scale=20.0))
    loss.backward()
    assert module.log_scale.grad != 0


@pytest.mark.parametrize(("option", "value", "message"), [
    ("scale", 0, "scale must be in [1e-12, 1e+12], got 0."),
    ("max_scale", 0.0, "max_scale must be in [1e-12, 1e+12], got 0.0."),
    ("max_scale", 1.0, "scale must be at most max_scale, got 14.2857 and max_scale=1; for a scale "
                       "without a bound, pass max_scale=None."),
    ("scale", 200, "scale must be at most max_scale, got 200 and max_scale=100; for a scale "
                   "without a bound, pass max_scale=None."),
    ("symmetric", "yes", "symmetric must be True or False, got 'yes'."),
    ("averaged", "yes", "averaged must be True or False, got 'yes'."),
    ("group", 3, "group must be a process group, a DeviceMesh or None, got 3."),
    ("trainable", 2, "trainable must be True or False, got 2."),
    ("reduction", "avg", "reduction must be one of 'mean', 'sum', 'none', got 'avg'."),
])  # fmt: skip
def test_refusals_of_modules(option, value, message):
    with pytest.raises((TypeError, ValueError)) as refused:
        ll.nn.ContrastiveLoss(**{option: value})
    assert str(refused.value) == message
