"""Checks that integrations share: of a trainer's functions, and of the first step's effect."""

import importlib

import pytest

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

import torch

import logitless as ll
from logitless.integrations.seams import UnknownTrainerError, check_seams
from tests.support.tiny_models import V, build

KNOWN = {"json:JSONEncoder.default": "self, o"}


class TestSeams:
    def test_known(self):
        check_seams("json", KNOWN)

    @pytest.mark.parametrize(
        ("place", "expected", "message"),
        [
            ("json:JSONEncoder.default", "self", r"must take \(self\), but it takes \(self, o\)"),
            ("json:JSONEncoder.gone", "self", "has no attribute 'gone'"),
            ("json.gone:function", "self", "No module named 'json.gone'"),
        ],
    )
    def test_moved(self, place, expected, message):
        with pytest.raises(UnknownTrainerError, match=message) as raised:
            check_seams("json", {**KNOWN, place: expected})
        assert not isinstance(raised.value, ImportError)  # axolotl would train on without us

    def test_not_installed(self):
        with pytest.raises(ModuleNotFoundError, match="needs no-trainer, which is not installed"):
            check_seams("no-trainer", {"no_trainer.losses:Loss": "self"})

    @pytest.mark.parametrize("name", ["axolotl", "torchtitan", "automodel", "swift", "verl"])
    def test_each_is_imported_alone(self, name):
        """No trainer is installed here."""
        with pytest.raises(ModuleNotFoundError, match="This integration needs"):
            importlib.import_module(f"logitless.integrations.{name}")


class TestEffect:
    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return build("LlamaForCausalLM").train()

    def step(self, callback, model):
        callback.on_train_begin(None, None, None, model=model)
        ids = torch.randint(0, V, (2, 5))
        model(input_ids=ids, labels=ids).loss.backward()
        callback.on_step_end(None, None, None, model=model)

    def test_fuses(self, model):
        callback = ll.hf.LogitlessCallback()
        self.step(callback, model)
        assert ll.is_fused(model)
        ll.unfuse(model)
        callback.on_step_end(None, None, None, model=model)  # only the first step is checked

    def test_plain_logits(self, model, monkeypatch):
        monkeypatch.setattr("logitless.integrations.transformers.fuse", lambda model: model)
        with pytest.raises(ll.hf.NoEffectError, match="no effect in this run: fuse was not called"):
            self.step(ll.hf.LogitlessCallback(), model)
        with pytest.warns(UserWarning, match="no effect in this run"):
            self.step(ll.hf.LogitlessCallback(strict=False), model)

    def test_switched_off(self, model, monkeypatch):
        monkeypatch.setenv("LOGITLESS_FUSE", "0")
        self.step(ll.hf.LogitlessCallback(), model)
        assert not ll.is_fused(model)
