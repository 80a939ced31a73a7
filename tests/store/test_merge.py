"""Stores of several writers become one."""

import pytest
import torch

from logitless.store import Store, Writer, merge
from tests.support import stores
from tests.support.stores import LENGTHS, K, V, documents


class TestMerge:
    def test_workers_and_doubles(self, tmp_path):
        found = documents(*LENGTHS)
        for part in range(3):
            with Writer(tmp_path / "many", vocab_size=V, k=K, part=part) as writer:
                for tokens, targets in found[part::3]:
                    writer.add(tokens, targets)
        many = Store(tmp_path / "many")
        assert len(many.shards) == 3
        again = stores.write(tmp_path / "again", found[:2])
        assert merge(tmp_path / "one", [many, again.path]) == 5
        one = Store(tmp_path / "one")
        assert len(one.shards) == 1
        for tokens, _ in found:
            (_, got), (_, want) = one[one.find(tokens)], many[many.find(tokens)]
            assert torch.equal(got.logprobs, want.logprobs)
            assert torch.equal(got.ids, want.ids)
        assert one.verify()
        assert merge(tmp_path / "small", [one], shard_bytes=100) == 5
        assert len(Store(tmp_path / "small").shards) > 2

    def test_others_are_refused(self, tmp_path):
        one = stores.write(tmp_path / "one", documents(3))
        two = stores.write(tmp_path / "two", documents(3), teacher="another")
        with pytest.raises(ValueError, match="two must have teacher '' to match "):
            merge(tmp_path / "out", [one, two])
        with pytest.raises(ValueError, match="stores must name at least one store, got none"):
            merge(tmp_path / "out", [])
