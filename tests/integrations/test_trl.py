"""Tests of `use_in_trl` that do not need TRL. The tests with TRL are in tests/trainers."""

import sys

import pytest

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

import logitless as ll
from logitless.integrations import trl as adapter


@pytest.mark.parametrize("function", [ll.hf.use_in_trl, ll.hf.unuse_in_trl])
def test_trl_is_not_installed(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs trl, but trl is not installed. Run pip"):
        function(object())


def loss_of(text: str):
    names: dict = {}
    exec(f"def f(self, model, inputs, x=None, **options):\n    {text}", names)
    return names["f"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("return model(**inputs, fused_lm_head=True).loss", "fused_lm_head"),
        ("return model(inputs, a=1, fused_lm_head=x)", "fused_lm_head"),
        ("return super().compute_loss(model, inputs)", "compute_loss"),
    ],
)
def test_words_of_a_function(text, word):
    assert word in adapter._words(loss_of(text).__code__)
    assert word not in adapter._words(loss_of("return model(**inputs).loss").__code__)
