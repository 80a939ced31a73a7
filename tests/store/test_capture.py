"""Capturing a teacher into a store: in this process, and on many ranks."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.lazy import logits as lazy
from logitless.store import Store, Writer, capture, recover, share
from tests.support.forked import start
from tests.support.patience import HANG
from tests.support.stores import assert_near

V, D, K = 50, 16, 8


class Teacher(nn.Module):
    """Embeds each token and the one before it; a linear head."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.calls, self.shapes = 0, []

    def forward(self, ids):
        self.calls += 1
        self.shapes.append(tuple(ids.shape))
        x = self.embed(ids)
        return self.head(torch.tanh(x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]) * 4)


def texts(*lengths, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, V, (n,), generator=random) for n in lengths]


def open_writer(path, **how):
    return Writer(path, **({"vocab_size": V, "k": K} | how))


def assert_captured(store, model, documents, k=K, **how):
    assert len(store) == len(documents)
    for tokens in documents:
        with torch.no_grad():
            want = ll.capture_topk(model(tokens[None]), k, **how)[0]
        _, got = store[store.find(tokens)]
        assert_near(
            got if k == K else ll.SparseTargets(got.ids[:, :k], got.logprobs[:, :k], got.tail), want
        )


class TestCapture:
    def test_empty_documents_are_passed_over(self, tmp_path):
        """As a list and as a tensor, alone and beside others."""
        model = Teacher()
        empty = torch.empty(0, dtype=torch.int64)
        with open_writer(tmp_path) as writer:
            for batch in ([], [[]], [empty], [[], [1, 2]], [empty, [3]], torch.empty(2, 0).long()):
                capture(model, [batch], writer, head="head")
            assert len(writer) == 2
            for batch, message in (
                ([1, 2], "a document must be a list or a tensor of token ids, got 1"),
                ("text", "a batch must be a list of documents, .* got str"),
                (5, "a batch must be a list of documents, .* got int"),
                ([["a"]], "a document must be a list or a tensor of token ids"),
                ([[1.5]], "input_ids must hold integers"),
            ):
                with pytest.raises(TypeError, match=message):
                    capture(model, [batch], writer, head="head")

    def test_documents(self, tmp_path):
        model, documents, seen = Teacher().train(), texts(5, 9, 1, 30), []
        with open_writer(tmp_path) as writer:
            batches = [documents[:2], [d.tolist() for d in documents[2:]]]
            assert capture(model, batches, writer, head="head", progress=seen.append) == 4
        assert model.training
        assert "forward" not in model.head.__dict__
        assert sum(seen) == 45
        assert_captured(Store(tmp_path), model, documents)
        assert Store(tmp_path).verify()

    def test_no_logits_are_made(self, tmp_path, monkeypatch):
        def made(*_):
            raise AssertionError("logits were materialised")

        monkeypatch.setattr(lazy.LazyLogits, "plain", made)
        model, documents = Teacher(), texts(5, 9)
        model.head.register_forward_hook(lambda *args: outputs.append(args[2]))
        outputs = []
        with open_writer(tmp_path) as writer:
            capture(model, [documents], writer, head="head")
        assert [type(z) for z in outputs] == [lazy.LazyLogits]

    @pytest.mark.parametrize("fused", [False, True])
    def test_tensors_masks_and_a_fused_model(self, fused, tmp_path):
        model, documents = Teacher(), texts(6, 6, seed=1)
        if fused:
            ll.fuse(model, head="head", workspace=1000)
        with open_writer(tmp_path) as writer:
            assert (
                capture(model, [torch.stack(documents)], writer, head=None if fused else "head")
                == 2
            )
        assert_captured(Store(tmp_path), model, documents)
        if fused:
            x = model(documents[0][None])
            assert type(x) is lazy.LazyLogits  # as before
        padded = {
            "input_ids": torch.stack([documents[0], documents[1]]),
            "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
            "labels": torch.zeros(2, 6).long(),
        }
        with open_writer(tmp_path / "b") as writer:
            assert capture(model, [padded], writer, head=None if fused else "head") == 2
        assert_captured(Store(tmp_path / "b"), model, [documents[0], documents[1][:4]])

    def test_a_mask_with_holes(self, tmp_path):
        """Masked tokens inside a document are left out, with their targets."""
        model, (tokens,) = Teacher(), texts(6, seed=2)
        kept = torch.tensor([True, True, False, True, False, True])
        batch = {"input_ids": tokens[None], "attention_mask": kept[None].long()}
        with open_writer(tmp_path) as writer:
            assert capture(model, [batch], writer, head="head") == 1
        with torch.no_grad():
            want = ll.capture_topk(model(tokens[None]), K)[0]
        found, got = Store(tmp_path)[0]
        assert found.tolist() == tokens[kept].tolist()
        assert_near(got, want[kept])

    def test_fewer_slots_and_a_temperature(self, tmp_path):
        model, documents = Teacher(), texts(6)
        with open_writer(tmp_path, temperature=2.0) as writer:
            capture(model, [documents], writer, k=3, head="head")
        store = Store(tmp_path)
        assert_captured(store, model, documents, k=3, temperature=2.0)
        assert store[0][1].mask.sum() == 18
        with open_writer(tmp_path, temperature=2.0) as writer, pytest.raises(
            ValueError, match=r"k must lie in \[1, 8\], got 9"
        ):  # fmt: skip
            capture(model, [documents], writer, k=9, head="head")

    def test_resumed(self, tmp_path):
        """What is there is not run again, whatever the batches; what is twice is there once."""
        model, documents = Teacher(), texts(5, 7, 9, 11, 13)
        with open_writer(tmp_path) as writer:
            capture(model, [documents[:2]], writer, head="head")
        model.calls, model.shapes = 0, []
        seen = []
        with open_writer(tmp_path) as writer:
            batches = [documents[:2], documents[1:4], [documents[4], documents[4]], documents[4:]]
            assert capture(model, batches, writer, head="head", progress=seen.append) == 3
        assert model.calls == 3
        assert model.shapes[0] == (2, 11)
        assert_captured(Store(tmp_path), model, documents)

    def test_a_padded_head(self, tmp_path):
        """Its last logits are of no tokens: they take no part in the softmax."""
        model, (tokens,) = Teacher(), texts(9)
        tokens %= V - 5
        with open_writer(tmp_path, vocab_size=V - 5, values="f16") as writer:
            capture(model, [[tokens]], writer, head="head")
        with torch.no_grad():
            want = ll.capture_topk(model(tokens[None])[0, :, : V - 5], K)
        assert_near(Store(tmp_path)[0][1], want)

    def test_what_cannot_be(self, tmp_path):
        model = Teacher()
        with open_writer(tmp_path, vocab_size=V + 1) as writer:
            with pytest.raises(
                ValueError, match=rf"model must return logits of shape \(1, 3, {V + 1}\)"
            ):
                capture(model, [[[1, 2, 3]]], writer, head="head")
            with pytest.raises(ValueError, match=r"a batch must have input_ids of shape \(B, T\)"):
                capture(model, [torch.arange(3)], writer, head="head")
            with pytest.raises(ValueError, match="head must be given for Teacher"):
                capture(model, [[[1]]], writer)
            with pytest.raises(TypeError, match="capture must be called with only the arguments"):
                capture(model, [], writer, softcap=1.0)
        nn.init.constant_(model.embed.weight, torch.nan)
        with open_writer(tmp_path / "b") as writer, pytest.raises(
            ValueError, match="must return rows whose largest logit is finite, got NaN or inf"
        ):  # fmt: skip
            capture(model, [[[1, 2, 3]]], writer, head="head")

    def test_share(self, monkeypatch):
        assert list(share(range(7), 1, 3)) == [1, 4]
        assert list(share(range(3))) == [0, 1, 2]
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert list(share(range(7))) == [2, 6]


