"""A store tells what is wrong with it."""

import pytest
import torch

import logitless as ll
from logitless.store import Store, Writer
from logitless.store import codes as _codes
from tests.support import stores
from tests.support.stores import K, V, document


class TestVerify:
    def text(self, n, seed=0):
        """A document whose teacher gives most to its next token."""
        tokens, targets = document(n, seed)
        ids = targets.ids.clone()
        ids[:-1, 0] = tokens[1:]
        return tokens, ll.SparseTargets(ids, targets.logprobs, targets.tail)

    def test_a_good_one(self, tmp_path):
        report = stores.write(tmp_path, [self.text(100, i) for i in range(5)]).verify()
        assert report
        assert report.problems == []
        assert report.label_logprob[0] > report.label_logprob[1] + 1
        assert "500 tokens" in str(report)
        assert "right" in str(report)

    @pytest.mark.parametrize("shift", [-1, 1])
    def test_one_shifted_by_a_token(self, shift, tmp_path):
        found = []
        for i in range(3):
            tokens, targets = self.text(50, i)
            found.append((tokens, targets[torch.arange(50).roll(shift)]))
        report = stores.write(tmp_path, found).verify()
        assert not report
        assert f"offset {-shift:+d}" in report.problems[0]
        assert "must describe the next token" in report.problems[0]

    def test_one_of_no_relation_is_not_called_shifted(self, some):
        assert some[1].verify()

    def test_mass_and_tokens(self, tmp_path):
        tokens, targets = document(10)
        with Writer(tmp_path, vocab_size=V, k=K) as writer:
            rows = _codes.encoded(targets, writer.header)
            writer.header.field(rows, "top").add_(1)
            writer.append(tokens + 10, rows)
        report = Store(tmp_path).verify()
        assert any("must have masses of at most 1, got" in p for p in report.problems)
        with Writer(tmp_path / "b", vocab_size=V, k=K) as writer:
            writer.append(torch.full((10,), 1023), _codes.encoded(targets, writer.header))
        report = Store(tmp_path / "b").verify()
        assert any("must have tokens below 1000, got 1023" in p for p in report.problems)

    def test_slots_that_are_not_sorted(self, tmp_path):
        """The reader finds the codes above 223 of a row by its last slot."""
        tokens, targets = document(10)
        with Writer(tmp_path, vocab_size=V, k=K) as writer:
            rows = _codes.encoded(targets, writer.header)
            codes = writer.header.field(rows, "codes")
            codes.copy_(codes.flip(-1))
            writer.append(tokens, rows)
        report = Store(tmp_path).verify()
        assert any("must have the most probable slots first" in p for p in report.problems)

    def test_an_empty_one(self, tmp_path):
        store = stores.write(tmp_path, [])
        assert store.verify()
        assert (len(store), store.tokens, len(store.lengths)) == (0, 0, 0)
        with pytest.raises(KeyError):
            store.find([1])
