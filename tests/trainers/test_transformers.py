"""LogitlessCallback in Transformers' Trainer, and after FSDP2 has sharded the model."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

import logitless as ll
from tests.support.forked import together
from tests.support.loop_cases import batches
from tests.support.trainer_runs import WORKSPACE, model, once, run
from tests.support.trl_cases import arguments

pytestmark = pytest.mark.filterwarnings("default")
WRITES = "`callbacks=[ll.hf.LogitlessCallback()]`"


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}])
def test_callback(options, tmp_path, compare):
    single = [{k: t[0] for k, t in given.items()} for given in batches(12, rows=1)]

    def made(*callbacks):
        given = transformers.TrainingArguments(**{**arguments(tmp_path), **options})
        return transformers.Trainer(
            model("Qwen2"), given, train_dataset=single, callbacks=[*callbacks]
        )

    want, got = run(made()), run(made(ll.hf.LogitlessCallback(workspace=WORKSPACE)))
    compare("Transformers", "Trainer" + ", accumulation" * bool(options), WRITES, got, want)


def sharded(rank: int):
    """The callback comes after `accelerator.prepare`, so it fuses a model that is sharded."""
    dist.init_process_group("gloo")
    found = []
    for fuses in (False, True):
        module = model("Qwen2")
        for block in module.model.layers:
            fully_shard(block)
        fully_shard(module)
        callback = ll.hf.LogitlessCallback(workspace=WORKSPACE)
        if fuses:
            callback.on_train_begin(None, None, None, model=module)
        made = once(module, lambda module=module: module(**batches()[rank]).loss)
        if fuses:
            callback.on_step_end(None, None, None, model=module)
        full = {name: g.full_tensor() for name, g in made.weights.items()}
        found.append(made._replace(weights=full))
    dist.destroy_process_group()
    return found


def test_after_fsdp2(compare):
    for want, got in together(2, sharded):
        compare("Transformers", "sharded by FSDP2 before, two ranks", WRITES, got, want)
        assert all(torch.isfinite(g).all() for g in got.weights.values())
