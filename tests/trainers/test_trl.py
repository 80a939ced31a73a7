"""With `use_in_trl` or `fuse`, TRL's trainers log the same numbers and materialise no logits."""

import copy

import pytest
import torch
import trl
from torch._dynamo.utils import counters
from trl.trainer import distillation_trainer, utils

import logitless as ll
from logitless.integrations import trl as adapter
from logitless.integrations import trl_statistics as computed
from tests.support import trl_cases
from tests.support.trainer_runs import LAZY, WORKSPACE, Widest, far, model, numbers, run
from tests.support.trl_cases import ADAPTED, BY_KERNEL, FUSED, Case, arguments

pytestmark = pytest.mark.filterwarnings("default")
BOTH = "`ll.fuse(model)`, `ll.hf.use_in_trl(trainer)`"
EVALUATE = (trl_cases.sft, trl_cases.dpo, trl_cases.kto)  # trainers that evaluate losses


def fused(model):
    return ll.fuse(model, workspace=WORKSPACE)


def adapted(trainer, **options):
    return ll.hf.use_in_trl(trainer, workspace=WORKSPACE, **options)


def check(compare, case: Case, trainer, call: str, folder) -> None:
    evaluates = case.make in EVALUATE
    want = run(case.trainer(folder / "plain"), evaluates)
    assert any(entry.get("grad_norm", 0) > 0 for entry in want.logs)
    got = run(trainer, evaluates)
    name, _, options = case.name.partition(", ")
    compare(f"TRL {name}", options or "its defaults", call, got, want, case.tolerance)


@pytest.mark.parametrize("case", ADAPTED, ids=lambda case: case.name)
def test_adapted(case, tmp_path, compare):
    # The losses of these cases are computed from the logits of the model.
    needs_fuse = case.make is trl_cases.gkd or "label_smoothing_factor" in case.options
    trainer = adapted(case.trainer(tmp_path, fused if needs_fuse else lambda model: model))
    call = BOTH if needs_fuse else "`ll.hf.use_in_trl(trainer)`"
    check(compare, case, trainer, call, tmp_path)


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_fused(case, tmp_path, compare):
    """Trainers that compute the loss from the model's logits do not need `use_in_trl`."""
    check(compare, case, case.trainer(tmp_path, fused), "`ll.fuse(model)`", tmp_path)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Lets TRL call its GPU kernel on a CPU, under Triton's interpreter."""

    def supported(logits, index=None, row_mask=None):
        return index is None or index.shape == logits.shape[:-1]

    monkeypatch.setattr(utils, "_supports_trl_loss_kernel", supported)


@pytest.mark.parametrize("case", BY_KERNEL, ids=lambda case: case.name)
def test_kernel_over_logits(case, tmp_path, compare, as_on_a_gpu):
    alone = run(case.trainer(tmp_path, fused))
    assert alone.materialised  # the kernel reads the logits from memory
    trainer = adapted(case.trainer(tmp_path, fused))
    check(compare, case, trainer, BOTH, tmp_path)
    ll.hf.unuse_in_trl(trainer)
    assert run(trainer).materialised


SFT, DPO, DISTILLATION = (
    next(case for case in ADAPTED if case.name == name)
    for name in ("SFT", "DPO", "Distillation, beta=0.5")
)


def test_a_fused_and_adapted_model_is_fused(tmp_path):
    """The options of `fuse` are the defaults, and there is no warning that `fuse` has no effect."""
    trainer = ll.hf.use_in_trl(SFT.trainer(tmp_path, fused))
    found = run(trainer)
    assert found.widest <= LAZY
    assert not [text for text in found.warnings if "fuse" in text]
    assert ll.is_fused(trainer.model), ll.is_fused(trainer.model)


