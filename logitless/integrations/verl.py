"""verl, in its configuration:

    actor_rollout_ref.model.external_lib=logitless.integrations.verl
    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=logitless

A backend of verl's fused forwards on FSDP, also with a temperature per sample and with Σ π². Rows
of prompts are dropped before the head. In training, the head rehearses verl's own `ppo_loss`, with
the policy loss of its registry, for the rows whose logits are in memory: so the gradients take
three GEMMs, or two over a frozen head. The first steps find out whether a loss needs single rows,
whole sequences or all log-probabilities, and backward checks every gradient (token_gradients.py).
"""

import functools
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .seams import NoEffectError, check_seams

ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
FUSED = "verl.utils.experimental.torch_functional:FusedLinearForPPO"
check_seams("verl", {
    f"{FUSED}.__init__": "self, chunk_size, impl_backend",
    f"{FUSED}.forward": "self, hidden_states, vocab_weights, input_ids, temperature",
    "verl.models.transformers.monkey_patch:patch_forward_with_backends":
        "model, use_fused_kernels, fused_kernels_backend",
    f"{ENGINE}.prepare_model_inputs": "self, micro_batch",
    f"{ENGINE}.prepare_model_outputs":
        "self, output, output_args, micro_batch, logits_processor_func",
    f"{ENGINE}.forward_step": "self, micro_batch, loss_function, forward_only",
    "verl.workers.utils.losses:ppo_loss": "config, model_output, data, dp_group",
    "verl.workers.utils.padding:no_padding_2_padding": "tensor, data",
    "verl.trainer.ppo.core_algos:get_policy_loss_fn": "name",
})  # fmt: skip

from verl.models.transformers import monkey_patch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.experimental import torch_functional
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from ..heads.gemms import autocasts
from ..lazy.linear_logits import LinearLogits
from ..losses.statistics import token_logprobs
from .token_gradients import Tokens, Ways, statistics_of

NAME = "logitless"
BACKEND, SQUARES = "_verl_fused_kernels_backend", "calculate_sum_pi_squared"  # names of verl
OPTIONS: dict[str, Any] = {}  # options of LinearLogits, such as workspace, for all models
STEP: ContextVar["Step | None"] = ContextVar("step", default=None)
theirs = torch_functional.FusedLinearForPPO
patch_below = monkey_patch.patch_forward_with_backends
inputs_below = FSDPEngineWithLMHead.prepare_model_inputs
outputs_below = FSDPEngineWithLMHead.prepare_model_outputs
forward_below = FSDPEngineWithLMHead.forward_step


class Step:
    """One micro-batch: which rows of its head count, and verl's loss of their log-probabilities."""

    def __init__(self, engine: Any, batch: Any):
        self.engine = engine
        self.batch = changed(batch, **{SQUARES: False})  # verl refuses Σ π² with fused kernels
        self.wants_squares, self.entropy = flag(batch, SQUARES), flag(batch, "calculate_entropy")
        self.squares: Tensor | None = None  # Σ π² of all rows
        self.heads = 0  # calls of the head
        self.rest: Any = None  # what verl hands from prepare_model_inputs to prepare_model_outputs
        self.is_packed = tu.get_non_tensor_data(batch, "use_remove_padding", True)
        self.counts: Tensor | None = None  # (B, T), rows that count
        self.is_token: Tensor | None = None  # (B, T), rows that exist
        self.loss_function = vars(engine).get("_logitless_loss")
        # A loss of others may read prompts; verl's trainer reads the responses of an inference.
        is_known = self.loss_function is None or self._is_ppo()
        if is_known and "prompts" in batch and not engine.use_ulysses_sp:
            self._find_rows()
        self.rehearses = torch.is_grad_enabled() and self.counts is not None and self._is_verl_s()

    def _is_ppo(self) -> bool:
        return getattr(self.loss_function, "func", None) is ppo_loss

    def _is_verl_s(self) -> bool:
        """Whether the policy loss is verl's own. No other code is called several times."""
        config = self.loss_function.keywords.get("config") if self._is_ppo() else None
        name = config and config.policy_loss.get("loss_mode", "vanilla")
        return bool(name) and get_policy_loss_fn(name).__module__.startswith("verl.")

    def _find_rows(self) -> None:
        lengths = self.batch["input_ids"].offsets().diff()
        total, longest = int(lengths.sum()), int(lengths.max())
        # verl's own slices of the responses, taken from the places of the rows; 0 is padding
        places = no_padding_2_padding(torch.arange(1, total + 1, device=lengths.device), self.batch)
        if self.loss_function is not None:
            mask = self.batch.select("response_mask").to_padded_tensor()["response_mask"]
            places = places * mask.to(places)
        counts = torch.zeros(total + 1, dtype=torch.bool, device=lengths.device)
        counts[places] = True
        self.is_token = torch.arange(longest, device=lengths.device) < lengths[:, None]
        self.counts = torch.zeros_like(self.is_token).masked_scatter(self.is_token, counts[1:])

    def rows(self, count: int) -> Tensor:
        """The places of the rows that count, among the flattened rows of the head."""
        if self.counts is None:
            return torch.arange(count)
        counts = self.counts[self.is_token] if self.is_packed else self.counts.flatten()
        return counts.nonzero().squeeze(1)

    def loss(self, logprob: Tensor, entropy: Tensor, _squares: Any, _mask: Tensor) -> Tensor:
        """verl's loss of given log-probabilities and entropies (B, T): a rehearsal."""
        given = [logprob, entropy]
        if self.is_packed:
            pad = (0, self.rest["pad_size"])
            given = [nn.functional.pad(t[self.is_token], pad)[None] for t in given]
        group = self.engine.get_data_parallel_group()
        with torch.random.fork_rng([logprob.device] if logprob.is_cuda else []):  # a loss can draw
            found = self.outputs(*given)
            return self.loss_function(model_output=found, data=self.batch, dp_group=group)[0]

    def outputs(self, logprob: Tensor, entropy: Tensor | None) -> Any:
        output = SimpleNamespace(log_probs=logprob, entropy=entropy)
        batch = self.batch if entropy is not None else changed(self.batch, calculate_entropy=False)
        return outputs_below(self.engine, output, self.rest, batch, None)


