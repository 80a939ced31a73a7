"""DoRA on a fused head: lazy logits with the numbers of PEFT's own forward."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft", reason="needs peft: requirements/tests.txt")

import peft

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from logitless.lazy import dora, report
from logitless.lazy.logits import LazyLogits

pytestmark = pytest.mark.filterwarnings("default")  # those of PEFT are its own
N, D, V, R = 7, 16, 53, 3


class Model(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.body, self.lm_head = nn.Linear(D, D), nn.Linear(D, V, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.body(x).tanh())


def adapted(dtype=torch.float64, *, bias=True, trains=(), own=None, **options) -> Model:
    """A model with a DoRA adapter on its head. `own` is the dtype of the adapter."""
    torch.manual_seed(0)
    model = Model(bias)
    how = {"r": R, "lora_alpha": 5, "use_dora": True, "init_lora_weights": False} | options
    config = peft.LoraConfig(target_modules=["lm_head"], **how)
    peft.inject_adapter_in_model(config, model)
    for name, p in model.named_parameters():
        if "magnitude" in name:  # a new magnitude is the norm, so that the scale would be 1
            p.data *= 1 + torch.rand_like(p)
        p.requires_grad_("lora" in name or any(part in name for part in trains))
    for name, p in model.named_parameters():
        p.data = p.data.to((own or dtype) if "lora" in name else dtype)
    return model


def inputs(dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    target = torch.randint(V, (N,), generator=g)
    target[2] = -100
    return torch.randn(N, D, generator=g).to(dtype), target, torch.randn(N, generator=g)


def mean(z, target, upstream):
    return ll.cross_entropy(z, target, z_loss=0.1) * upstream[0]


def of_torch(z, target, upstream):
    return nn.functional.cross_entropy(z.float(), target, label_smoothing=0.1) * upstream[0]


def per_row(z, target, upstream):
    scores = ll.score(z, target.clamp(min=0))
    return (scores.logprob * upstream).sum() + (scores.entropy * upstream.flip(0)).sum()


LOSSES = [mean, of_torch, per_row]


def stepped(model: nn.Module, loss=mean, dtype=torch.float64) -> dict[str, Tensor]:
    """The loss and the gradients of a model."""
    x, target, upstream = inputs(dtype)
    torch.manual_seed(5)  # of dropout
    value = loss(model(x), target, upstream.to(torch.float64 if dtype == torch.float64 else None))
    value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **gradients}


def assert_same(got: dict, want: dict, rtol=1e-9) -> None:
    assert got.keys() == want.keys()
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, rtol=rtol, atol=rtol, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("trains", "dropout"),
    [
        ((), 0), (("body",), 0), (("body", "base_layer"), 0), (("body",), 0.3),
        (("body", "base_layer"), 0.3),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_peft(bias, dropout, trains, loss):
    how = {"bias": bias, "trains": trains, "lora_dropout": dropout}
    plain = stepped(adapted(**how), loss)
    model = ll.fuse(adapted(**how), head="lm_head")
    assert type(model(inputs()[0])) is LazyLogits
    assert_same(stepped(model, loss), plain, 2e-6 if loss is of_torch else 1e-9)
    assert not ll.report(model)
    assert ll.is_fused(model)


@pytest.mark.parametrize("cut", [Cut(2), Cut(N, 16), Cut(3, 16)], ids=str)
@pytest.mark.parametrize("dropout", [0, 0.3])
@pytest.mark.parametrize("loss", [mean, per_row], ids=lambda f: f.__name__)
def test_chunks_and_blocks(cut, loss, dropout, monkeypatch):
    monkeypatch.setattr(
        choose_cut, "forced", lambda work, *_: cut if work.merges else Cut(cut.rows)
    )
    how = {"trains": ("body",), "lora_dropout": dropout}
    model = ll.fuse(adapted(**how), head="lm_head")
    assert_same(stepped(model, loss), stepped(adapted(**how), loss))


@pytest.mark.parametrize("dropout", [0, 0.3])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_beside_peft(dtype, own, dropout):
    """An adapter can be fp32 over a 16-bit weight. Its gradients are as exact as PEFT's."""
    how = {"trains": ("body",), "lora_dropout": dropout}
    rounded, exact = adapted(dtype, own=own, **how), adapted(**how)
    exact.load_state_dict({k: t.double() for k, t in rounded.state_dict().items()})
    want = stepped(exact)
    plain = stepped(adapted(dtype, own=own, **how), dtype=dtype)
    got = stepped(ll.fuse(rounded, head="lm_head"), dtype=dtype)
    assert got.keys() == plain.keys()
    for name, t in want.items():
        far, near = ((grads[name].double() - t).abs().max() for grads in (got, plain))
        assert near < 0.1 * t.abs().max(), name  # the same elements were dropped
        floor = 4 * torch.finfo(plain[name].dtype).eps * t.abs().max()
        assert far <= 2 * near + floor, (name, float(far), float(near))