@pytest.mark.parametrize("name", ["SFT", "SFT, bf16", "DPO", "OnlineDPO"])
def test_the_callback_fuses_and_adapts(name, tmp_path):
    """As in axolotl and ms-swift: after accelerate has prepared the model."""
    case = next(case for case in (*ADAPTED, *FUSED) if case.name == name)
    want, trainer = run(case.trainer(tmp_path)), case.trainer(tmp_path)
    trainer.add_callback(ll.hf.LogitlessCallback(trainer=trainer, workspace=WORKSPACE))
    got = run(trainer)
    assert far(got, want) <= case.tolerance
    assert ll.is_fused(trainer.model)
    # DPO's reference is not fused, and small logits of OnlineDPO's samples are plain.
    assert name in ("DPO", "OnlineDPO") or got.widest <= LAZY


def test_options_of_use_in_trl_take_precedence(tmp_path):
    trainer = ll.hf.use_in_trl(SFT.trainer(tmp_path, fused), workspace=1 << 30)
    assert run(trainer).widest > LAZY


def test_fused_alone_warns_and_names_the_adapter(tmp_path):
    trainer = SFT.trainer(tmp_path, fused)
    found = run(trainer)
    assert found.widest > LAZY
    assert [text for text in found.warnings if "ll.hf.use_in_trl(trainer)" in text]
    assert not ll.is_fused(trainer.model)


def test_twice_is_once_and_unuse_restores(tmp_path):
    trainer = DPO.trainer(tmp_path)
    forwards = [trainer.model.forward, trainer.ref_model.forward]
    assert adapted(adapted(trainer)) is trainer
    assert trainer.model.forward.__wrapped__ is forwards[0].__func__
    assert ll.hf.unuse_in_trl(trainer) is trainer
    assert [trainer.model.forward, trainer.ref_model.forward] == forwards
    assert run(trainer).widest > LAZY
    ll.hf.unuse_in_trl(trainer)  # harmless


def test_unuse_under_the_wrapper_of_accelerate(tmp_path):
    """In training with bf16, accelerate wraps the forward of the model."""
    case = next(case for case in ADAPTED if case.name == "SFT, bf16")
    trainer = adapted(case.trainer(tmp_path))
    assert run(trainer).widest <= LAZY
    ll.hf.unuse_in_trl(trainer)
    assert run(trainer).widest > LAZY
    assert run(adapted(trainer)).widest <= LAZY


