"""fuse on models of Transformers, under its Trainer and PEFT: trained as they are without it."""

import copy
import importlib.util
import re

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

from transformers import Trainer, TrainingArguments

import logitless as ll
from logitless.heads.head import Head
from logitless.lazy import recipe, report
from logitless.lazy.logits import LazyLogits
from tests.support.families import WAYS, Outcome, apart, checked, kept_logits, trained
from tests.support.paths import ROOT
from tests.support.tiny_models import V, batch, build

pytestmark = pytest.mark.filterwarnings(
    "default",  # those of Transformers and its friends are theirs
    "error:logits of a fused head are materialised",
)
AS_NEAR = 1.5  # times the plain model's own distance from fp32
FAMILIES = [
    "LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM",
    "GPT2LMHeadModel", "CohereForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM",
    "MixtralForCausalLM", "BloomForCausalLM", "MambaForCausalLM", "ProphetNetForCausalLM",
    "BartForConditionalGeneration",
]  # fmt: skip


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch):
    ll.report()
    monkeypatch.setattr(report, "_warned", set())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.few(6)
def test_a_family(name):
    assert checked(name) == Outcome("fused", generates=tuple(WAYS))


def steps(model: nn.Module, count: int = 5) -> dict[str, torch.Tensor]:
    """The parameters after some steps of SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(count):
        trained(model)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_parameters(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, p in want.items():
        assert (got[name] - p).abs().max() <= 1e-5 * max(1, p.abs().max()), name


def assert_trains_as_plain(plain: nn.Module, change=None, compiled=None) -> None:
    """Also if `change` is made to both after the one is fused; nothing is materialised."""
    fused = ll.fuse(copy.deepcopy(plain))
    if change is not None:
        torch.manual_seed(3)
        plain = change(plain) or plain
        torch.manual_seed(3)
        fused = change(fused) or fused
    logits = kept_logits(fused)
    if compiled is not None:
        torch._dynamo.reset()
        compiled(fused).compile(backend="eager")
    count = 5 if compiled is None else 2
    assert_same_parameters(steps(fused, count), steps(plain, count))
    assert logits
    assert all(type(z) is LazyLogits and not z.known for z in logits)


@pytest.mark.parametrize("tied", [True, False])
def test_five_steps(tied):
    model = build("LlamaForCausalLM", tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_trains_as_plain(model)


def test_gradient_checkpointing():
    assert_trains_as_plain(
        build("LlamaForCausalLM"), change=lambda model: model.gradient_checkpointing_enable()
    )


def test_logits_to_keep():
    """Of the last rows alone, with labels of as many."""
    model = build("LlamaForCausalLM")
    given = batch(model)

    def step(model):
        model.zero_grad()
        out = model(given["input_ids"], labels=given["labels"][:, -4:], logits_to_keep=4)
        assert out.logits.shape == (2, 4, V)
        out.loss.backward()
        return out.loss.detach(), {k: p.grad for k, p in model.named_parameters()}

    want = step(copy.deepcopy(model))
    logits = kept_logits(ll.fuse(model))
    assert apart(step(model), want) == ""
    assert not logits[0].known


def test_the_benchmark_of_a_training_step(tmp_path):
    """benchmarks/training_step.py: every way is right, and in the table."""
    path = ROOT / "benchmarks/training_step.py"
    spec = importlib.util.spec_from_file_location("training_step", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.main(["--quick", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "training-step.md").read_text()
    assert re.search(r"^\| 2 × 64( \| [\d,]+ · \d+\.\d){3,} \|$", text, re.M)


def test_saved_and_loaded_it_is_plain(tmp_path):
    fused = ll.fuse(build("LlamaForCausalLM"))
    fused.save_pretrained(tmp_path)
    loaded = type(fused).from_pretrained(tmp_path)
    assert apart(trained(loaded), trained(fused)) == ""
    assert type(loaded(**batch(loaded)).logits) is torch.Tensor


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_bf16_autocast(name):
    """As near to fp32 as the plain model; where and how often they round is not the same."""
    plain = build(name)
    fused = ll.fuse(copy.deepcopy(plain))
    given = {"num_items_in_batch": torch.tensor(7)}
    _, exact = trained(plain, **given)

    def error(grads) -> float:
        far = sum((grads[name] - exact[name]).square().sum() for name in exact)
        return float(far / sum(g.square().sum() for g in exact.values())) ** 0.5

    with torch.autocast("cpu", torch.bfloat16):
        (loss, got), (other, want) = trained(fused, **given), trained(plain, **given)
    assert loss.dtype == other.dtype
    assert loss == pytest.approx(other.item(), rel=1e-4)
    assert 0 < error(got) < AS_NEAR * error(want)


def test_bf16_differs_by_when_a_sum_is_divided():
    """We divide the rounded gradient of a sum, autograd before it rounds: by 8 it is the same."""
    plain = build("LlamaForCausalLM")
    fused = ll.fuse(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        for items, equal in ((8, True), (7, False)):
            given = {"num_items_in_batch": torch.tensor(items)}
            (_, got), (_, want) = trained(fused, **given), trained(plain, **given)
            assert all(torch.equal(got[name], want[name]) for name in want) == equal


# --- Trainer


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.randint(3, 90, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": torch.where(torch.arange(7) < i % 3, -100, ids)}


def with_trainer(model: nn.Module, folder, **options) -> tuple[list[dict], dict[str, Tensor]]:
    """What five steps of a Trainer and an evaluation after them log, and the parameters."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=5, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=5,
        optim="sgd", disable_tqdm=True, use_cpu=True, seed=1, max_grad_norm=1e3, **options,
    )  # fmt: skip

    def metrics(found) -> dict:
        """A number that rounding moves by as little as the logits: an argmax may be of a tie."""
        return {"largest": float(found.predictions.max(-1).mean())}

    trainer = Trainer(
        model, arguments, train_dataset=Data(), eval_dataset=Data(), compute_metrics=metrics
    )
    trainer.train()
    return trainer.state.log_history, dict(trainer.model.named_parameters())


