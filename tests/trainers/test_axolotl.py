"""axolotl's own pipeline, from a configuration to a trained model, with our plug-in and without."""

import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", ACCELERATE_USE_CPU="true")

import pytest
import torch
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets, load_preference_datasets
from axolotl.integrations.base import PluginManager
from axolotl.train import train
from axolotl.utils.dict import DictDefault

import logitless as ll
from logitless.integrations.axolotl import LogitlessPlugin
from logitless.integrations.seams import NoEffectError
from tests.support.trainer_runs import WORKSPACE, Run, model, numbers, text, tokenizer, watched

pytestmark = pytest.mark.filterwarnings("default")
PLUGIN = "logitless.integrations.axolotl.LogitlessPlugin"
COMPLETIONS = {"path": "sft.jsonl", "ds_type": "json", "type": "completion"}
PAIRS = {
    "path": "dpo.jsonl", "ds_type": "json", "split": "train",
    "type": {
        "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"
    },
}  # fmt: skip
SFT = {"datasets": [COMPLETIONS]}
LORA = {
    "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    # axolotl's own kernels change the class of the attention, for all later models
    "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_mlp_kernel": False,
}  # fmt: skip
CASES = {
    "SFT, accumulation": SFT,
    "SFT, packing": {**SFT, "sample_packing": True, "pad_to_sequence_len": True},
    "SFT, LoRA": {**SFT, **LORA},
    "DPO": {"rl": "dpo", "datasets": [PAIRS]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("axolotl")
    model(max_position_embeddings=256).save_pretrained(path)
    tokenizer().save_pretrained(path)
    pairs = [
        {"prompt": text(i), "chosen": " " + text(i + 1, 5 + i % 5), "rejected": " " + text(i + 2)}
        for i in range(16)
    ]
    texts = [{"text": text(i, 20 + i)} for i in range(16)]
    for name, rows in (("sft", texts), ("dpo", pairs)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder, case: dict, *plugins: str, **more) -> Run:
    PluginManager.get_instance().plugins.clear()  # modules keep the instance of their import
    torch.manual_seed(5)  # LoRA's first weights
    out = folder / ("out-plugin" if plugins else "out")
    datasets = [{**each, "path": str(folder / each["path"])} for each in case["datasets"]]
    cfg = load_cfg(DictDefault({
        "base_model": str(folder), "tokenizer_config": str(folder), "output_dir": str(out),
        "sequence_len": 64, "seed": 3, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 3, "num_epochs": 1, "learning_rate": 0.01, "optimizer": "sgd",
        "lr_scheduler": "constant", "warmup_steps": 0, "bf16": False, "fp16": False, "tf32": False,
        "float32": True, "device": "cpu", "device_map": "cpu", "attn_implementation": "eager",
        "logging_steps": 1, "save_strategy": "no", "val_set_size": 0, "include_tkps": False,
        "gradient_checkpointing": False, "dataset_prepared_path": str(out / "data"),
        "strict": False, "dataset_num_proc": 1, "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None, "dataloader_pin_memory": False,
        **case, "datasets": datasets, "plugins": [*plugins], **more,
    }))  # fmt: skip
    data = (load_preference_datasets if cfg.rl else load_datasets)(cfg=cfg)
    # Small logits without gradients, those of a reference, are plain unless asked for.
    with watched() as found, ll.lazy_logits() if plugins and cfg.rl else nullcontext():
        trained, _, trainer = train(cfg=cfg, dataset_meta=data)
    logs = [
        {k: v for k, v in row.items() if not isinstance(v, str) and "memory" not in k}
        for row in trainer.state.log_history
    ]
    weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
    return Run(numbers(logs), weights, **vars(found))


@pytest.mark.parametrize("name", CASES)
def test_equal(name, folder, compare):
    want = run(folder, CASES[name])
    got = run(folder, CASES[name], PLUGIN, logitless_workspace=WORKSPACE)
    compare("axolotl", name, f"`plugins: [{PLUGIN}]`", got, want)


def test_another_loss_is_refused(folder):
    with pytest.raises(ValueError, match="logitless and chunked_cross_entropy replace the same"):
        run(folder, SFT, PLUGIN, chunked_cross_entropy=True)


@pytest.mark.parametrize("strict", [True, False])
def test_plain_logits_stop_the_run(strict, folder, monkeypatch):
    monkeypatch.setattr(LogitlessPlugin, "post_model_load", lambda *_: None)
    monkeypatch.setattr("logitless.integrations.transformers.fuse", lambda model: model)
    if not strict:
        assert any(
            "no effect" in w for w in run(folder, SFT, PLUGIN, logitless_strict=False).warnings
        )
        return
    with pytest.raises(NoEffectError, match="fuse was not called"):
        run(folder, SFT, PLUGIN)


def test_reward_models_stay_as_they_are():
    plugin, head = LogitlessPlugin(), torch.nn.Linear(4, 1)
    cfg = SimpleNamespace(reward_model=True, process_reward_model=None)
    plugin.post_model_load(cfg, head)
    plugin.post_trainer_create(cfg, None)
    assert "forward" not in vars(head)
