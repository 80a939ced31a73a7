"""SparseTargets: indexed, moved and joined."""

import copy
import math
import re

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

import logitless as ll
from tests.support.forked import FORKED
from tests.support.sparse_targets import K, V, assert_same, make, parts

INF = math.inf


class TestRows:
    def test_are_indexed_together(self, device):
        targets = make(4, device=device)
        some = targets[torch.tensor([2, 0], device=device)]
        assert torch.equal(some.ids, targets.ids[[2, 0]])
        assert torch.equal(some.tail, targets.tail[[2, 0]])
        assert targets[1].shape == ()
        assert targets[1:].shape == (3,)
        assert len(targets) == 4
        assert len(list(targets)) == 4
        assert targets[targets.tail < 9].shape == (4,)
        assert targets[[True, False, True, True]].shape == (3,)
        assert targets[[]].shape == (0,)
        assert targets[None].shape == (1, 4)
        assert targets[True].shape == (1, 4)

    @pytest.mark.parametrize(
        ("index", "like"),
        [
            (..., slice(None)),
            ((..., 0), (slice(None), slice(None), 0)),
            ((0, ...), 0),
            ((..., 1, slice(1, None)), (slice(None), 1, slice(1, None))),
            ((0, ..., 2), (0, slice(None), 2)),
            ((..., None), (slice(None), slice(None), slice(None), None)),
            ((..., [0, 2], [1, 1]), (slice(None), [0, 2], [1, 1])),
            (([1, 0], ..., [1, 2]), ([1, 0], slice(None), [1, 2])),
        ],
    )
    def test_dots_are_rows(self, index, like):
        targets = make(2, 3, 4, masked=True)
        want = [t[like] for t in parts(targets)]
        assert_same(targets[index], ll.SparseTargets(*want))

    @pytest.mark.parametrize(
        "index",
        [
            (slice(None), 0),
            (..., 0, slice(None)),
            (..., slice(None), 0),
            (..., ...),
            torch.ones(4, K).bool(),
            [[True] * K] * 4,
        ],
    )
    def test_slots_are_not_split(self, index):
        with pytest.raises(IndexError, match="targets must be indexed by rows, which have shape"):
            make(4, tail=False)[index]

    def test_reshape(self):
        targets = make(4, masked=True)
        for got in (targets.reshape((2, 2)), targets.reshape(2, 2), targets.reshape([-1, 2])):
            assert got.shape == (2, 2)
            assert_same(got.reshape(-1), targets)
        assert targets[:1].reshape(()).shape == ()
        assert targets[:0].reshape(0, 3).shape == (0, 3)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            targets.reshape(3, -1)

    def test_to(self, device):
        targets = make(4, masked=True)
        half = torch.float16
        for got in (
            targets.to(device, half),
            targets.to(device=device, dtype=half),
            targets.to(half).to(device),
            targets.to(torch.device(device), dtype=half, non_blocking=True),
        ):
            assert got.device.type == torch.device(device).type
            assert [t.dtype for t in parts(got)] == [torch.int64, half, half, torch.bool]
        assert_same(targets.to(device).to("cpu"), targets)
        assert_same(targets.to(), targets)
        assert make(4, tail=False).to(torch.bfloat16).tail is None

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "float16"])
    def test_log_probabilities_are_floating_point(self, dtype):
        with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got"):
            make(4).to("cpu", dtype)
        if dtype != "float16":
            with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got"):
                make(4).to(dtype)

    def test_repr_is_one_line(self):
        got = repr(make(2, 3, masked=True).to(torch.float16))
        assert got == (
            "SparseTargets(ids=int64 (2, 3, 5), logprobs=float16 (2, 3, 5), tail=float16 (2, 3), "
            "mask=bool (2, 3, 5), device=cpu)"
        )
        assert "tail=None, mask=None" in repr(make(4, tail=False))
        assert repr(pytree.tree_map(torch.Tensor.dim, make(4))) == (
            "SparseTargets(ids=2, logprobs=2, tail=1, mask=None, device=None)"
        )

    def test_equality_is_identity(self):
        targets = make(4)
        assert targets == targets
        assert targets != copy.copy(targets)
        assert len({targets, targets}) == 1

    def test_derived_targets_are_not_checked_again(self, monkeypatch):
        targets = make(4, masked=True)

        def refuse(*args):
            raise AssertionError("values were read")

        monkeypatch.setattr("logitless.targets.sparse_checks.mass", refuse)
        targets[1:].reshape(3, 1).to(torch.float16)
        pytree.tree_map(lambda t: t, targets)
        ll.capture_topk(torch.randn(4, V), K)
        ll.SparseTargets.cat([targets, targets])


