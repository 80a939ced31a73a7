"""Epochs over a store: every document once, and an epoch that was interrupted goes on."""

import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import logitless as ll
from logitless.store import Documents, Store, pad_documents
from tests.support import stores
from tests.support.servers import served_store
from tests.support.stores import assert_equal, documents

LENGTHS = (9, 4, 30, 1, 7, 22, 3, 15, 8, 11, 2)  # all lengths differ


@pytest.fixture
def local(tmp_path):
    store = stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=500)
    assert len(store.shards) > 4
    return store


def numbers(dataset) -> list[int]:
    """The lengths of the documents, which tell the documents apart."""
    return [len(tokens) for tokens, _ in dataset]


class TestOrder:
    def test_without_a_seed(self, local):
        assert numbers(Documents(local)) == [len(local[i][0]) for i in range(len(local))]
        for i, item in enumerate(Documents(local)):
            assert_equal(item, local[i])

    def test_with_a_seed(self, local):
        data = Documents(local, seed=3, mixed=2)
        first = numbers(data)
        assert sorted(first) == sorted(LENGTHS)
        assert first == numbers(data)
        assert first == numbers(Documents(local, seed=3, mixed=2))
        data.set_epoch(1)
        assert sorted(numbers(data)) == sorted(LENGTHS)
        assert numbers(data) != first
        assert numbers(Documents(local, seed=4, mixed=2)) != first

    def test_mixed_shards_stay_together(self, local):
        order, firsts = Documents(local, seed=1, mixed=2).order(0), torch.tensor(local.firsts)
        shards = torch.bucketize(order, firsts[1:], right=True).tolist()
        sizes = firsts.diff().tolist()
        while shards:
            together = dict.fromkeys(shards)
            of_group = [*together][:2]
            n = sum(sizes[shard] for shard in of_group)
            assert {*shards[:n]} == {*of_group}
            shards = shards[n:]

    @pytest.mark.parametrize("seed", [None, 5])
    def test_ranks_have_equal_shares(self, seed, local):
        shares = [numbers(Documents(local, seed=seed, rank=r, world=4)) for r in range(4)]
        assert {*map(len, shares)} == {len(LENGTHS) // 4}
        found = [*itertools.chain(*shares)]
        assert len({*found}) == len(found)

    def test_ranks_of_torchrun(self, local, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert numbers(Documents(local)) == numbers(Documents(local, rank=1, world=2))

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("copied", [lambda x: x, lambda x: pickle.loads(pickle.dumps(x))])
    def test_epochs_of_persistent_workers(self, copied, local):
        """set_epoch has an effect in workers that were started before."""
        data, alone = copied(Documents(local, seed=0)), Documents(local, seed=0)
        how = {"num_workers": 1, "persistent_workers": True}
        loader = DataLoader(data, batch_size=None, **how)
        for epoch in (0, 1, 5):
            data.set_epoch(epoch)
            alone.set_epoch(epoch)
            assert numbers(loader) == numbers(alone)


class TestResume:
    @pytest.mark.parametrize("seed", [None, 7])
    @pytest.mark.parametrize("read", [0, 1, 6, len(LENGTHS)])
    def test_the_rest_of_an_epoch(self, read, seed, local):
        data = Documents(local, seed=seed)
        data.set_epoch(2)
        whole = [*data]
        begun = iter(data)
        for _ in range(read):
            next(begun)
        state = data.state_dict()
        again = Documents(Store(local.path), seed=seed)
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = [*again]
        assert len(rest) == len(whole) - read
        for got, want in zip(rest, whole[read:], strict=True):
            assert_equal(got, want)
        again.set_epoch(2)
        assert numbers(again) == [len(tokens) for tokens, _ in whole]  # the next iteration is whole

    def test_another_epoch_begins_at_its_beginning(self, local):
        data = Documents(local, seed=1)
        next(iter(data))
        again = Documents(local, seed=1)
        again.load_state_dict(data.state_dict())
        again.set_epoch(1)
        assert len(numbers(again)) == len(LENGTHS)

    def test_a_state_of_something_else(self, local, tmp_path):
        state = Documents(local, seed=1).state_dict()
        other = stores.write(tmp_path / "other", documents(3, 4))
        for data, words in (
            (
                Documents(other, seed=1),
                r"state must have been saved with documents 2 to resume here, got 11",
            ),
            (Documents(local, seed=2), "saved with seed 2 to resume here, got 1"),
            (Documents(local, seed=1, rank=1, world=2), "saved with share 1 to resume here, got 0"),
        ):
            with pytest.raises(ValueError, match=words):
                data.load_state_dict(state)
        lengths = [*LENGTHS]
        lengths[-2:] = lengths[:-3:-1]  # the same number of documents and tokens
        swapped = stores.write(tmp_path / "swapped", documents(*lengths), shard_bytes=500)
        assert (len(swapped), swapped.tokens) == (len(local), local.tokens)
        with pytest.raises(
            ValueError, match=r"saved with store '\w{64}' to resume here, got '\w{64}"
        ):
            Documents(swapped, seed=1).load_state_dict(state)
        with pytest.raises(ValueError, match="state must have the keys documents, epoch"):
            Documents(local, seed=1).load_state_dict({})
        with pytest.raises(ValueError, match=r"state\['position'\] must lie in \[0, 11\], got 12"):
            Documents(local, seed=1).load_state_dict(state | {"position": 12})

    # torchdata 0.11 calls a function that newer versions of PyTorch deprecate.
    @pytest.mark.filterwarnings("ignore:.*set_vital.* is deprecated:UserWarning")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stateful_data_loader(self, workers, local):
        """The batches after the resumption are those of an epoch that was not interrupted."""
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")

        def loader():
            data = Documents(local, seed=9)
            return torchdata.StatefulDataLoader(
                data, batch_size=2, num_workers=workers, collate_fn=pad_documents
            )

        whole = [*loader()]
        begun = loader()
        for _, _ in zip(range(3), begun, strict=False):
            pass
        state = begun.state_dict()
        again = loader()
        again.load_state_dict(state)
        rest = [*again]
        assert len(rest) == len(whole) - 3
        for got, want in zip(rest, whole[3:], strict=True):
            assert torch.equal(got["input_ids"], want["input_ids"])
            assert torch.equal(got["targets"].logprobs, want["targets"].logprobs)

    @pytest.mark.filterwarnings("ignore:.*set_vital.* is deprecated:UserWarning")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stateful_data_loader_at_the_end_of_an_epoch(self, workers, local):
        """After a resumption, the next epoch is whole, and set_epoch chooses its order."""
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")

        def loader(data):
            how = {"num_workers": workers, "collate_fn": numbers}
            return torchdata.StatefulDataLoader(data, batch_size=2, **how)

        data = Documents(local, seed=9)
        begun = loader(data)
        assert len([*begun]) > 0
        state = begun.state_dict()
        data.set_epoch(1)
        want = [*begun]
        resumed = Documents(local, seed=9)
        again = loader(resumed)
        again.load_state_dict(state)
        resumed.set_epoch(1)
        assert [*again] == want

    def test_a_remote_store(self, local, tmp_path):
        """An epoch that goes on reads the same targets, with a cache that was lost."""
        with served_store(local) as server:
            whole = [*Documents(local, seed=2, mixed=2)]
            data = Documents(Store(server.url, cache=tmp_path / "one"), seed=2, mixed=2)
            begun = iter(data)
            for want in whole[:5]:
                assert_equal(next(begun), want)
            state = data.state_dict()
            again = Documents(Store(server.url, cache=tmp_path / "two"), seed=2, mixed=2)
            again.load_state_dict(state)
            for got, want in zip(again, whole[5:], strict=True):
                assert_equal(got, want)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_workers_of_a_remote_store(self, local, tmp_path):
        """The store was read before the workers are forked. The workers share its cache."""
        with served_store(local) as server:
            store = Store(server.url, cache=tmp_path / "cache")
            store[0]
            found = DataLoader(Documents(store, seed=0), batch_size=None, num_workers=2)
            assert sorted(numbers(found)) == sorted(LENGTHS)
            assert {n for name, n in server.requests.items() if name.endswith(".shard")} == {1}


class TestPadding:
    def test_a_batch(self, local):
        items = [local[i] for i in (0, 2, 3)]
        batch = pad_documents(items, pad_token=5)
        assert batch["input_ids"].shape == (3, 30)
        for row, (tokens, targets) in enumerate(items):
            n = len(tokens)
            assert torch.equal(batch["input_ids"][row, :n], tokens)
            assert bool((batch["input_ids"][row, n:] == 5).all())
            assert batch["attention_mask"][row].tolist() == [1] * n + [0] * (30 - n)
            assert torch.equal(batch["labels"][row, :n], tokens)
            assert bool((batch["labels"][row, n:] == -100).all())
            assert torch.equal(batch["targets"].logprobs[row, :n], targets.logprobs)
            assert not batch["targets"].mask[row, n:].any()
            assert batch["targets"].mask[row, :n].all()

    def test_documents_of_one_length_have_no_mask(self, local):
        batch = pad_documents([local[0], local[0]])
        assert batch["targets"].mask is None
        with pytest.raises(ValueError, match="documents must have at least one document, got none"):
            pad_documents([])

    def test_the_loss_of_a_padded_batch(self, local):
        """Padding changes neither the loss nor the gradient."""
        items = [local[0], local[2]]
        batch = pad_documents(items)
        options = {"divergence": "forward_kl", "support": "tail", "num_items": 1}
        logits = torch.randn(2, 30, stores.V, requires_grad=True)
        loss = ll.store.distill_loss(logits, batch["labels"], batch["targets"], **options).loss
        loss.backward()
        want = 0.0
        for row, (tokens, targets) in enumerate(items):
            own = logits[row, : len(tokens)].detach()[None]
            one = targets.reshape(1, -1)
            want += ll.store.distill_loss(own, tokens[None], one, **options).loss
        torch.testing.assert_close(loss.detach(), want, rtol=1e-5, atol=1e-5)
        assert not logits.grad[0, 9:].any()


def test_arguments(local):
    for how, words in (
        ({"seed": -1}, r"seed must lie in \[0, "),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"mixed": 0}, "mixed must lie in"),
        ({"rank": 2, "world": 2}, r"rank must lie in \[0, 1\], got 2"),
        ({"world": 0}, "world must lie in"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            Documents(local, **how)
    with pytest.raises(ValueError, match=r"epoch must lie in \[0, "):
        Documents(local).set_epoch(-1)
