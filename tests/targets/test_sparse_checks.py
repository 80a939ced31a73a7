"""SparseTargets: what they refuse."""

import itertools
import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import logitless as ll
from tests.support.sparse_targets import K, V, make


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
        rule = "logprobs must be at most 0, as logarithms of probabilities are, got 0.9 at (1, 2)."
        logprobs = torch.full((3, 4), -3.0)
        logprobs[1, 2] = 0.9
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
            ll.SparseTargets(torch.arange(12).view(3, 4), logprobs)
        with pytest.raises(ValueError, match=r"^tail must be at most 0, .* got inf at 0\.$"):
            of(0.5, 0.2, tail=torch.tensor([torch.inf]))

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
        logprobs = torch.tensor([[-0.1, torch.inf, math.nan, 5.0]])
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