@pytest.mark.parametrize(
    ("case", "ours"),
    [
        (SFT, "token_statistics"), (DISTILLATION, "divergences"),
        (BY_KERNEL[0], "logprobs_and_entropies"),
    ],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_other_trainers_are_not_adapted(case, ours, tmp_path, as_on_a_gpu, monkeypatch):
    """TRL's functions are replaced only while a step of the adapted trainer runs."""

    def functions():
        return (
            getattr(utils, adapter.STATISTICS), getattr(utils, adapter.KERNEL),
            getattr(distillation_trainer, adapter.DIVERGENCES),
        )  # fmt: skip

    def stops(*_, **__):
        assert functions() != before
        raise RuntimeError("stopped in a step")

    before = functions()
    trainer, other = adapted(case.trainer(tmp_path, fused)), case.trainer(tmp_path, fused)
    found = run(trainer)
    assert found.widest <= LAZY
    assert not found.materialised
    assert functions() == before
    found = run(other)
    assert found.widest > LAZY or found.materialised
    monkeypatch.setattr(adapter, ours, stops)
    with pytest.raises(RuntimeError, match="stopped in a step"):
        adapted(other).train()
    assert functions() == before


def test_a_second_trainer_of_an_adapted_model(tmp_path):
    """TRL's second trainer adds a second fused head. This head is adapted only if asked for."""
    first = adapted(SFT.trainer(tmp_path))
    second = trl_cases.dpo(first.model, arguments(tmp_path), lambda model: model)
    assert run(second).widest > LAZY
    assert run(adapted(second)).widest <= LAZY
    assert run(first).widest <= LAZY


def test_copies_are_adapted():
    ids = torch.arange(20).reshape(2, 10)
    policy = model()
    utils.add_fused_lm_head(policy, outputs=("log_probs", "entropy"))
    plain = policy(input_ids=ids, labels=ids, fused_lm_head=True)
    copied = copy.deepcopy(adapted(policy))
    ll.hf.unuse_in_trl(policy)
    for each in (policy, copied):
        with Widest() as widest:
            got = each(input_ids=ids, labels=ids, fused_lm_head=True)
        assert (widest.rows <= LAZY) == (each is copied)
        torch.testing.assert_close(got.log_probs, plain.log_probs)
        torch.testing.assert_close(got.entropy, plain.entropy)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    got = copied(input_ids=ids, labels=ids, fused_lm_head=True)  # uses the copy's own weights
    torch.testing.assert_close(got.entropy, torch.full_like(got.entropy, 211.0).log())


def test_generation_and_logits_are_unchanged():
    ids = torch.arange(20).reshape(2, 10)
    policy = model()
    want = policy(input_ids=ids, labels=ids)
    tokens = policy.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    utils.add_fused_lm_head(policy)
    adapted(policy)
    got = policy(input_ids=ids, labels=ids)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(policy.generate(input_ids=ids, max_new_tokens=3, do_sample=False), tokens)


def test_log_probs_of_an_overridden_loss_have_gradients(tmp_path):
    """A subclass can use the log-probabilities in other ways than in a sum."""

    class Squares(trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            super().compute_loss(model, dict(inputs))
            return model(**inputs, fused_lm_head=True).log_probs.square().mean()

    def trainer(folder):
        plain = SFT.trainer(folder)
        plain.__class__ = Squares
        return plain

    want, got = run(trainer(tmp_path)), run(adapted(trainer(tmp_path)))
    assert far(got, want) <= 2e-5
    assert got.widest <= LAZY


def test_torch_compile(tmp_path, monkeypatch):
    """Compares only logged numbers, because the dispatch mode of `run` disables the compiler."""
    calls = []

    @torch.compiler.disable
    def counted(*args):
        calls.append(args)
        return computed.token_statistics(*args)

    monkeypatch.setattr(adapter, "token_statistics", counted)
    options = {**arguments(tmp_path), "torch_compile": True, "torch_compile_backend": "eager"}
    logs = []
    for change in (lambda trainer: trainer, adapted):
        torch._dynamo.reset()
        counters.clear()
        trainer = change(trl_cases.sft(model(), dict(options), lambda model: model))
        trainer.train()
        assert counters["stats"]["unique_graphs"] > 0
        logs.append(numbers(trainer.state.log_history))
    for got, want in zip(*logs, strict=True):
        assert want == pytest.approx(got, rel=2e-5, abs=2e-5)
    assert len(calls) == options["max_steps"]


class TestErrors:
    def test_types(self):
        with pytest.raises(TypeError, match=r"model must be a trainer of TRL .* got int"):
            ll.hf.use_in_trl(3)

    def test_model_without_the_head(self):
        with pytest.raises(TypeError, match="LlamaForCausalLM, which has no fused head: create"):
            ll.hf.use_in_trl(model())

    def test_trainer_without_the_head(self, tmp_path):
        case = next(case for case in FUSED if case.name == "OnlineDPO")
        with pytest.raises(ll.hf.OnlyFuseNeededError, match="OnlineDPOTrainer, which calls the"):
            ll.hf.use_in_trl(case.trainer(tmp_path))

    def test_loss_that_does_not_call_the_head(self, tmp_path):
        class Own(trl.SFTTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs).loss

        trainer = SFT.trainer(tmp_path)
        trainer.__class__ = Own
        with pytest.raises(TypeError, match="got Own, which calls the model's own head"):
            ll.hf.use_in_trl(trainer)

    def test_options(self, tmp_path):
        with pytest.raises(TypeError, match="workspace"):
            ll.hf.use_in_trl(SFT.trainer(tmp_path), workspaec=1)

    def test_weights_of_deepspeed(self):
        ids = torch.arange(20).reshape(2, 10)
        policy = model()
        utils.add_fused_lm_head(policy)
        adapted(policy)
        policy.lm_head.weight.ds_id = 0
        with pytest.raises(NotImplementedError, match="DeepSpeed ZeRO-3"):
            policy(input_ids=ids, labels=ids, fused_lm_head=True)