def capture_a_share(path, dies):
    """In a process: what one rank does, or the first of it."""
    documents = texts(*range(3, 23))
    with open_writer(path) as writer:
        for i, batch in enumerate(share([documents[i : i + 2] for i in range(0, 20, 2)])):
            capture(Teacher(), [batch], writer, head="head")
            if dies and i == 1:
                os.kill(os.getpid(), 9)


def test_ranks_and_one_that_dies(tmp_path):
    """Two ranks, of which one is killed; both are started again, then all is there, once."""

    def run(dies):
        ranks = [
            start(capture_a_share, tmp_path, rank == dies, RANK=str(rank), WORLD_SIZE="2")
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                rank.join(timeout=HANG)
            return [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()

    assert run(dies=1) == [0, -9]
    assert len(Store(tmp_path)) == 10  # of rank 0
    assert len(list(tmp_path.glob("1-*.safetensors"))) == 0
    assert recover(tmp_path) == 14  # what rank 1 had finished
    assert run(dies=None) == [0, 0]
    assert_captured(Store(tmp_path), Teacher(), texts(*range(3, 23)))


def test_tokenizers():
    one = {"a": 0, "b": 1}
    assert ll.store.tokenizer_hash(one) == ll.store.tokenizer_hash(
        SimpleNamespace(get_vocab=lambda: {"b": 1, "a": 0})
    )
    assert ll.store.tokenizer_hash(one) != ll.store.tokenizer_hash({"a": 1, "b": 0})
