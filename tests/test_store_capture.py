"""Capturing a teacher into a store: in this process, on many ranks, and from inference servers."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import start
from stores import assert_near
from torch import nn

import logitless as ll
from logitless.lazy import logits as lazy
from logitless.store import Store, Writer, capture, from_sglang, from_vllm, recover, share

V, D, K = 50, 16, 8
HERE = Path(__file__).parent


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

        monkeypatch.setattr(lazy.LazyLogits, "dense", made)
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
                ValueError, match=rf"model must give logits of shape \(1, 3, {V + 1}\)"
            ):
                capture(model, [[[1, 2, 3]]], writer, head="head")
            with pytest.raises(ValueError, match=r"a batch must have input_ids of shape \(B, T\)"):
                capture(model, [torch.arange(3)], writer, head="head")
            with pytest.raises(ValueError, match="head must be named for Teacher"):
                capture(model, [[[1]]], writer)
            with pytest.raises(TypeError, match="capture must be given arguments among"):
                capture(model, [], writer, softcap=1.0)
        nn.init.constant_(model.embed.weight, torch.nan)
        with open_writer(tmp_path / "b") as writer, pytest.raises(
            ValueError, match="must give logits that are finite somewhere in each row, got NaN"
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
                rank.join(timeout=120)
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


class TestServers:
    """A prompt of five tokens, as each server tells of it."""

    TOKENS = (7, 3, 3, 9, 1)

    def rows(self):
        torch.manual_seed(0)
        return torch.randn(5, V).mul(2).log_softmax(-1)

    def vllm(self, k=4, after=True):
        """prompt_logprobs of place t are of the row before it, and hold the prompt's own token."""
        entries = [None]
        for row, token in zip(self.rows()[:-1], self.TOKENS[1:], strict=True):
            best = row.topk(k).indices.tolist()
            entries.append({i: SimpleNamespace(logprob=float(row[i])) for i in {*best, token}})
        last = self.rows()[-1]
        generated = [
            {i: SimpleNamespace(logprob=float(last[i])) for i in last.topk(k).indices.tolist()}
        ]
        outputs = [SimpleNamespace(logprobs=generated if after else None)]
        return SimpleNamespace(
            prompt_token_ids=list(self.TOKENS), prompt_logprobs=entries, outputs=outputs
        )

    def json(self, **how):
        found = self.vllm(after=False)
        entries = [
            e and {str(i): {"logprob": p.logprob, "rank": 1} for i, p in e.items()}
            for e in found.prompt_logprobs
        ]
        return {"choices": [{"prompt_logprobs": entries, "text": "x"}]} | how

    def sglang(self, k=4):
        own, top = [[None, self.TOKENS[0], None]], [None]
        for row, token in zip(self.rows()[:-1], self.TOKENS[1:], strict=True):
            own.append([float(row[token]), token, None])
            top.append([[float(row[i]), i, None] for i in row.topk(k).indices.tolist()])
        last = self.rows()[-1]
        after = [[[float(last[i]), i, None] for i in last.topk(k).indices.tolist()]]
        about = {"input_token_logprobs": own, "input_top_logprobs": top}
        return {"text": "x", "meta_info": about | {"output_top_logprobs": after}}

    def assert_right(self, tokens, targets, last=True, k=4):
        assert tokens.tolist() == list(self.TOKENS)
        want = ll.capture_topk(self.rows(), k)
        n = 5 if last else 4
        assert torch.equal(targets.ids[:n], want.ids[:n])
        assert (targets.logprobs - want.logprobs)[:n].abs().max() < 1e-6
        assert (targets.tail - want.tail)[:n].abs().max() < 1e-5
        if last:
            assert targets.mask is None
        else:
            assert targets.mask.tolist() == [[True] * k] * 4 + [[False] * k]

    def test_vllm(self, tmp_path):
        self.assert_right(*from_vllm(self.vllm(), k=4))
        self.assert_right(*from_vllm(self.vllm(after=False), k=4), last=False)
        tokens, targets = from_vllm(self.json(prompt_token_ids=self.TOKENS), k=4)
        self.assert_right(tokens, targets, last=False)
        self.assert_right(*from_vllm(self.json(), self.TOKENS, k=4), last=False)
        with open_writer(tmp_path) as writer:
            writer.add(tokens, targets)
        _, stored = Store(tmp_path)[0]
        assert torch.equal(stored.mask[:, :4], targets.mask)
        assert not stored.mask[:, 4:].any()
        near = stored.logprobs[:4, :4] - targets.logprobs[:4]
        assert near.abs().max() < 0.02

    def test_sglang(self):
        self.assert_right(*from_sglang(self.sglang(), k=4))
        self.assert_right(*from_sglang(self.sglang()["meta_info"], self.TOKENS, k=4))

    def test_short_rows_are_masked(self):
        output = self.vllm()
        output.prompt_logprobs[2] = {3: SimpleNamespace(logprob=-1.0)}
        _, targets = from_vllm(output, k=4)
        assert targets.mask[1].tolist() == [True, False, False, False]
        assert targets.ids[1].tolist() == [3, 0, 0, 0]

    def test_the_prompt_s_own_token_may_be_kept_beside_the_k(self):
        _, targets = from_vllm(self.vllm(), k=5)
        for row, token in zip(targets.ids[:-1].tolist(), self.TOKENS[1:], strict=True):
            assert token in row

    def changed(self, change):
        output = self.vllm()
        change(output)
        return output

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda o: setattr(o, "prompt_logprobs", None),
                "output must have the prompt_logprobs of vLLM, got NoneType",
            ),
            (
                lambda o: setattr(o, "prompt_token_ids", None),
                "output must have the prompt_token_ids of its prompt, got none. Pass them",
            ),
            (lambda o: o.prompt_logprobs.pop(), "must have an entry for each of 5 tokens, got 4"),
            (
                lambda o: setattr(o, "prompt_logprobs", [*o.prompt_logprobs[1:], None]),
                "must begin with None, since nothing comes before the first token",
            ),
            (
                lambda o: o.prompt_logprobs.__setitem__(3, None),
                "must have a distribution at place 3, got None",
            ),
            (
                lambda o: o.prompt_logprobs.reverse() or o.prompt_logprobs.insert(0, None) or
                o.prompt_logprobs.pop(),
                "must have the prompt's own token 3 at place 1, got .* prompt, or are shifted",
            ),
            (
                lambda o: o.prompt_logprobs[2].update({3: SimpleNamespace(logprob=0.9)}),
                "must hold logarithms of probabilities, got 0.9 at place 2",
            ),
            (
                lambda o: o.prompt_logprobs[2].update({3: SimpleNamespace(logprob=-0.01)}),
                "must give every token a mass of at most 1, got",
            ),
        ],
    )  # fmt: skip
    def test_what_cannot_be_right(self, change, message):
        with pytest.raises(ValueError, match=message):
            from_vllm(self.changed(change), k=4)


def test_tokenizers():
    one = {"a": 0, "b": 1}
    assert ll.store.tokenizer_hash(one) == ll.store.tokenizer_hash(
        SimpleNamespace(get_vocab=lambda: {"b": 1, "a": 0})
    )
    assert ll.store.tokenizer_hash(one) != ll.store.tokenizer_hash({"a": 1, "b": 0})


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (HERE.parent / "docs" / "store.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert all(p.grad.abs().sum() > 0 for p in names["model"].parameters())
    assert names["loss"].isfinite()


def test_the_page_names_every_public_name():
    page = (HERE.parent / "docs" / "store.md").read_text()
    left = {"Header", "Report", "DistillLosses", "batch_targets", "tokenizer_hash"}  # docstrings
    assert [name for name in ll.store.__all__ if name not in page and name not in left] == []
