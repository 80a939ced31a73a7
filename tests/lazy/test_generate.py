"""Fused models of Transformers without gradients: generate and evaluate as plain models do."""

import copy

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

import logitless as ll
from logitless.lazy import recipe
from tests.support.tiny_models import batch, build

pytestmark = pytest.mark.filterwarnings(
    "default",  # those of Transformers
    "error:logits of a fused head are materialised",
)


@pytest.fixture(autouse=True)
def always_lazy(monkeypatch):
    monkeypatch.setattr(recipe, "SMALL", 0)
    ll.report()


def both(name, **options):
    plain = build(name, **options).eval()
    return plain, ll.fuse(copy.deepcopy(plain))


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "scores": {
        "output_logits": True, "output_scores": True, "return_dict_in_generate": True,
    },
    "processors": {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]],
        "min_new_tokens": 3, "suppress_tokens": [7, 8],
    },
    "no cache": {"use_cache": False},
    "guidance": {"guidance_scale": 1.5},
}  # fmt: skip


def generated(model, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = {name: t for name, t in batch(model).items() if name != "labels"}
    out = model.generate(**given, max_new_tokens=5, **options)
    return [t for t in pytree.tree_leaves(out if torch.is_tensor(out) else dict(out)) if t is not
            None and torch.is_tensor(t)]  # fmt: skip


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(type(t) is torch.Tensor for t in got)
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
def test_generate(way):
    plain, fused = both("LlamaForCausalLM")
    assert_same(generated(fused, **WAYS[way]), generated(plain, **WAYS[way]))
    assert ll.report(fused)


@pytest.mark.parametrize("sampled", [False, True])
def test_assisted(sampled):
    """Samples write to the logits in place."""
    models = both("LlamaForCausalLM")
    helpers = both("LlamaForCausalLM", num_hidden_layers=1)
    ids = batch(models[0])["input_ids"][:1]
    found = []
    for model, helper in zip(models, helpers, strict=True):
        torch.manual_seed(0)
        options = {"do_sample": sampled, "max_new_tokens": 8}
        found.append(model.generate(ids, assistant_model=helper, **options))
    assert torch.equal(*found)


def test_nested_functions_of_the_trainer():
    plain, fused = both("LlamaForCausalLM")
    arrays = []
    for model in (fused, plain):
        with torch.no_grad():
            a, b = (nested_detach(model(**batch(model)).logits) for _ in range(2))
            arrays += [
                nested_numpify(nested_concat(a, b)),
                nested_numpify(nested_concat(a, a[:, :4])),
            ]
    for got, want in zip(arrays[:2], arrays[2:], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        ids = torch.randint(3, 90, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("preprocess", [False, True])
def test_trainer(preprocess, tmp_path):
    """The metrics are those of the plain model; ids of the largest logits materialise nothing."""

    def metrics(found):
        return {"shape": found.predictions.shape, "sum": float(np.abs(found.predictions).sum())}

    args = TrainingArguments(
        tmp_path, per_device_eval_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True
    )
    results = []
    for model in both("LlamaForCausalLM"):
        trainer = Trainer(
            model, args, eval_dataset=Data(), compute_metrics=metrics,
            preprocess_logits_for_metrics=(lambda z, _: z.argmax(-1)) if preprocess else None,
        )  # fmt: skip
        results.append(trainer.evaluate())
    want, got = results
    assert got["eval_shape"] == want["eval_shape"]
    for name in ("eval_loss", "eval_sum"):
        assert got[name] == pytest.approx(want[name], rel=2e-6)
    counts = sum(record.count for record in ll.report())
    assert counts == (0 if preprocess else 1)  # torch.cat of the batches stays lazy