class TestJoining:
    def test_cat(self):
        a, b = make(2, 3, masked=True), make(2, 4, masked=True)
        for dim in (1, -1):
            got = ll.SparseTargets.cat([a, b], dim)
            assert got.shape == (2, 7)
            assert_same(got[:, :3], a)
            assert_same(got[:, 3:], b)
        assert ll.SparseTargets.cat([a, a]).shape == (4, 3)
        assert ll.SparseTargets.cat((make(2), make(0))).mask is None

    def test_fewer_slots_are_filled_up_masked(self):
        a, b = make(2, k=3), make(1, k=5)
        got = ll.SparseTargets.cat([a, b])
        assert torch.equal(got.ids[:2, :3], a.ids)
        assert torch.equal(got.ids[:2, 3:], torch.zeros(2, 2).long())
        assert torch.equal(got.logprobs[:2, 3:], torch.full((2, 2), -INF))
        assert got.mask.dtype == torch.bool
        assert got.mask.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
        x = torch.randn(3, V)
        for support in ("truncate", "renorm_teacher", "renorm", "tail"):
            for divergence in ("forward_kl", "reverse_kl", "jsd", "tvd"):
                how = {"divergence": divergence, "support": support, "reduction": "none"}
                apart = [ll.topk_distill(x[:2], a, **how), ll.topk_distill(x[2:], b, **how)]
                torch.testing.assert_close(ll.topk_distill(x, got, **how), torch.cat(apart))

    def test_a_mask_of_some_becomes_one_of_all(self):
        a = make(2)
        mask = torch.tensor([[1.0, 0, 1, 1, 0]])
        b = ll.SparseTargets(*parts(make(1))[:3], mask)
        got = ll.SparseTargets.cat([a, b])
        assert torch.equal(got.mask, torch.cat([torch.ones(2, K), mask]).bool())

    def test_dtypes_are_promoted(self):
        a, b = make(2), make(2).to(torch.float16)
        b = ll.SparseTargets(b.ids.int(), b.logprobs, b.tail)
        for join in (ll.SparseTargets.cat, ll.SparseTargets.stack):
            got = join([b, a])
            assert (got.ids.dtype, got.logprobs.dtype) == (torch.int64, torch.float32)
            assert got.tail.dtype == torch.float32

    @pytest.mark.parametrize(
        ("targets", "dim", "kind", "message"),
        [
            ([], 0, ValueError, "targets must hold at least one SparseTargets, got none."),
            ([make(2), 3], 0, TypeError, "targets[1] must be SparseTargets, got int."),
            (
                [make(2), make(2, tail=False)],
                0,
                ValueError,
                "targets[1] must have a tail, like targets[0], got none. Either all targets have a "
                "tail, or none.",
            ),
            (
                [make(2, tail=False), make(2)],
                0,
                ValueError,
                "targets[1] must have no tail, like targets[0], got one. Either all targets have a "
                "tail, or none.",
            ),
            (
                [make(2, 3), make(2, 4)],
                0,
                ValueError,
                "targets[1] must have rows (2, 3) except in dim 0 like targets[0], got (2, 4).",
            ),
            (
                [make(2), make(2, 4)],
                0,
                ValueError,
                "targets[1] must have rows (2,) except in dim 0 like targets[0], got (2, 4).",
            ),
            ([make(2)], 1, IndexError, "dim must be one of the 1 dimensions of rows, got 1."),
            ([make()], 0, IndexError, "dim must be one of the 0 dimensions of rows, got 0."),
            ([make(2)], 1.0, TypeError, "dim must be an int, got 1.0."),
            (
                [make(2), make(2).to("meta")],
                0,
                ValueError,
                "targets[1] must be on cpu like targets[0], got meta.",
            ),
        ],
    )
    def test_refusals(self, targets, dim, kind, message):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            ll.SparseTargets.cat(targets, dim)

    def test_stack(self):
        a, b = make(2, masked=True), make(2)
        assert_same(ll.SparseTargets.stack([a, b])[0], a)
        assert_same(ll.SparseTargets.stack([a, b], -1)[:, 0], a)
        with pytest.raises(
            ValueError, match=r"must have rows \(2,\) like targets\[0\], got \(3,\)"
        ):
            ll.SparseTargets.stack([a, make(3)])
        assert ll.SparseTargets.stack([make(), make()]).shape == (2,)

    def test_default_collate(self):
        samples = [{"x": torch.zeros(3), "t": make(3, k=k)} for k in (4, 2)]
        got = default_collate(samples)
        assert_same(got["t"], ll.SparseTargets.stack([s["t"] for s in samples]))
        assert (got["t"].shape, got["t"].k, got["x"].shape) == ((2, 3), 4, (2, 3))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_data_loader(self, workers):
        samples = [(torch.tensor(i), make(3, masked=True)) for i in range(4)]
        how = {"multiprocessing_context": FORKED} if workers else {}
        loader = DataLoader(samples, batch_size=2, num_workers=workers, **how)
        for i, (number, targets) in enumerate(loader):
            assert number.tolist() == [2 * i, 2 * i + 1]
            assert_same(targets, ll.SparseTargets.stack([t for _, t in samples[2 * i :][:2]]))

    def test_data_loader_pins(self, monkeypatch):
        """What its thread does to each batch, short of the driver."""
        from torch.utils.data._utils.pin_memory import pin_memory

        pinned = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t, *_: pinned.append(t) or t)
        targets = make(3)
        _, got = pin_memory((torch.zeros(1), targets))
        assert_same(got, targets)
        assert len(pinned) == 4

    @pytest.mark.gpu("memory that a driver pins")
    def test_data_loader_pins_memory(self):
        how = {"num_workers": 1, "pin_memory": True, "multiprocessing_context": "spawn"}
        for targets in DataLoader([make(3), make(3)], batch_size=2, **how):
            assert all(t.is_pinned() for t in parts(targets) if t is not None)