class Head(nn.Module):
    """FusedLinearForPPO of our backend."""

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: Any = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        step = STEP.get()
        if step is None:
            raise NoEffectError("logitless knows only FSDPEngineWithLMHead of verl's engines.")
        step.heads += 1
        hidden, ids = hidden_states.flatten(0, -2), input_ids.flatten().long()
        rows = step.rows(len(ids)).to(ids.device)
        if len(rows) < len(ids):
            hidden = hidden[rows]
        heat = temperature.flatten()[rows] if isinstance(temperature, Tensor) else temperature
        if not autocasts(hidden.device):
            vocab_weights = vocab_weights.to(hidden.dtype)
        logits = LinearLogits(hidden, vocab_weights, **OPTIONS)
        wants = {"entropy": step.entropy, "total": False, "argmax": False}
        how = {"temperature": heat, "softcap": None}
        rehearsal = step if step.rehearses else None
        tokens = Tokens(ids[rows], None, step.counts, None, how, wants, rehearsal)
        ways = vars(step.engine).setdefault("_logitless_ways", Ways("rows"))
        stats = statistics_of(tokens, ways, logits.head)

        def whole(t: Tensor) -> Tensor:
            return t.new_zeros(len(ids)).index_copy(0, rows, t).view(input_ids.shape)

        if step.wants_squares:  # log Σ π² = 2 log p(T) - log p(T / 2), without a gradient
            with torch.no_grad():
                half = token_logprobs(logits, ids[rows], temperature=heat / 2)
                step.squares = whole((2 * stats.logprob - half).exp())
        return whole(stats.logprob), None if stats.entropy is None else whole(stats.entropy)


def flag(batch: Any, key: str) -> bool:
    return bool(tu.get_non_tensor_data(batch, key, False))


def changed(batch: Any, **flags: Any) -> Any:
    batch = batch.copy()
    for key, value in flags.items():
        tu.assign_non_tensor_data(batch, key, value)
    return batch


def is_ours(engine: Any, batch: Any) -> bool:
    if "_logitless" not in vars(engine):
        models = [m for m in engine.module.modules() if vars(m).get(BACKEND) == NAME]
        for head in (model.get_output_embeddings() for model in models):
            if hasattr(head, "base_layer") or getattr(head, "bias", None) is not None:
                raise NotImplementedError(
                    "the head must have no adapter and no bias, because verl's fused forwards read"
                    " only its weight. Use use_fused_kernels=False, or exclude lm_head from LoRA."
                )
        engine._logitless = bool(models)
    return engine._logitless and flag(batch, "use_fused_kernels")


def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool):
    self._logitless_loss = loss_function
    token = STEP.set(None)
    try:
        return forward_below(self, micro_batch, loss_function, forward_only)
    finally:
        STEP.reset(token)


def prepare_model_inputs(self, micro_batch: Any):
    if not is_ours(self, micro_batch):
        return inputs_below(self, micro_batch)
    step = Step(self, micro_batch)
    # The path without fused kernels packs, pads and slices labels and a temperature per sample.
    inputs, step.rest = inputs_below(self, changed(micro_batch, use_fused_kernels=False))
    heat = micro_batch["temperature"]
    if step.is_packed:
        inputs["shift_labels"] = step.rest["input_ids_rmpad_rolled"][None]
    if isinstance(heat, Tensor):
        heat = step.rest["temperature_rmpad" if step.is_packed else "temperature"]
        heat = heat[None] if step.is_packed else heat[:, None].expand(inputs["input_ids"].shape)
        heat = heat.clamp(min=1e-8)  # as verl does
    STEP.set(step)
    return {**inputs, "temperature": heat, "return_dict": True}, step.rest


def prepare_model_outputs(
    self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
):
    step = STEP.get()
    if step is None:
        return outputs_below(self, output, output_args, micro_batch, logits_processor_func)
    STEP.set(None)
    if step.heads != 1:
        raise NoEffectError(
            f"verl has no fused forward for {type(self.module).__name__}: it called the head"
            f" {step.heads} times."
        )
    found = outputs_below(self, output, output_args, step.batch, logits_processor_func)
    if step.squares is not None:
        found["sum_pi_squared"] = step.outputs(step.squares, None)["log_probs"]
    return found


def build(chunk_size: int = 512, impl_backend: str = "torch"):
    return Head() if impl_backend == NAME else theirs(chunk_size, impl_backend)


@functools.wraps(patch_below)
def patch_forward(model, use_fused_kernels=False, fused_kernels_backend=None):
    ours = fused_kernels_backend == NAME
    # The forward for "torch" is the one that calls FusedLinearForPPO.
    patch_below(model, use_fused_kernels, "torch" if ours else fused_kernels_backend)
    if ours and use_fused_kernels:
        setattr(model, BACKEND, NAME)


torch_functional.FusedLinearForPPO = build
monkey_patch.patch_forward_with_backends = patch_forward
for function in (prepare_model_inputs, prepare_model_outputs, forward_step):
    setattr(FSDPEngineWithLMHead, function.__name__, function)
