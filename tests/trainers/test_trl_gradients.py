"""With `use_in_trl`, a loss of TRL takes three GEMMs at the head, and two if it is frozen."""

import copy
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from trl.trainer import utils

import logitless as ll
from logitless.heads import choose_cut
from tests.support import trl_cases
from tests.support.trainer_runs import D, V, model
from tests.support.trl_cases import arguments

pytestmark = pytest.mark.filterwarnings("default")
B, PROMPT, T = 4, 3, 6
ROW = 216 * 4  # bytes of a row of logits, which is padded to a multiple of 8
STEPS = 4  # the adapter tries at most four ways


class Gemms(TorchDispatchMode):
    """Counts the work of GEMMs with the vocabulary."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = [t.shape for t in args if isinstance(t, torch.Tensor)]
        if func._overloadpacket in flop_registry and any(V in shape for shape in shapes):
            self.flops += flop_registry[func._overloadpacket](
                *args, **{**(kwargs or {}), "out_val": out}
            )
        return out


def tokens(width: int, seed: int = 0):
    """Returns ids (B, width) and a mask whose sequences have different lengths."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, V, (B, width), generator=draw)
    return ids, torch.arange(width) < torch.tensor([[width], [width - 3], [width - 1], [2]])


def policy_inputs() -> dict:
    draw = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(shape, generator=draw)

    ids, mask = tokens(T)
    return {
        "prompt_ids": tokens(PROMPT, 1)[0], "prompt_mask": torch.ones(B, PROMPT, dtype=torch.long),
        "completion_ids": ids, "completion_mask": mask.long(), "advantages": noise(B),
        "num_items_in_batch": torch.tensor(17.0),
        "old_per_token_logps": noise(B, T) * 0.3 - 5.5, "ref_per_token_logps": noise(B, T) - 5.5,
        "sampling_per_token_logps": noise(B, T) * 0.3 - 5.5,
        "importance_sampling_ratio": noise(B, T).exp(), "old_logps": noise(B) * 0.1 - 24.0,
    }  # fmt: skip


def preference_inputs(precomputed: bool = False) -> dict:
    ids, mask = tokens(PROMPT + T)
    completion = mask.long() * (torch.arange(PROMPT + T) >= 1)
    inputs = {
        "input_ids": ids, "attention_mask": mask.long(), "completion_mask": completion,
    }  # fmt: skip
    if precomputed:
        inputs["ref_chosen_logps"] = torch.tensor([-30.0, -28.0])
        inputs["ref_rejected_logps"] = torch.tensor([-33.0, -10.0])
    return inputs


def kto_inputs() -> dict:
    other = {f"KL_{name}": t for name, t in preference_inputs().items()}
    other["KL_input_ids"] = tokens(PROMPT + T, 4)[0]
    return {**preference_inputs(), **other, "label": torch.tensor([1, 0, 0, 1]).bool()}


MAKE = {
    "grpo": (trl_cases.grpo, {}, policy_inputs),
    "rloo": (trl_cases.rloo, {"beta": 0.0}, policy_inputs),
    "dpo": (trl_cases.dpo, {}, preference_inputs),
    "kto": (trl_cases.kto, {}, kto_inputs),
}  # fmt: skip


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Returns a plain trainer and a trainer to adapt, with equal models."""
    made = {}

    def pair(name: str, **options):
        key = (name, str(options))
        if key not in made:
            make, more, _ = MAKE[name]
            folder = tmp_path_factory.mktemp("trainer")
            made[key] = [
                make(model(), {**arguments(folder), **more, **copy.deepcopy(options)}, lambda m: m)
                for _ in range(2)
            ]
            for each in made[key]:
                each.current_gradient_accumulation_steps = 2
        return made[key]

    return pair


def step(trainer, inputs: dict):
    """Returns the loss, the gradients, the logged metrics, and the GEMMs at the head."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    with Gemms() as gemms:
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        (3.0 * loss).backward()
    gradients = {
        n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None
    }
    return loss.detach(), gradients, dict(trainer._metrics["train"]), gemms.flops


@contextmanager
def changed(trainer, changes: dict):
    """Sets attributes of a trainer, and of its arguments ("args.name")."""
    with ExitStack() as stack:
        for name, value in changes.items():
            owner = trainer.args if name.startswith("args.") else trainer
            stack.enter_context(patch.object(owner, name.removeprefix("args."), value))
        yield


def compare(trainers, inputs: dict, changes: dict, rows: int, room: int, references: int = 0):
    """Compares steps of two trainers. Returns the GEMMs at the head in the last step.

    The workspace holds `room` of the `rows` rows of logits. The GEMMs of references are left out.
    """
    plain, ours = trainers
    ll.hf.use_in_trl(ours, workspace=room * ROW)
    with changed(plain, changes), changed(ours, changes):
        for _ in range(STEPS):
            want, got = step(plain, inputs), step(ours, inputs)
            close(got[0], want[0])
            assert got[1].keys() == want[1].keys()
            for name, g in want[1].items():
                size = max(float(g.abs().max()), 1e-3)
                close(got[1][name] / size, g / size)
            assert got[2].keys() == want[2].keys()
            for name, value in want[2].items():
                close(torch.tensor(got[2][name]), torch.tensor(value))
    return round(got[3] / (2 * rows * V * D) - references, 6)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    monkeypatch.setattr(choose_cut, "SMALL", {"cuda": 0, "cpu": 0})


TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
GRPO = [
    *({"loss_type": t, "importance_sampling_level": level} for t in TOKEN
      for level in ("token", "sequence")),
    {"loss_type": "dapo", "beta": 0.1},
    {"loss_type": "grpo", "beta": 0.1, "args.use_bias_correction_kl": True},
    {"args.delta": 1.1},
    {"off_policy_mask_threshold": 0.05},
    {"use_vllm": True, "vllm_importance_sampling_correction": True},
    {"_entropy_bonus_enabled": True, "entropy_coef": 0.3},
    {"_entropy_bonus_enabled": True, "entropy_coef": 0.3, "use_adaptive_entropy": True,
     "args.entropy_target": 9.0, "_last_world_entropy": 0.0},
]  # fmt: skip
ROWS = int(tokens(T)[1].sum())


@pytest.mark.parametrize("changes", GRPO, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_grpo(frozen, changes, trainers):
    options = {"lora": {}} if frozen else {}
    made = trainers("grpo", **options)
    assert compare(made, policy_inputs(), changes, ROWS, 12) == 3 - frozen


def test_on_policy(trainers):
    inputs = policy_inputs()
    del inputs["old_per_token_logps"]
    assert compare(trainers("grpo"), inputs, {"loss_type": "grpo"}, ROWS, 12) == 3


@pytest.mark.parametrize("room", [12, 4])
def test_rloo(room, trainers):
    """A sequence with more rows than the workspace holds takes four GEMMs."""
    assert compare(trainers("rloo"), policy_inputs(), {}, ROWS, room) == (3 if room == 12 else 4)


DPO = [
    *({"loss_types": [name], "label_smoothing": 0.1} for name in (
        "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")),
    *({"f_divergence_type": name} for name in ("forward_kl", "js_divergence", "alpha_divergence")),
    {"loss_types": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
    {"ld_alpha": 0.5},
]  # fmt: skip
PREFERENCES = int(preference_inputs()["completion_mask"][:, 1:].sum())


@pytest.mark.parametrize("changes", DPO, ids=str)
def test_dpo(changes, trainers):
    found = compare(trainers("dpo"), preference_inputs(), changes, PREFERENCES, 16, 1)
    assert found == 3


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("frozen", [False, True])
def test_losses_over_the_batch(frozen, name, trainers):
    """A loss that sorts the batch takes four GEMMs, and two over a frozen head."""
    made = trainers("dpo", **({"lora": {}} if frozen else {}))
    changes = {"loss_types": [name], "label_smoothing": 0.1}
    found = compare(made, preference_inputs(), changes, PREFERENCES, 16, 1)
    assert found == (2 if frozen else 4)


def test_references_are_precomputed(trainers):
    made, inputs = trainers("dpo"), preference_inputs(precomputed=True)
    assert compare(made, inputs, {"precompute_ref_logps": True}, PREFERENCES, 16) == 3


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_adapters(name, lora, trainers):
    inputs = MAKE[name][2]()
    references = 1 if name == "dpo" else 3
    found = compare(trainers(name, lora=lora), inputs, {}, PREFERENCES, 16, references)
    assert found == (3 if lora else 2)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, trainers):
    changes = {"loss_type": loss_type, "calculate_KL": loss_type == "kto"}
    references = 3 if loss_type == "kto" else 1
    found = compare(trainers("kto"), kto_inputs(), changes, PREFERENCES, 16, references)
    assert found == 3


def test_quantile_of_entropies(trainers):
    changes = {"top_entropy_quantile": 0.5, "_entropy_bonus_enabled": True, "entropy_coef": 0.3}
    assert compare(trainers("grpo"), policy_inputs(), changes, ROWS, 12) == 4


def test_other_uses_of_the_whole_batch(trainers):
    """Gradients are exact for a loss that depends on more tokens than the rehearsal knew."""

    def mask(*, per_token_logps, **_):
        return per_token_logps.mean() * torch.ones(B, 1)

    changes = {"off_policy_mask_threshold": 0.1, "get_off_policy_mask": mask}
    assert compare(trainers("grpo"), policy_inputs(), changes, ROWS, 12) == 4


def test_with_checks(trainers, monkeypatch):
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    assert compare(trainers("rloo"), policy_inputs(), {}, ROWS, 12) == 3
    assert compare(trainers("dpo"), preference_inputs(), {}, PREFERENCES, 16, 1) == 3


def test_weighted(trainers):
    """log Σ p² takes one more GEMM."""
    made = trainers("dpo", use_weighting=True)
    found = compare(made, preference_inputs(), {}, PREFERENCES, 16, 1)
    assert found == 4


@pytest.mark.parametrize(("name", "references"), [("grpo", 0), ("rloo", 0), ("dpo", 1), ("kto", 3)])
def test_as_on_a_gpu(name, references, trainers, monkeypatch):
    """On a GPU, TRL passes only the tokens that have a label."""
    monkeypatch.setattr(utils, "_use_triton", lambda _: True)
    rows, room = (ROWS, 12) if MAKE[name][2] is policy_inputs else (PREFERENCES, 16)
    assert compare(trainers(name), MAKE[name][2](), {}, rows, room, references) == 3


def test_other_ranks(trainers):
    """In KTO, the loss depends on a mean over all ranks."""
    made = trainers("kto")
    with ExitStack() as stack:
        for each in made:
            both = patch.object(
                each.accelerator, "gather_for_metrics", lambda t: torch.stack([t, t + 1])
            )
            stack.enter_context(both)
        assert compare(made, kto_inputs(), {}, PREFERENCES, 16, 3) == 3
