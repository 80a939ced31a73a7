"""torchao and bitsandbytes beside a fused model: the plain model's numbers."""

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from logitless.lazy import report
from logitless.lazy.logits import LazyLogits
from tests.support.families import apart, trained
from tests.support.tiny_models import batch, build

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch):
    monkeypatch.setattr(report, "_warned", set())


def llama() -> nn.Module:
    return build("LlamaForCausalLM", tie_word_embeddings=False)


def assert_as_plain(plain: nn.Module, fused: nn.Module, is_lazy: bool) -> None:
    given = batch(plain)
    with torch.no_grad():
        assert torch.equal(fused(**given).logits, plain(**given).logits)
    assert apart(trained(fused), trained(plain)) == ""
    assert (type(fused(**given).logits) is LazyLogits) == is_lazy
    assert bool(ll.is_fused(fused)) == is_lazy, ll.is_fused(fused)
    assert not ll.report(fused)


# --- torchao


def int8(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def fp8(model: nn.Module) -> nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig())
    return model


def int4(model: nn.Module) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(16)))
    return model


def int8_with_lora(model: nn.Module) -> nn.Module:
    """QLoRA with an adapter on the quantised head."""
    import peft

    torch.manual_seed(3)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(int8(model), lora)


def int8_body(model: nn.Module) -> nn.Module:
    int8(model.model)
    return model


def qat(model: nn.Module) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=16)
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights))
    return model


@pytest.mark.parametrize("first", ["fuse", "change"])
@pytest.mark.parametrize(
    "change",
    [int8_body, qat, int8, fp8, int4, int8_with_lora],
    ids=lambda change: change.__name__,
)
def test_heads_that_stay_lazy(change, first):
    """A model that was fused before QAT runs too."""
    fused = change(ll.fuse(llama())) if first == "fuse" else ll.fuse(change(llama()))
    assert_as_plain(change(llama()), fused, is_lazy=True)


# --- bitsandbytes

WIDTH = 64  # the number of weights with a common scale; in narrower heads, a scale spans two rows


def wide(**options) -> nn.Module:
    return build("LlamaForCausalLM", tie_word_embeddings=False, hidden_size=WIDTH, **options)


def four_bits(model: nn.Module, bias: bool = False, **options) -> nn.Module:
    import bitsandbytes as bnb

    plain = model.lm_head
    how = {"compute_dtype": torch.float32, **options}
    head = bnb.nn.Linear4bit(plain.in_features, plain.out_features, bias=bias, **how)
    state = {"weight": plain.weight.detach()}
    if bias:
        state["bias"] = torch.linspace(-2, 2, plain.out_features)
    head.load_state_dict(state)
    model.lm_head = head.to("cpu")  # quantises the weight
    return model


def fp4(model: nn.Module) -> nn.Module:
    return four_bits(model, quant_type="fp4", compress_statistics=False)


def four_bits_in_floats(model: nn.Module) -> nn.Module:
    """The bytes are stored as bf16 numbers, as for FSDP."""
    return four_bits(model, quant_storage=torch.bfloat16)


def four_bits_and_bias(model: nn.Module) -> nn.Module:
    return four_bits(model, bias=True)


def four_bits_with(model: nn.Module, **options) -> nn.Module:
    import peft

    torch.manual_seed(3)
    model = four_bits(model)
    model.is_loaded_in_4bit = True  # chooses PEFT's own class for layers of bitsandbytes
    how = {"r": 2, "target_modules": ["lm_head"], "init_lora_weights": False} | options
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **how))
    assert type(model.get_base_model().lm_head).__name__ == "Linear4bit"
    return model


def four_bits_with_lora(model: nn.Module) -> nn.Module:
    return four_bits_with(model)


@pytest.mark.parametrize("first", ["fuse", "change"])
@pytest.mark.parametrize(
    "change",
    [four_bits, fp4, four_bits_in_floats, four_bits_and_bias, four_bits_with_lora],
    ids=lambda change: change.__name__,
)
def test_heads_of_four_bits_stay_lazy(change, first):
    fused = change(ll.fuse(wide())) if first == "fuse" else ll.fuse(change(wide()))
    assert_as_plain(change(wide()), fused, is_lazy=True)
    ll.unfuse(fused)
    assert type(fused(**batch(fused)).logits) is torch.Tensor


def test_a_head_of_four_bits_in_blocks_of_rows(monkeypatch):
    """No more than 128 rows of the weight are dequantised at once."""
    from logitless.heads import quantized
    from logitless.lazy.four_bit import FourBitWeight

    sizes, dequantize = [], FourBitWeight.dequantize
    monkeypatch.setattr(quantized, "BLOCK", 1)
    monkeypatch.setattr(
        FourBitWeight, "dequantize", lambda w: (sizes.append(len(w)), dequantize(w))[1]
    )
    fused, plain = ll.fuse(four_bits(wide(vocab_size=300))), four_bits(wide(vocab_size=300))
    assert apart(trained(fused), trained(plain)) == ""
    assert max(sizes) == 128
    assert min(sizes) == 300 - 2 * 128


def test_a_head_of_four_bits_in_blocks_of_columns(monkeypatch):
    monkeypatch.setattr(choose_cut, "forced", lambda work, *_: Cut(5, 16 if work.merges else None))
    fused, plain = ll.fuse(four_bits_with_lora(wide())), four_bits_with_lora(wide())
    assert apart(trained(fused), trained(plain)) == ""


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_of_four_bits_in_bf16(autocast):
    """The layer computes in compute_dtype, also under autocast."""

    def losses(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return trained(model)[0]

    fused = ll.fuse(four_bits(wide(), compute_dtype=torch.bfloat16))
    plain = four_bits(wide(), compute_dtype=torch.bfloat16)
    torch.testing.assert_close(losses(fused), losses(plain), rtol=2e-3, atol=0)
    assert ll.is_fused(fused)


def eight_bits(model: nn.Module) -> nn.Module:
    import bitsandbytes as bnb

    plain = model.lm_head
    sizes = (plain.in_features, plain.out_features)
    head = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
    head.load_state_dict({"weight": plain.weight.detach()})
    model.lm_head = head.to("cpu")  # quantises the weight
    return model


@pytest.mark.parametrize("first", ["fuse", "change"])
@pytest.mark.parametrize("change", [four_bits, eight_bits], ids=lambda change: change.__name__)
def test_other_heads_of_bitsandbytes_are_plain(change, first):
    """bitsandbytes multiplies by 8-bit weights in its own way. In the head of 4 bits, some scales
    span two rows."""
    fused = change(ll.fuse(llama())) if first == "fuse" else ll.fuse(change(llama()))
    with pytest.warns(UserWarning, match="does not compute its logits by torch.nn.functional.lin"):
        assert_as_plain(change(llama()), fused, is_lazy=False)