def test_autocast():
    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return stepped(model, dtype=torch.float32)

    plain = step(adapted(torch.float32, trains=("body",)))
    model = ll.fuse(adapted(torch.float32, trains=("body",)), head="lm_head")
    got = step(model)
    assert ll.is_fused(model)
    for name, t in plain.items():
        far = (got[name] - t).abs().max() / t.abs().max()
        assert far < 0.05, (name, far)


def test_blocks_of_rows(monkeypatch):
    """Norms and scaled rows of a large weight are computed in blocks of rows."""
    want = stepped(ll.fuse(adapted(trains=("base_layer",)), head="lm_head"))
    monkeypatch.setattr(dora, "BLOCK", 4 * D * 10)  # 10 rows
    assert_same(stepped(ll.fuse(adapted(trains=("base_layer",)), head="lm_head")), want, 1e-12)


def test_a_new_adapter_changes_nothing():
    """Before training, magnitude and norm are equal, also if both are rounded to bf16."""
    torch.manual_seed(0)
    model = Model(True).bfloat16()
    x = inputs(torch.bfloat16)[0]
    before = model(x).detach()
    config = peft.LoraConfig(target_modules=["lm_head"], r=R, use_dora=True)
    peft.inject_adapter_in_model(config, model)
    after = ll.fuse(model, head="lm_head")(x)
    assert type(after) is LazyLogits
    assert torch.equal(after.detach(), before)


def hooked(model):
    model.lm_head.lora_B["default"].register_forward_hook(lambda module, given, result: result / 2)
    return model


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def doubled(model):
    model.lm_head.base_layer.__class__ = Doubled
    return model


def second(model, **options):
    torch.manual_seed(2)
    how = {"r": R, "init_lora_weights": False} | options
    config = peft.LoraConfig(target_modules=["lm_head"], **how)
    peft.inject_adapter_in_model(config, model, adapter_name="b")
    return model.double()


def both(model):
    second(model).lm_head.set_adapter(["default", "b"])
    return model


def other(model):
    second(model).lm_head.set_adapter(["b"])
    return model


def merged(model):
    model.lm_head.merge()
    return model


def disabled(model):
    model.lm_head.enable_adapters(False)
    return model


@pytest.mark.parametrize(
    ("change", "is_lazy"),
    [
        (hooked, False), (doubled, False), (both, False), (other, True), (merged, True),
        (disabled, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_other_states_of_the_adapter(change, is_lazy, monkeypatch):
    monkeypatch.setattr(report, "_warned", set())
    plain = change(adapted(trains=("body",)))
    model = change(ll.fuse(adapted(trains=("body",)), head="lm_head"))
    assert_same(stepped(model), stepped(plain))
    assert (type(model(inputs()[0])) is LazyLogits) == is_lazy
    assert bool(ll.is_fused(model)) == is_lazy


def test_dropout_over_a_frozen_body(monkeypatch):
    """The logits are plain in training, and lazy in evaluation."""
    monkeypatch.setattr(report, "_warned", set())
    model = ll.fuse(adapted(lora_dropout=0.5), head="lm_head")
    x = inputs()[0]
    with pytest.warns(UserWarning, match="fuse has no effect here"):
        assert type(model(x)) is Tensor
    plain = adapted(lora_dropout=0.5).eval()
    assert type(model.eval()(x)) is LazyLogits
    assert_same(stepped(model), stepped(plain))


def test_large_logits_without_gradients(monkeypatch):
    """Large logits without gradients are lazy too. Small logits run PEFT's own forward."""
    from logitless.lazy import recipe

    x, model = inputs()[0], ll.fuse(adapted(), head="lm_head")
    with torch.no_grad():
        small = model(x)
        monkeypatch.setattr(recipe, "SMALL", 8)
        large = model(x)
    assert type(small) is Tensor
    assert type(large) is LazyLogits
    torch.testing.assert_close(large.logsumexp(-1), small.logsumexp(-1))
    assert not ll.report(model)


def test_a_second_derivative_raises():
    model = ll.fuse(adapted(trains=("body",)), head="lm_head")
    x, target, upstream = inputs()
    magnitude = model.lm_head.lora_magnitude_vector["default"].weight
    loss = mean(model(x), target, upstream)
    (d,) = torch.autograd.grad(loss, magnitude, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|twice"):
        d.sum().backward()
