"""fuse beside PEFT's adapters and accelerate's hooks: the plain model's numbers, in any order."""

import copy
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")
pytest.importorskip("accelerate", reason="needs accelerate: requirements/tests.txt")
pytest.importorskip("peft", reason="needs peft: requirements/tests.txt")

import accelerate
import peft

import logitless as ll
from logitless.lazy import report
from logitless.lazy.logits import LazyLogits
from tests.support.families import apart, trained
from tests.support.tiny_models import V, batch, build

pytestmark = pytest.mark.filterwarnings("default")  # those of Transformers and PEFT are theirs
HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch):
    monkeypatch.setattr(report, "_warned", set())


def llama(tied: bool = False) -> nn.Module:
    return build("LlamaForCausalLM", tie_word_embeddings=tied)


def assert_as_plain(plain: nn.Module, fused: nn.Module, is_lazy: bool = True) -> list[str]:
    """Logits, tokens, losses and gradients; returns the warnings of the fused model."""
    given = batch(plain)
    ids = given["input_ids"]
    with torch.no_grad():
        logits = [(torch.manual_seed(1), m(**given).logits)[1] for m in (fused, plain)]
    assert torch.equal(*logits)
    how = {"max_new_tokens": 3, "do_sample": False}
    tokens = [(torch.manual_seed(1), m.generate(input_ids=ids, **how))[1] for m in (fused, plain)]
    assert torch.equal(*tokens)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = trained(fused)
        trained(fused)
    assert apart(got, trained(plain)) == ""
    z = fused(**given).logits
    assert (type(z) is LazyLogits) == is_lazy
    assert bool(ll.is_fused(fused)) == is_lazy, ll.is_fused(fused)
    if is_lazy:
        assert not ll.report(fused)
    told = [str(w.message) for w in seen if "fuse has no effect here" in str(w.message)]
    assert len(told) == (not is_lazy)
    return told


# --- accelerate


def cpu_offload(model, folder):
    return accelerate.cpu_offload(model, execution_device=HERE)


def disk_offload(model, folder):
    return accelerate.disk_offload(model, str(folder), execution_device=HERE)


def dispatch(model, folder):
    places = {"model": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, places, force_hooks=True)


def dispatch_and_remove(model, folder):
    return accelerate.hooks.remove_hook_from_module(dispatch(model, folder), recurse=True)


def own_hook(model, folder):
    """A hook that changes what the head is given, and what it returns."""

    class Scaled(accelerate.hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            return tuple(2 * a for a in args), kwargs

        def post_forward(self, module, output):
            return output / 3

    accelerate.hooks.add_hook_to_module(model.lm_head, Scaled())
    return model


HOOKS = [cpu_offload, disk_offload, dispatch, dispatch_and_remove, own_hook]


@pytest.mark.parametrize("first", ["fuse", "hook"])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_hooks_of_accelerate(hook, first, tmp_path):
    plain = hook(llama(), tmp_path / "plain")
    fused = ll.fuse(llama()) if first == "fuse" else llama()
    fused = hook(fused, tmp_path / "fused")
    fused = fused if first == "fuse" else ll.fuse(fused)
    assert_as_plain(plain, fused)


def test_prepare_and_unwrap():
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(ll.fuse(llama()))
    assert_as_plain(llama(), model)
    assert ll.is_fused(accelerator.unwrap_model(model))


# --- PEFT


def adapted(model: nn.Module, *, kind=peft.LoraConfig, **options) -> nn.Module:
    torch.manual_seed(3)
    how = {"r": 2, "init_lora_weights": False} if kind is peft.LoraConfig else {}
    return peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **how, **options))