def assert_same_logs(got: list[dict], want: list[dict]) -> None:
    for key in ("loss", "grad_norm", "eval_loss", "eval_largest"):
        found, others = ([entry[key] for entry in logs if key in entry] for logs in (got, want))
        assert len(found) == len(others) == (1 if key.startswith("eval") else 5)
        assert found == pytest.approx(others, rel=1e-5, abs=0), key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_trainer(options, tmp_path):
    """Losses, evaluation and metrics are those of the plain run."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    torch._dynamo.reset()
    counters.clear()
    layers = 1 if "torch_compile" in options else 2
    model = build("LlamaForCausalLM", num_hidden_layers=layers)
    plain = copy.deepcopy(model)
    logits = kept_logits(ll.fuse(model))
    got, parameters = with_trainer(model, tmp_path, **options)
    assert bool(counters["stats"]["unique_graphs"]) == ("torch_compile" in options)
    options = {name: value for name, value in options.items() if "compile" not in name}
    want, others = with_trainer(plain, tmp_path, **options)
    assert_same_logs(got, want)
    assert_same_parameters(parameters, others)
    assert logits
    assert all(not z.known for z in logits)


# --- PEFT


def adapted(model: nn.Module, **options) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft: requirements/tests.txt")
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=2, lora_dropout=0.0, init_lora_weights=False, **options)
    return peft.get_peft_model(model, lora)


LORA = {
    "in the body": {"target_modules": ["q_proj", "v_proj"]},
    "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "head too": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize(
    ("name", "lora", "part"),
    [
        ("LlamaForCausalLM", None, "model"),  # the body alone
        ("GPT2LMHeadModel", None, ""),
        ("Gemma2ForCausalLM", None, ""),
        *(("LlamaForCausalLM", how, "") for how in LORA),
    ],
)
@pytest.mark.few(1)
def test_a_compiled_model(name, lora, part):
    """`test_trainer` compiles a Llama. With LoRA, the hooks of `fuse` are on an inner model."""
    assert_trains_as_plain(
        build(name, num_hidden_layers=1, tie_word_embeddings=lora is None),
        change=None if lora is None else lambda model: adapted(model, **LORA[lora]),
        compiled=lambda model: model.get_submodule(part),
    )


@pytest.mark.parametrize("trains", [True, False])
def test_accuracy_after_the_model_s_own_loss(trains, monkeypatch):
    """The argmax of the rows that count costs no product of hidden states and weight."""
    monkeypatch.setattr(recipe, "SMALL", 0)
    plain = build("LlamaForCausalLM").train(trains)
    model, given = ll.fuse(copy.deepcopy(plain), scores=True), batch(plain)
    given["labels"] = given["input_ids"]  # all rows count, except the last
    want = plain(**given).logits[:, :-1].argmax(-1)
    rows, product = [], Head.product
    monkeypatch.setattr(
        Head, "product", lambda self, h, *rest: rows.append(len(h)) or product(self, h, *rest)
    )
    with torch.set_grad_enabled(trains):
        logits = model(**given).logits
    assert type(logits) is LazyLogits
    rows.clear()
    assert torch.equal(logits[:, :-1].argmax(-1), want)
    assert not rows
