"""`swift sft` on a tiny model and a local dataset, with our callback and without."""

import json
import types

import pytest
from swift import sft_main
from swift.callbacks import callbacks_map

from logitless.integrations.swift import SwiftCallback
from tests.support.trainer_runs import WORKSPACE, Run, model, numbers, text, tokenizer, watched

pytestmark = pytest.mark.filterwarnings("default")
WRITES = "`--external_plugins plugin.py --callbacks logitless`"
OPTIONS = {
    "model_type": "llama", "template": "dummy", "torch_dtype": "float32", "max_steps": 3,
    "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "save_strategy": "no", "eval_strategy": "no", "split_dataset_ratio": 0, "report_to": "none",
    "dataloader_num_workers": 0, "dataset_num_proc": 1, "learning_rate": 1e-2, "optim": "sgd",
    "attn_impl": "eager", "use_cpu": "true", "tuner_type": "full",
}  # fmt: skip
CASES = {
    "SFT, accumulation": {},
    "SFT, LoRA": {"tuner_type": "lora", "lora_rank": 4, "target_modules": "q_proj"},
    "SFT, DFT": {"enable_dft_loss": "true"},
    "SFT, a loss scale": {"loss_scale": "last_round"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("swift")
    model(max_position_embeddings=256).save_pretrained(path)
    tokenizer().save_pretrained(path)
    talks = [
        [{"role": "user", "content": text(i)}, {"role": "assistant", "content": text(i + 3, 9)}]
        for i in range(12)
    ]
    lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
    (path / "data.jsonl").write_text("".join(lines))
    plugin = "from logitless.integrations.swift import SwiftCallback\n"
    plugin += f"SwiftCallback.defaults = {{'workspace': {WORKSPACE}}}\n"
    (path / "plugin.py").write_text(plugin)
    return path


def run(folder, case: dict, **more) -> Run:
    given = {
        "model": folder, "dataset": folder / "data.jsonl", "output_dir": folder / "out",
        **OPTIONS, **case, **more,
    }  # fmt: skip
    with watched() as found:
        done = sft_main([word for key, v in given.items() for word in (f"--{key}", str(v))])
    logs = [{k: v for k, v in row.items() if k != "step"} for row in done["log_history"]]
    return Run(numbers(logs), {}, **vars(found))


@pytest.mark.parametrize("name", CASES)
def test_equal(name, folder, compare):
    want = run(folder, CASES[name])
    plugin = {"external_plugins": folder / "plugin.py", "callbacks": "logitless"}
    got = run(folder, CASES[name], **plugin)
    assert sum("grad_norm" in row for row in got.logs) == OPTIONS["max_steps"]
    compare("ms-swift", name, WRITES, got, want)


def test_liger_is_refused():
    assert callbacks_map["logitless"] is SwiftCallback
    with pytest.raises(ValueError, match="use_liger_kernel replace the same loss"):
        SwiftCallback(types.SimpleNamespace(use_liger_kernel=True), object())
