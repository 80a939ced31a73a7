"""What a store refuses, and in which words."""

import math

import pytest

import logitless as ll
from logitless.store import Store, Writer
from tests.support import stores
from tests.support.stores import K, V, document, documents


class TestArguments:
    def test_of_a_writer(self, tmp_path):
        for how, kind, message in (
            ({"vocab_size": 0}, ValueError, r"vocab_size must lie in \[1, 4294967296\], got 0"),
            ({"vocab_size": 1.0}, TypeError, "vocab_size must be a whole number, got 1.0"),
            ({"k": 1001}, ValueError, r"k must lie in \[1, 1000\], got 1001"),
            ({"values": "u4"}, ValueError, "values must be one of 'u8', 'f16', 'counts', got 'u4'"),
            ({"teacher": 3}, TypeError, "teacher must be a string of at most 1000 characters"),
            ({"temperature": 0}, ValueError, "temperature must be in"),
            ({"part": -1}, ValueError, "part must lie in"),
            ({"shard_bytes": 0}, ValueError, "shard_bytes must lie in"),
            ({"tail": 1}, TypeError, "Writer must be called with only the arguments .* got 'tail'"),
            ({"vocab_size": 3, "k": 7}, ValueError, r"k must lie in \[1, 3\], got 7"),
        ):
            with pytest.raises(kind, match=message):
                Writer(tmp_path / "store", **({"vocab_size": V, "k": K} | how))
        assert not (tmp_path / "store").exists()

    def test_of_a_document(self, tmp_path):
        tokens, targets = document(4)
        with Writer(tmp_path, vocab_size=V, k=K) as writer:
            for bad, good, message in [
                (tokens[:3], targets, "targets must have one row for each of the 3 tokens"),
                (tokens[:0], targets[:0], "tokens must be one document, of shape"),
                (tokens.view(2, 2), targets, "tokens must be one document"),
                (tokens + V, targets, "tokens must be ids of a vocabulary of 1000"),
                (tokens, stores.teacher(4, k=9), "targets must have at most the store's 8 slots"),
                (
                    tokens,
                    ll.SparseTargets(targets.ids + V, targets.logprobs),
                    "targets.ids must be in the vocabulary of 1000",
                ),
                (
                    tokens,
                    ll.SparseTargets(targets.ids, targets.logprobs * math.nan),
                    "targets.logprobs must be logarithms of probabilities, got nan",
                ),
                (
                    tokens,
                    ll.SparseTargets(targets.ids, targets.logprobs, targets.tail * math.nan),
                    "targets.tail must be the logarithm of a mass, got nan",
                ),
            ]:
                with pytest.raises(ValueError, match=message):
                    writer.add(bad, good)
            with pytest.raises(TypeError, match="targets must be SparseTargets"):
                writer.add(tokens, targets.logprobs)
            with pytest.raises(TypeError, match="tokens must hold integers"):
                writer.add(tokens.float(), targets)
            assert len(writer) == 0
        with pytest.raises(
            ValueError, match="a writer must be open to add documents, got a closed writer"
        ):
            writer.add(tokens, targets)

    def test_another_tokenizer_is_refused(self, tmp_path):
        stores.write(tmp_path, documents(3), tokenizer="abc")
        assert Store(tmp_path, tokenizer="abc").info.tokenizer == "abc"
        assert len(Store(tmp_path)) == 1
        with pytest.raises(ValueError, match="the tokenizer of its capture, whose hash is 'abc'"):
            Store(tmp_path, tokenizer="abd")
        with pytest.raises(
            ValueError, match="must have tokenizer 'xyz' to match this writer, got 'abc'"
        ):
            stores.write(tmp_path, [], tokenizer="xyz")

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="file must be a folder, or not exist yet, got a file"):
            stores.write(tmp_path / "file", [])

    def test_no_store(self, tmp_path):
        with pytest.raises(ValueError, match=r"must be a folder with a store\.json, got none"):
            Store(tmp_path)