BODY = {"target_modules": ["q_proj"]}
HEAD = {"target_modules": ["lm_head"]}
BOTH = {"target_modules": ["q_proj", "lm_head"]}
TOKENS = {"target_modules": ["lm_head"], "token_indices": [5, 6]}
LAZY = {  # options, and whether the embeddings are tied
    "saved": (BODY | {"modules_to_save": ["lm_head"]}, False),
    "saved, tied": (BODY | {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "tokens, tied": (BODY | {"trainable_token_indices": [5, 6]}, True),
    "tokens of the head": (BODY | {"trainable_token_indices": {"lm_head": [5, 6]}}, False),
    "parameter": (BODY | {"target_parameters": ["lm_head.weight"]}, False),
    "lora alone": (HEAD, False),
    "lora": (BOTH, False),
    "lora, scaled": (BOTH | {"lora_alpha": 3}, False),
    "lora with a bias": (HEAD | {"lora_bias": True}, False),
    "tokens alone": ({"kind": peft.TrainableTokensConfig, **TOKENS}, False),
    "tokens alone, tied": ({"kind": peft.TrainableTokensConfig, **TOKENS}, True),
    "dora, saved": (BODY | {"use_dora": True, "modules_to_save": ["lm_head"]}, False),
}
PLAIN = {
    "dora alone": HEAD | {"use_dora": True},
    "dora with dropout": BOTH | {"use_dora": True, "lora_dropout": 0.5},
    "ia3 alone": HEAD
    | {"kind": peft.IA3Config, "feedforward_modules": [], "init_ia3_weights": False},
}


def both_orders(first: str, tied: bool, options: dict) -> tuple[nn.Module, nn.Module]:
    plain = adapted(llama(tied), **options)
    if first == "fuse":
        return plain, adapted(ll.fuse(llama(tied)), **options)
    return plain, ll.fuse(adapted(llama(tied), **options))


@pytest.mark.parametrize("first", ["fuse", "adapt"])
@pytest.mark.parametrize("how", LAZY)
def test_adapters_that_stay_lazy(how, first):
    """TrainableTokensWrapper replaces some rows of the head's weight."""
    options, tied = LAZY[how]
    assert_as_plain(*both_orders(first, tied, options))


@pytest.mark.parametrize("first", ["fuse", "adapt"])
@pytest.mark.parametrize("how", PLAIN)
def test_adapters_that_compute_with_the_logits(how, first):
    """Also with a frozen body, a warning says that fuse has no effect."""
    told = assert_as_plain(*both_orders(first, False, PLAIN[how]), is_lazy=False)
    assert "applies an operation to its logits" in told[0]
    assert "peft.tuners" in told[0]


@pytest.mark.parametrize("first", ["fuse", "adapt"])
def test_an_adapter_without_a_copy_of_the_head(first):

    def second(model):
        torch.manual_seed(4)
        model.add_adapter("b", peft.LoraConfig(r=2, task_type="CAUSAL_LM", **BODY))
        model.set_adapter("b")
        return model

    plain, fused = both_orders(first, False, LAZY["saved"][0])
    assert_as_plain(second(plain), second(fused))
    for model in (plain, fused):
        model.set_adapter("default")
    assert_as_plain(plain, fused)
    with plain.disable_adapter(), fused.disable_adapter(), torch.no_grad():
        given = batch(plain)
        assert torch.equal(fused(**given).logits, plain(**given).logits)


def test_the_order_is_free():
    """fuse, resize_token_embeddings and get_peft_model."""

    def resized(model):
        model.resize_token_embeddings(V + 6, mean_resizing=False)
        return model

    def build_in(order: str) -> nn.Module:
        model = llama()
        for name in order.split():
            torch.manual_seed(5)
            steps = {"fuse": ll.fuse, "resize": resized, "adapt": lambda m: adapted(m, **BODY)}
            model = steps[name](model)
        return model

    for order in ("fuse resize adapt", "resize fuse adapt", "resize adapt fuse", "adapt fuse"):
        plain = build_in(" ".join(name for name in order.split() if name != "fuse"))
        assert_as_plain(plain, build_in(order))


def test_merged_and_unloaded():
    fused = adapted(ll.fuse(llama()), target_modules=["q_proj", "lm_head"]).merge_and_unload()
    plain = adapted(llama(), target_modules=["q_proj", "lm_head"]).merge_and_unload()
    for model in (fused, plain):
        model.requires_grad_(True)
    assert_as_plain(plain, fused)


@pytest.mark.parametrize("first", ["fuse", "adapt"])
def test_unfuse_of_the_model_or_its_base(first):
    for undo in (lambda m: ll.unfuse(m), lambda m: ll.unfuse(m.get_base_model())):
        _, fused = both_orders(first, False, BODY)
        given = batch(fused)
        assert type(fused(**given).logits) is LazyLogits
        undo(fused)
        assert type(fused(**given).logits) is torch.Tensor
        assert not ll.is_fused(fused)
        assert not ll.is_fused(fused.get_base_model())


def test_state_of_an_adapter_is_the_plain_one():
    plain, fused = both_orders("fuse", True, LAZY["tokens, tied"][0])
    trained(fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(fused)
    assert_as_plain(plain, copied)
