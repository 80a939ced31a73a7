"""verl's FSDP engine prepares, computes and rehearses its losses over our head on a tiny Qwen2.

The engine's constructor needs a GPU and a process group, so the engine is made without it.
"""

import functools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2ForCausalLM
from verl.models.transformers import monkey_patch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.import_utils import import_external_libs
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import ActorConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

import_external_libs("logitless.integrations.verl")  # what HFModelConfig does with `external_lib`

from logitless.integrations import verl as adapter
from logitless.integrations.seams import NoEffectError
from tests.support.trainer_runs import WORKSPACE, D, V, far, model, once

pytestmark = pytest.mark.filterwarnings("default")
WRITES = (
    "`model.external_lib=logitless.integrations.verl model.use_fused_kernels=True"
    " model.fused_kernel_options.impl_backend=logitless`"
)
PROMPTS, RESPONSES = [3, 5, 2, 4], [4, 7, 6, 3]
LENGTHS = [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)]
PER_SAMPLE = torch.tensor([0.7, 1.0, 1.3, 0.9])
SEQUENCE_LOCAL = {"gspo", "geo_mean"}


class Fused(Qwen2ForCausalLM):
    """verl patches the class, so that the plain model keeps its own."""


@pytest.fixture(autouse=True)
def on_a_cpu():
    with (
        patch.object(transformer_impl, "get_device_id", lambda: "cpu"),
        patch.object(transformer_impl, "get_device_name", lambda: "cpu"),
        patch.dict(adapter.OPTIONS, workspace=WORKSPACE),
    ):
        yield


def models():
    plain = model("Qwen2")
    fused = Fused(plain.config)
    fused.load_state_dict(plain.state_dict())
    monkey_patch.patch_forward_with_backends(fused, True, "logitless")
    return plain, fused


def engine_of(module, pads: bool = False):
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module, engine.pad_to_length, engine.use_ulysses_sp = module, pads, False
    engine.pad_to_length_bucket, engine._autocast_dtype = 64, torch.float32
    engine.engine_config = SimpleNamespace(
        entropy_checkpointing=False, entropy_from_logits_with_chunking=False
    )
    engine.compute_entropy_from_logits = entropy_from_logits
    engine.get_data_parallel_group = lambda: None
    return engine


def nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch_of(kernels: bool, temperature=1.0, **flags):
    draw = torch.Generator().manual_seed(2)

    def noise(scale: float, at: float):
        return nested([torch.randn(n, generator=draw) * scale + at for n in RESPONSES])

    ids = [torch.randint(0, V, (n,), generator=draw) for n in LENGTHS]
    masks = [torch.ones(n) for n in RESPONSES]
    masks[1][2] = 0  # a token of a tool
    batch = TensorDict({
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(n) for n in LENGTHS]),
        "prompts": nested([t[:n] for t, n in zip(ids, PROMPTS, strict=True)]),
        "responses": nested([t[n:] for t, n in zip(ids, PROMPTS, strict=True)]),
        "response_mask": nested(masks),
        "old_log_probs": noise(0.3, -5.3), "ref_log_prob": noise(0.3, -5.3),
        "advantages": noise(1.0, 0.0),
    }, batch_size=[4])  # fmt: skip
    if isinstance(temperature, torch.Tensor):
        batch["temperature"] = temperature
    given = {
        "use_fused_kernels": kernels, "dp_size": 1, "batch_num_tokens": None,
        "global_batch_size": None, **flags,
    }  # fmt: skip
    if not isinstance(temperature, torch.Tensor):
        given["temperature"] = temperature
    for key, value in given.items():
        tu.assign_non_tensor_data(batch, key, value)
    return batch


def of_responses(t: torch.Tensor) -> torch.Tensor:
    """The rows of the responses, which alone a loss of verl reads."""
    rows = zip(t.unbind(), PROMPTS, strict=True)
    return torch.cat([row[prompt - 1 : -1] for row, prompt in rows])


@pytest.mark.parametrize(
    ("temperature", "squares"), [(1.0, False), (0.7, True), (PER_SAMPLE, True)],
    ids=["T=1", "T=0.7", "T per sample"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("packed", "pads"), [(True, False), (True, True), (False, False)],
    ids=["packed", "padded to a length", "padded"],
)  # fmt: skip
def test_log_probabilities(packed, pads, temperature, squares, compare):
    flags = {
        "use_remove_padding": packed, "calculate_entropy": True,
        "calculate_sum_pi_squared": squares,
    }  # fmt: skip

    def step(module, kernels):
        engine, batch = engine_of(module, pads), batch_of(kernels, temperature, **flags)
        inputs, rest = engine.prepare_model_inputs(batch)
        output = module(**inputs, use_cache=False)
        found = engine.prepare_model_outputs(output, rest, batch, None)
        draw = torch.Generator().manual_seed(1)
        values = {name: of_responses(t) for name, t in found.items()}
        assert ("sum_pi_squared" in values) == squares
        numbers = {f"{n} {i}": float(x) for n, t in values.items() for i, x in enumerate(t)}
        pulls = torch.randn(2, sum(RESPONSES), generator=draw)
        return (values["log_probs"] * pulls[0] + values["entropy"] * pulls[1]).sum(), numbers

    plain, fused = models()
    want, got = once(plain, lambda: step(plain, False)), once(fused, lambda: step(fused, True))
    case = "temperature per sample" if temperature is PER_SAMPLE else f"T={temperature}"
    compare("verl", case + ", Σπ²" * squares, WRITES, got, want)


def actor(loss_mode: str) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0,
        use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01,
    )  # fmt: skip
    options = {
        "loss_mode": loss_mode, "dro_beta": 0.1, "clip_cov_ratio": 0.3, "kl_cov_ratio": 0.3,
        "clip_cov_lb": -9.0, "clip_cov_ub": 9.0,
    }  # fmt: skip
    for key, value in options.items():
        object.__setattr__(config.policy_loss, key, value)
    return config


