"""Transformers' own tests of a model (its ModelTesterMixin), over models that are all fused.

The archive of a release has the mixin and not the tests of single models, so that the models are
those of tests/support/tiny_models.py.
"""

import importlib
import os
import unittest

import pytest
import torch
from transformers import PreTrainedModel

import logitless as ll
from tests.support import tiny_models

ModelTesterMixin = importlib.import_module(
    "transformers_tests.test_modeling_common"
).ModelTesterMixin
pytestmark = pytest.mark.filterwarnings("default")
SELECTION = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Qwen3ForCausalLM",
    "MixtralForCausalLM", "CohereForCausalLM", "BloomForCausalLM", "GptOssForCausalLM",
    "BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM", "ElectraForMaskedLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel",
    "PegasusForConditionalGeneration",
)  # fmt: skip
LEFT_OUT = (
    "test_generation_tester_mixin_inheritance",  # about a mixin that the archive lacks
    "test_model_base_model_prefix",  # wants models without a head in the selection too
    # The gradient by lazy logits is refused; tests.support.families compares the losses.
    "test_encoder_decoder_loss_no_double_shift",
)
BATCH, LENGTH = 3, 7


@pytest.fixture(autouse=True)
def every_model_is_fused(monkeypatch):
    done = PreTrainedModel.post_init
    if os.environ.get("LOGITLESS_CLIENTS_PLAIN"):  # to see what fails without us
        return

    def post_init(self):
        done(self)
        if self.get_output_embeddings() is not None:
            ll.fuse(self)

    monkeypatch.setattr(PreTrainedModel, "post_init", post_init)


class TinyModel:
    """What ModelTesterMixin asks of the tester of a model."""

    batch_size, seq_length, is_training = BATCH, LENGTH, True

    def __init__(self, name: str):
        self.name = name
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads
        self.encoder_seq_length = self.decoder_seq_length = self.key_length = LENGTH

    def get_config(self):
        return tiny_models.config(self.name)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        torch.manual_seed(0)
        ids = torch.randint(3, 90, (BATCH, LENGTH))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            given["decoder_input_ids"] = ids.flip(0)
        return config, given


def suite(name: str) -> type:
    import transformers

    kind = getattr(transformers, name)

    def set_up(self):
        self.model_tester = TinyModel(name)
        self.is_encoder_decoder = self.model_tester.get_config().is_encoder_decoder

    return type(
        f"Test{name}", (ModelTesterMixin, unittest.TestCase),
        {"all_model_classes": (kind,), "setUp": set_up, **dict.fromkeys(LEFT_OUT)},
    )  # fmt: skip


globals().update({f"Test{name}": suite(name) for name in SELECTION})
