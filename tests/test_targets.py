"""SparseTargets: what they refuse, and that they can be indexed, moved, joined, kept and loaded."""

import contextlib
import copy
import io
import itertools
import json
import math
import pickle
import re

import pytest
import torch
from forked import FORKED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

import logitless as ll
from logitless.losses import sparse_teacher as distill

V, K = 53, 5
INF = math.inf


def make(*rows, k=K, tail=True, masked=False, device="cpu"):
    """A teacher's k largest of V."""
    targets = ll.capture_topk(torch.randn(*rows, V), k)
    mask = torch.rand(*rows, k) < 0.7 if masked else None
    made = ll.SparseTargets(targets.ids, targets.logprobs, targets.tail if tail else None, mask)
    return made.to(device)


def parts(targets):
    return [targets.ids, targets.logprobs, targets.tail, targets.mask]


def assert_same(got, want):
    """Bit for bit, dtype and absence included."""
    for a, b in zip(parts(got), parts(want), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def of(*p, **others):
    """Targets of one row with these probabilities, at the ids 0, 1, ..."""
    logprobs = torch.tensor([p], dtype=torch.float64).log().float()
    return ll.SparseTargets(**{"ids": torch.arange(len(p))[None], "logprobs": logprobs, **others})


class TestConstruction:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"ids": torch.zeros(4, 5)}, "ids must hold integers"),
            *[
                ({"ids": torch.zeros(4, 5, dtype=dtype)}, "ids must be int32 or int64, got")
                for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32)
            ],
            ({"ids": torch.zeros(4, 5, dtype=torch.uint64)}, "ids must be int32 or int64, got"),
            (
                {"ids": torch.zeros(4, 0).long()},
                "ids must have at least one slot in its last dimension, got",
            ),
            ({"mask": torch.zeros(4, 5).cfloat()}, "mask must be bool, or 0 and 1"),
            ({"logprobs": torch.zeros(4, 6)}, r"logprobs must have shape \(4, 5\)"),
            (
                {"logprobs": torch.zeros(4, 5).long()},
                "logprobs must hold floating-point numbers, got",
            ),
            ({"tail": torch.zeros(5)}, r"tail must have shape \(4,\)"),
            ({"mask": torch.zeros(4).bool()}, r"mask must have shape \(4, 5\)"),
        ],
    )
    def test_shapes_and_dtypes(self, change, message):
        good = {"ids": torch.zeros(4, 5).long(), "logprobs": torch.zeros(4, 5)}
        ll.SparseTargets(**good)
        with pytest.raises((TypeError, ValueError), match=message):
            ll.SparseTargets(**{**good, **change})

    def test_probabilities_for_log_probabilities(self):
        p = torch.randn(3, 2, V).softmax(-1).sort(-1, descending=True)
        some = {"ids": p.indices[..., :K], "logprobs": p.values[..., :K]}
        with pytest.raises(ValueError, match="logprobs must "):
            ll.SparseTargets(**some)
        rule = "logprobs must be at most 0, the logarithms of probabilities, got 0.9 at (1, 2)."
        logprobs = torch.full((3, 4), -3.0)
        logprobs[1, 2] = 0.9
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
            ll.SparseTargets(torch.arange(12).view(3, 4), logprobs)
        with pytest.raises(ValueError, match=r"^tail must be at most 0, .* got inf at 0\.$"):
            of(0.5, 0.2, tail=torch.tensor([INF]))

    def test_tiny_probabilities_for_log_probabilities(self):
        """Below what rounding may do each, but all of them 1 in effect."""
        with pytest.raises(ValueError, match=r"logprobs must give a row a mass of at most 1"):
            ll.SparseTargets(torch.arange(9)[None], torch.full((1, 9), 1e-3))

    def test_mass(self):
        of(0.6, 0.4)
        of(0.6, 0.3, tail=torch.tensor([0.1]).log())
        rule = "logprobs must give a row a mass of at most 1, got 1.1 at row 0."
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
            of(0.6, 0.5)
        rule = "logprobs and tail must give a row a mass of at most 1, got 1.1 at row 0."
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
            of(0.6, 0.3, tail=torch.tensor([0.2]).log())
        logprobs = torch.full((2, 3, 2), 0.5).log()
        logprobs[1, 2, 1] = math.log(0.6)
        with pytest.raises(ValueError, match=r"at row \(1, 2\)\.$"):
            ll.SparseTargets(torch.arange(2).expand(2, 3, 2), logprobs)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("k", [1, 2, 7, 64, 1000, 4096])
    def test_rounding_is_allowed_for(self, k, dtype):
        """The whole of a distribution, flat to sharp, rounded, also to fewer bits at first."""
        for scale in (0.0, 0.01, 1.0, 3.0, 30.0):
            whole = (torch.randn(20, k) * scale).log_softmax(-1)
            ids = torch.arange(k).expand(20, k)
            for rounded in (whole.to(dtype), whole.bfloat16().to(dtype)):
                ll.SparseTargets(ids, rounded)
                with pytest.raises(ValueError, match="logprobs must "):
                    ll.SparseTargets(ids, (whole + 0.1).to(dtype))
        worst = torch.full((1, k), -math.log(k), dtype=torch.float64)
        if dtype != torch.bfloat16:  # which rounds by up to as much itself
            worst *= 1 - 2.0**-8
        ll.SparseTargets(torch.arange(k)[None], worst.to(dtype))

    def test_what_is_masked_may_be_anything(self):
        mask = torch.tensor([[1, 0, 0, 0]])
        logprobs = torch.tensor([[-0.1, INF, math.nan, 5.0]])
        for kind in (torch.bool, torch.int64, torch.float32):
            ll.SparseTargets(torch.tensor([[0, -7, 1, 2]]), logprobs, mask=mask.to(kind))
        with pytest.raises(ValueError, match="logprobs must be at most 0"):
            ll.SparseTargets(torch.tensor([[0, 7, 1, 2]]), logprobs, mask=mask.flip(-1))

    def test_a_nan_shows_in_the_loss_of_its_row(self):
        logprobs = torch.tensor([[-1.0, math.nan], [-1.0, -2.0]])
        targets = ll.SparseTargets(torch.tensor([[0, 1]] * 2), logprobs)
        how = {"divergence": "forward_kl", "support": "tail", "reduction": "none"}
        assert ll.topk_distill(torch.zeros(2, 9), targets, **how).isnan().tolist() == [True, False]

    def test_a_repeated_id_is_counted_once(self):
        """With the largest of its probabilities, whatever their order."""
        for ids in itertools.permutations([3, 3, 3, 1]):
            p = {3: 0.7, 1: 0.3}
            logprobs = torch.tensor([[p[i] for i in ids]]).log()
            ll.SparseTargets(torch.tensor([ids]), logprobs)
            p[1] = 0.4
            logprobs = torch.tensor([[p[i] for i in ids]]).log()
            with pytest.raises(ValueError, match=r"mass of at most 1, got 1\.1 at row 0"):
                ll.SparseTargets(torch.tensor([ids]), logprobs)
        ids = torch.tensor([[3, 3, 1]])
        ll.SparseTargets(ids, torch.tensor([[0.2, 0.7, 0.3]]).log())
        with pytest.raises(ValueError, match="mass of at most 1"):
            ll.SparseTargets(ids, torch.tensor([[0.2, 0.7, 0.4]]).log())

    def test_no_rows_and_one(self):
        assert make(0, 3).shape == (0, 3)
        one = make()
        assert one.shape == ()
        with pytest.raises(TypeError, match="single row"):
            len(one)

    def test_a_gpu_is_not_read(self, nobody_looks):
        of(0.9, 0.9)

    @pytest.mark.gpu("a tensor that costs a synchronisation to read")
    def test_on_a_gpu(self, device, monkeypatch):
        ids, logprobs = torch.arange(2, device=device)[None], torch.ones(1, 2, device=device)
        monkeypatch.delenv("LOGITLESS_CHECK", raising=False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ll.SparseTargets(ids, logprobs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        monkeypatch.setenv("LOGITLESS_CHECK", "1")
        with pytest.raises(ValueError, match="logprobs must be at most 0"):
            ll.SparseTargets(ids, logprobs)

    def test_tensors_without_values(self, monkeypatch):
        monkeypatch.setenv("LOGITLESS_CHECK", "1")
        assert make(4).to("meta").device.type == "meta"
        ids, logprobs = torch.zeros(4, 2, device="meta").long(), torch.zeros(4, 2, device="meta")
        ll.SparseTargets(ids, logprobs)
        with FakeTensorMode():
            fake = ll.SparseTargets(torch.zeros(4, 2).long(), torch.ones(4, 2))
        assert ll.SparseTargets(fake.ids, fake.logprobs).shape == (4,)

    def test_in_torch_func(self):
        ids = torch.arange(2)

        def loss(x, logprobs):
            targets = ll.SparseTargets(ids, logprobs)
            return ll.topk_distill(x, targets, divergence="forward_kl", support="truncate")

        x, logprobs = torch.randn(V), torch.tensor([0.5, 0.2]).log()
        got = torch.func.grad(loss)(x, logprobs)
        leaf = x.clone().requires_grad_()
        loss(leaf, logprobs).backward()
        torch.testing.assert_close(got, leaf.grad)

    def test_compiles(self, device):
        x, targets = torch.randn(2, 3, V, device=device), make(2, 3, device=device)

        def loss(x, targets):
            targets = ll.SparseTargets(targets.ids, targets.logprobs, targets.tail)[:, 1:]
            targets = targets.to(torch.float64).reshape((-1,))
            return ll.topk_distill(
                x[:, 1:].reshape(-1, V), targets, divergence="jsd", support="tail"
            )

        got = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, targets)
        torch.testing.assert_close(got, loss(x, targets))


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
        with pytest.raises(IndexError, match="targets must be indexed by rows, of which it has"):
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

        monkeypatch.setattr("logitless.targets.checks.mass", refuse)
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
                "targets[1] must have a tail like targets[0], got none. Either all targets have a "
                "tail, or none.",
            ),
            (
                [make(2, tail=False), make(2)],
                0,
                ValueError,
                "targets[1] must have no tail like targets[0], got one. Either all targets have a "
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


class TestKeeping:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("tail", [False, True])
    def test_torch_save(self, tail, masked):
        targets, file = make(2, 3, tail=tail, masked=masked), io.BytesIO()
        torch.save({"targets": targets}, file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True)["targets"], targets)
        assert_same(pickle.loads(pickle.dumps(targets)), targets)
        assert_same(copy.deepcopy(targets), targets)

    def test_pickles_name_what_is_public(self):
        assert b"distill" not in pickle.dumps(make(2), 0)
        assert b"clogitless\nSparseTargets\n" in pickle.dumps(make(2), 0)
        assert distill.SparseTargets is ll.SparseTargets

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("tail", [False, True])
    def test_save_and_load(self, tail, masked, dtype, tmp_path):
        for rows in ((2, 3), (), (0, 4)):
            targets = make(*rows, tail=tail, masked=masked).to(dtype)
            targets.save(tmp_path / "targets")
            assert_same(ll.SparseTargets.load(tmp_path / "targets"), targets)
            again = ll.SparseTargets.load(str(tmp_path / "targets"))
            again.logprobs.mul_(2)  # memory of its own
        assert [path.name for path in tmp_path.iterdir()] == ["targets"]

    def test_what_is_not_contiguous_or_wants_a_gradient(self, tmp_path):
        ids = torch.arange(8, dtype=torch.int32).view(2, 4).mT
        logprobs = torch.full((2, 4), -3.0).mT.requires_grad_()
        targets = ll.SparseTargets(ids, logprobs, mask=ids.mT.contiguous().mT % 2)
        targets.save(tmp_path / "targets")
        assert_same(ll.SparseTargets.load(tmp_path / "targets"), targets)

    def test_a_dtype_that_files_do_not_have(self, tmp_path):
        with pytest.raises(TypeError, match=r"logprobs must have a dtype of F64, .* got"):
            make(2).to(torch.float8_e5m2fnuz).save(tmp_path / "targets")
        assert not list(tmp_path.iterdir())

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        targets, path = make(2), tmp_path / "targets"
        targets.save(path)

        def full(*args):
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", full)
            with pytest.raises(OSError, match="no space"):
                make(3).save(path)
        assert_same(ll.SparseTargets.load(path), targets)
        assert [path.name for path in tmp_path.iterdir()] == ["targets"]

    def test_what_a_file_holds_is_checked(self, tmp_path):
        bad = pytree.tree_map(lambda t: t.abs() + 1, make(2))
        bad.save(tmp_path / "targets")
        with pytest.raises(ValueError, match="logprobs must be at most 0"):
            ll.SparseTargets.load(tmp_path / "targets")

    def test_the_safetensors_package_reads_and_writes_the_same(self, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        targets = make(2, 3, masked=True).to(torch.bfloat16)
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        targets.save(ours)
        found = safetensors.load_file(ours)
        assert_same(ll.SparseTargets(**found), targets)
        metadata = {"format": "logitless.SparseTargets", "version": "1"}
        safetensors.save_file(found, theirs, metadata=metadata)
        assert_same(ll.SparseTargets.load(theirs), targets)
        safetensors.save_file(found, theirs, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"must be a file of format 'logitless.SparseTargets'"):
            ll.SparseTargets.load(theirs)


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


NUMBERS = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
IDS = {"dtype": "I64", "shape": [1, 2], "data_offsets": [8, 24]}
META = {"__metadata__": {"format": "logitless.SparseTargets", "version": "1"}}
GOOD = {**META, "logprobs": NUMBERS, "ids": IDS}
DATA = torch.tensor([-1.0, -2.0]).numpy().tobytes() + torch.tensor([3, 4]).numpy().tobytes()
HUGE = 2**62


def changed(name="logprobs", **what):
    return {**GOOD, name: {**GOOD[name], **what}}


MALFORMED = {
    "empty": (b"", "must have a safetensors header of at most"),
    "short": (b"\x08\0\0", "must have a safetensors header of at most"),
    "pickled": (pickle.dumps(make(2)), "must have a safetensors header of at most"),
    "header past the end": (file_of(GOOD, length=10**6), "within the file's"),
    "an absurd header": (file_of(GOOD, DATA, length=2**63), "within the file's"),
    "a huge header": (file_of(b" " * (1 << 21)), "header of at most 1048576 bytes"),
    "no JSON": (file_of(b"{'a': 1}"), "must have a safetensors header in JSON, got"),
    "no text": (file_of(b"\xff\xfe{}"), "must have a safetensors header in JSON, got"),
    "deep": (file_of(b"[" * 10**5), "must have a safetensors header in JSON, got"),
    "a long number": (file_of(b"9" * 10**5), "must have a safetensors header in JSON, got"),
    "twice": (file_of(b'{"ids": 1, "ids": 2}'), "got a repeated name"),
    "a list": (file_of([1]), "must have a JSON object as its header, got list"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "must have strings as its metadata"),
    "no entry": (file_of({**GOOD, "ids": 3}, DATA), "must give dtype, shape and data_offsets of"),
    "dtype": (file_of(changed(dtype="F4"), DATA), "must have one of F64, .* as the dtype of"),
    "dtypes": (file_of(changed(dtype=[]), DATA), "must have one of F64, .* as the dtype of"),
    "negative": (file_of(changed(shape=[-1, -2]), DATA), "must have sizes of dimensions as the"),
    "fraction": (file_of(changed(shape=[1.0, 2]), DATA), "must have sizes of dimensions as the"),
    "truth": (file_of(changed(shape=[True, 2]), DATA), "must have sizes of dimensions as the"),
    "past 64 bits": (file_of(changed(shape=[0, 2**64]), DATA), "must have sizes of dimensions"),
    "dimensions": (file_of(changed(shape=[1] * 65), DATA), "must have sizes of dimensions"),
    "places": (file_of(changed(data_offsets=[0]), DATA), "must have two numbers as the data_offs"),
    "absurd": (file_of(changed(shape=[HUGE, HUGE]), DATA), "must have .* bytes for 'logprobs'"),
    "long": (file_of(changed(data_offsets=[0, 12]), DATA), "must have 8 bytes for 'logprobs'"),
    "backwards": (file_of(changed(data_offsets=[8, 0]), DATA), "must have 8 bytes for 'logprobs'"),
    "overlapping": (
        file_of(changed(data_offsets=[8, 16]), DATA),
        "must have the bytes of 'logprobs' begin at 0, got 8",
    ),
    "a gap": (
        file_of(changed("ids", data_offsets=[12, 28]), DATA + b"0000"),
        "must have the bytes of 'ids' begin at 8, got 12",
    ),
    "cut off": (file_of(GOOD, DATA[:-1]), "must hold the 24 bytes that its header describes"),
    "more": (file_of(GOOD, DATA + b"0"), "24 bytes that its header describes, got 25"),
    "allocation": (
        file_of(changed("ids", shape=[HUGE // 8], data_offsets=[8, 8 + HUGE]), DATA),
        "must hold the .* bytes that its header describes, got 24",
    ),
    "foreign": (
        file_of({"logprobs": NUMBERS, "ids": IDS}, DATA),
        "must be a file of format 'logitless.SparseTargets', version '1', got None, None",
    ),
    "newer": (
        file_of({**GOOD, "__metadata__": {**META["__metadata__"], "version": "2"}}, DATA),
        "version '1', got 'logitless.SparseTargets', '2'",
    ),
    "incomplete": (
        file_of({**META, "logprobs": NUMBERS}, DATA[:8]),
        r"must hold ids and logprobs, and may hold tail and mask, got \['logprobs'\]",
    ),
    "another name": (
        file_of({**GOOD, "extra": {**NUMBERS, "data_offsets": [24, 32]}}, DATA + b"0" * 8),
        r"must hold ids and logprobs, .* got \['extra', 'ids', 'logprobs'\]",
    ),
}  # fmt: skip


class TestMalformedFiles:
    def test_the_good_one(self, tmp_path):
        (tmp_path / "file").write_bytes(file_of(GOOD, DATA))
        assert ll.SparseTargets.load(tmp_path / "file").ids.tolist() == [[3, 4]]

    @pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
    def test_is_refused_by_name(self, content, message, tmp_path):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match=rf"file must .*{message.removeprefix('must ')}"):
            ll.SparseTargets.load(tmp_path / "file")

    def test_no_byte_of_the_header_is_trusted(self, tmp_path):
        """Any byte changed: refused, or targets that pass every check."""
        good = file_of(GOOD, DATA)
        for place in range(len(good) - len(DATA)):
            for byte in b"\0 9-]":
                bad = good[:place] + bytes([byte]) + good[place + 1 :]
                (tmp_path / "file").write_bytes(bad)
                with contextlib.suppress(ValueError, TypeError):
                    assert ll.SparseTargets.load(tmp_path / "file").ids.numel() == 2

    def test_bytes_that_are_no_bool(self, tmp_path):
        header = {**GOOD, "mask": {"dtype": "BOOL", "shape": [1, 2], "data_offsets": [24, 26]}}
        (tmp_path / "file").write_bytes(file_of(header, DATA + b"\x07\0"))
        mask = ll.SparseTargets.load(tmp_path / "file").mask
        assert mask.view(torch.uint8).tolist() == [[1, 0]]

    def test_cut_while_it_is_read(self, tmp_path):
        from logitless.targets import safetensors as _safetensors

        path = tmp_path / "file"
        path.write_bytes(file_of(GOOD, DATA))
        header = _safetensors.read_header(path)
        path.write_bytes(file_of(GOOD, DATA[:-1]))
        with pytest.raises(ValueError, match="file must keep its length while it is read"):
            _safetensors.read(path, header)