def train(module, kernels: bool, loss_mode: str, packed: bool, engine=None, **flags):
    """One step of the engine: loss, verl's metrics, gradients."""
    engine = engine or engine_of(module)
    batch = batch_of(kernels, use_remove_padding=packed, calculate_entropy=True, **flags)
    loss = functools.partial(ppo_loss, config=actor(loss_mode))

    def step():
        torch.manual_seed(0)  # some losses draw
        value, found = engine.forward_step(batch, loss, forward_only=False)
        return value, {name: float(m.aggregate()) for name, m in found["metrics"].items()
                       if hasattr(m, "aggregate")}  # fmt: skip

    return once(module, step)


@pytest.mark.parametrize("name", POLICY_LOSS_REGISTRY)
def test_policy_losses(name, compare):
    """The first steps find the way; all steps are right."""
    plain, fused = models()
    engine, packed = engine_of(fused), name != "gspo"
    want = train(plain, False, name, packed)
    for _ in range(4):
        got = train(fused, True, name, packed, engine)
        compare("verl", f"loss_mode={name}", WRITES, got, want)
    if name in ("clip_cov", "kl_cov"):  # over the whole batch: on few tokens, sequences can suffice
        assert engine._logitless_ways.way != "rows"
    else:
        way = "sequences" if name in SEQUENCE_LOCAL else "rows"
        assert engine._logitless_ways.way == way


@pytest.mark.parametrize(("name", "gemms"), [("vanilla", 3), ("gspo", 3), ("kl_cov", 4)])
@pytest.mark.parametrize("frozen", [False, True])
def test_gemms(name, gemms, frozen):
    """Only the rows of responses count; a frozen head saves one GEMM."""
    _, fused = models()
    fused.lm_head.weight.requires_grad_(not frozen)
    engine = engine_of(fused)
    # A workspace for the longest sequence: group_loss takes a fourth GEMM beyond it.
    with patch.dict(adapter.OPTIONS, workspace=8 * (V + 5) * 4):
        for _ in range(4):
            with FlopCounterMode(display=False) as flops:
                train(fused, True, name, True, engine)
    with FlopCounterMode(display=False) as body:
        hidden = fused.model(input_ids=torch.zeros(1, sum(LENGTHS), dtype=torch.long))[0]
        hidden.sum().backward()
    head = flops.get_total_flops() - body.get_total_flops()
    rows = sum(RESPONSES) - 1  # one is a tool's
    assert head / (2 * rows * V * D) == pytest.approx(gemms - frozen, rel=0.1)


def test_inference_drops_prompts():
    plain, fused = models()
    found = []
    for module, kernels in ((plain, False), (fused, True)):
        batch = batch_of(kernels, calculate_entropy=True)
        with torch.no_grad():
            _, output = engine_of(module).forward_step(batch, None, forward_only=True)
        found.append(output["model_output"]["log_probs"])
    torch.testing.assert_close(of_responses(found[1]), of_responses(found[0]))
    assert all((t[: n - 1] == 0).all() for t, n in zip(found[1].unbind(), PROMPTS, strict=True))


def test_other_losses_get_the_log_probabilities_of_prompts(compare):
    def loss(model_output, data, dp_group):
        return model_output["log_probs"].values().sum(), {}

    plain, fused = models()
    found = [
        once(module, lambda: engine_of(module).forward_step(batch_of(kernels), loss, False)[0])  # noqa: B023
        for module, kernels in ((plain, False), (fused, True))
    ]
    compare("verl", "a loss of your own", WRITES, found[1], found[0])


def test_your_own_policy_loss_is_called_once(monkeypatch):
    calls = []

    def own(*args, **kwargs):
        calls.append(kwargs)
        return POLICY_LOSS_REGISTRY["vanilla"](*args, **kwargs)

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", own)
    plain, fused = models()
    want, got = train(plain, False, "own", True), train(fused, True, "own", True)
    assert far(got, want) <= 2e-5
    assert len(calls) == 2


class TestRefusals:
    def test_adapter_on_the_head(self):
        _, fused = models()
        fused.lm_head = nn.Linear(D, V, bias=True)
        with pytest.raises(NotImplementedError, match="must have no adapter and no bias"):
            engine_of(fused).prepare_model_inputs(batch_of(True))

    def test_model_without_a_fused_forward(self):
        plain, _ = models()
        plain._verl_fused_kernels_backend = "logitless"
        with pytest.raises(NoEffectError, match="no fused forward for Qwen2ForCausalLM: it called"):
            train(plain, True, "vanilla", True)

    def test_other_backends_are_verl_s(self):
        _, fused = models()
        monkey_patch.patch_forward_with_backends(fused, True, "torch")
        with pytest.raises(AssertionError, match="per sample temperature"):
            engine_of(fused).prepare_model_inputs(batch_of(True, PER_SAMPLE))
