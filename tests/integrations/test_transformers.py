"""DistillTrainer, from a store and from a live teacher."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

import logitless as ll
from logitless.lazy import logits as lazy
from logitless.store import Store, Writer, capture
from tests.support import stores
from tests.support.forked import together
from tests.support.on_policy import arguments, assert_same, distill_trainer, logged, parameters
from tests.support.tiny_models import V, build

pytestmark = pytest.mark.filterwarnings(
    "default",  # those of Transformers and its friends are theirs
    "error:logits of a fused head are materialised",
)
HOW = {"divergence": "forward_kl", "support": "tail"}
K = 8


def texts(n=24):
    random = torch.Generator().manual_seed(5)
    lengths = [5 + i % 7 for i in range(n)]
    return [torch.randint(3, V, (length,), generator=random).tolist() for length in lengths]


def data(n=24):
    return [{"input_ids": tokens} for tokens in texts(n)]


def collate(samples):
    """Padded on the right; padding has no label."""
    width = max(len(s["input_ids"]) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        n = len(sample["input_ids"])
        ids[i, :n] = torch.tensor(sample["input_ids"])
        mask[i, :n] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def teacher_model():
    torch.manual_seed(1)
    model = build("LlamaForCausalLM")
    for p in model.parameters():
        p.data.mul_(3)  # sure of itself
    return model


def student_model():
    torch.manual_seed(2)
    return build("LlamaForCausalLM")


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "store"
    with Writer(path, vocab_size=V, k=K, values="f16") as writer:
        assert capture(teacher_model(), [texts()], writer) == 24
    return Store(path)


def trainer(path, model, how=None, **options):
    how = {"max_steps": 6, "logging_steps": 2} | (how or {})
    return distill_trainer(path, model, data, collate, how, **(HOW | options))


class TestTrainer:
    def by_hand(self, order, targets_of, steps=6, accumulate=1):
        """A loop without Trainer, and a loss without ours: log_softmax over plain logits."""
        model = student_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        batches = [order[i : i + 4] for i in range(0, len(order), 4)]
        for _ in range(steps):
            several = [collate([data()[i] for i in b]) for b in batches[:accumulate]]
            batches = batches[accumulate:]
            count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in several)
            for batch in several:
                targets = targets_of(batch)
                rows = model(batch["input_ids"], attention_mask=batch["attention_mask"])
                logq = rows.logits[:, :-1].log_softmax(-1)
                label, t = batch["labels"][:, 1:], targets[:, :-1]
                live = label != -100
                ce = -logq.gather(-1, label.clamp_min(0)[..., None])[..., 0]
                inside = logq.gather(-1, t.ids.long())
                rest = (1 - inside.exp().sum(-1)).log()
                p = t.logprobs.exp()
                kd = torch.where(p > 0, p * (t.logprobs - inside), 0).sum(-1)
                kd = kd + t.tail.exp() * (t.tail - rest)
                ((0.5 * ce + 0.5 * kd)[live].sum() / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    @pytest.mark.parametrize("accumulate", [2, 1])
    @pytest.mark.few(1)
    def test_equals_a_loop_by_hand(self, captured, accumulate, tmp_path):
        how = {"gradient_accumulation_steps": accumulate, "max_steps": 6 // accumulate}
        found = trainer(tmp_path, student_model(), how, store=captured)
        seen = []
        inner = found.data_collator.inner
        index = {tuple(d["input_ids"]): i for i, d in enumerate(data())}

        def recorded(samples):
            seen.extend(index[tuple(s["input_ids"])] for s in samples)
            return inner(samples)

        found.data_collator.inner = recorded
        found.train()
        want = self.by_hand(
            seen, lambda b: captured.targets_for(b["input_ids"], b["attention_mask"].sum(-1)),
            6 // accumulate, accumulate,
        )  # fmt: skip
        assert_same(parameters(found.model), want)

    def test_a_store_is_as_good_as_the_teacher(self, captured, tmp_path):
        """Curves of both, to the rounding of the store; no logits are made of either."""
        one = trainer(tmp_path, student_model(), store=captured.path)
        two = trainer(tmp_path, student_model(), teacher=teacher_model(), k=K)
        one.train()
        two.train()
        for name in ("loss", "ce_loss", "kd_loss"):
            a, b = logged(one, name), logged(two, name)
            assert len(a) == 3
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-3
        loss, ce, kd = (logged(one, name) for name in ("loss", "ce_loss", "kd_loss"))
        assert abs(0.5 * ce[0] + 0.5 * kd[0] - loss[0]) < 0.2  # of the last step, and the mean

    def test_nothing_is_materialised(self, captured, tmp_path, monkeypatch):
        def made(*_):
            raise AssertionError("logits were materialised")

        for how in ({"store": captured}, {"teacher": teacher_model(), "k": K}):
            found = trainer(tmp_path, student_model(), {"max_steps": 1, "logging_steps": 1}, **how)
            with monkeypatch.context() as patch:
                patch.setattr(lazy.LazyLogits, "plain", made)
                found.train()

    def test_parts_are_those_of_the_step(self, captured, tmp_path):
        how = {"max_steps": 1, "logging_steps": 1, "gradient_accumulation_steps": 2}
        found = trainer(tmp_path, student_model(), how, store=captured)
        found.train()
        loss, ce, kd = (logged(found, n)[0] for n in ("loss", "ce_loss", "kd_loss"))
        assert 0.5 * ce + 0.5 * kd == pytest.approx(loss, abs=2e-3)

    def test_evaluation_with_and_without_the_teacher(self, captured, tmp_path):
        model = student_model()
        plain = Trainer(
            copy.deepcopy(model), arguments(tmp_path), eval_dataset=data(8), data_collator=collate
        )
        plain.remove_callback(PrinterCallback)
        want = plain.evaluate()["eval_loss"]
        both = trainer(tmp_path, copy.deepcopy(model), store=captured).evaluate()
        alone = trainer(tmp_path, copy.deepcopy(model), store=captured, eval_teacher=False)
        other = [{"input_ids": [5, 6, 7]}]  # which the store has not
        assert "eval_loss" in alone.evaluate(other)
        alone = alone.evaluate()
        assert both["eval_ce_loss"] == pytest.approx(want, abs=1e-2)
        assert alone["eval_loss"] == pytest.approx(want, abs=1e-2)
        assert "eval_kd_loss" not in alone
        mean = 0.5 * (both["eval_ce_loss"] + both["eval_kd_loss"])
        assert both["eval_loss"] == pytest.approx(mean, abs=1e-2)

    def test_refusals(self, captured, tmp_path):
        with pytest.raises(
            ValueError, match="a teacher must be given as store= or as teacher=, go"
        ):
            trainer(tmp_path, student_model())
        with pytest.raises(
            ValueError, match=r"have been captured at the student's temperature 2\.0"
        ):
            trainer(tmp_path, student_model(), store=captured, temperature=2.0)
        with pytest.raises(ValueError, match="divergence must be one of"):
            trainer(tmp_path, student_model(), store=captured, divergence="kl")
        counts = stores.write(tmp_path / "counts", [], vocab_size=V, values="counts")
        for support in ("tail", "renorm"):
            words = rf'support must be "truncate" or "renorm_teacher" for .* got \'{support}\''
            with pytest.raises(ValueError, match=words):
                trainer(tmp_path, student_model(), store=counts, support=support)
        trainer(tmp_path, student_model(), store=counts, support="truncate")
        stores.write(tmp_path / "large", [], vocab_size=V + 1)
        with pytest.raises(
            ValueError, match=f"a vocabulary of at most the model's {V}, got {V + 1}"
        ):
            trainer(tmp_path, student_model(), store=tmp_path / "large")
        stores.write(tmp_path / "t", [], vocab_size=V, tokenizer="another")

        class Tokenizer:
            def get_vocab(self):
                return {"a": 1}

        with pytest.raises(ValueError, match="the tokenizer of its capture, whose hash is 'ano"):
            ll.hf.DistillTrainer(
                student_model(), arguments(tmp_path), train_dataset=data(), data_collator=collate,
                processing_class=Tokenizer(), store=tmp_path / "t", **HOW,
            )  # fmt: skip

    def test_what_would_have_no_effect(self, captured, tmp_path):
        with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0, .* got 0\.3"):
            trainer(tmp_path, student_model(), {"label_smoothing_factor": 0.3}, store=captured)
        with pytest.raises(ValueError, match="compute_loss_func must be None, because Distill"):
            trainer(tmp_path, student_model(), store=captured, compute_loss_func=print)

    @pytest.mark.parametrize("name", ["labels", "input_ids"])
    def test_a_collator_that_leaves_something_out(self, name, captured, tmp_path):
        found = trainer(tmp_path, student_model(), store=captured)
        batch = collate(data(2))
        batch.pop(name)
        with pytest.raises(ValueError, match=f"a batch must have {name}, got .* data_collator"):
            found.compute_loss(found.model, batch)

    def test_prediction_without_labels(self, captured, tmp_path):
        found = trainer(tmp_path, student_model(), store=captured)
        inner = found.data_collator.inner
        found.data_collator.inner = lambda samples: {
            name: t for name, t in inner(samples).items() if name != "labels"
        }
        same_length = [d for d in data() if len(d["input_ids"]) == 5][:2]
        assert found.predict(same_length).predictions.shape == (2, 5, V)

    def test_models_of_model_init(self, captured, tmp_path):
        """Trainer calls model_init again when training starts; that model is fused too."""
        found = trainer(tmp_path, None, {"max_steps": 1}, store=captured, model_init=student_model)
        found.train()
        assert ll.is_fused(found.model)


class TestBatches:
    def test_numbers_of_documents(self, captured, tmp_path, monkeypatch):
        """Samples with numbers are not looked up by their tokens, and train as without."""
        want = student_model()
        trainer(tmp_path / "a", want, store=captured, eval_teacher=False).train()
        numbered = [s | {"document": captured.find(s["input_ids"])} for s in data()]
        got, store = student_model(), Store(captured.path)
        how = {"remove_unused_columns": True}
        of_numbers = trainer(tmp_path / "b", got, how, store=store, eval_teacher=False)
        of_numbers.train_dataset = numbered
        of_numbers.eval_dataset = numbered[:8]
        with monkeypatch.context() as patch:
            patch.setattr(Store, "run_files", None)
            of_numbers.train()
            assert "eval_ce_loss" in of_numbers.evaluate()
        assert_same(parameters(got), parameters(want), 0.0)

    def test_padding_on_either_side_and_positions(self, captured):
        one, two = (torch.tensor(t) for t in texts()[:2])
        want = [captured[captured.find(t)][1] for t in (one, two)]
        width = len(one) + 4
        ids = torch.full((2, width), 1)
        mask = torch.zeros(2, width)
        ids[0, 4:], mask[0, 4:] = one, 1
        ids[1, : len(two)], mask[1, : len(two)] = two, 1
        got = ll.store.batch_targets(captured, {"input_ids": ids, "attention_mask": mask})
        assert torch.equal(got.logprobs[0, 4:], want[0].logprobs)
        assert torch.equal(got.logprobs[1, : len(two)], want[1].logprobs)
        assert torch.equal(got.mask.all(-1), mask.bool())
        packed = torch.cat([one, two])[None]
        places = torch.cat([torch.arange(len(one)), torch.arange(len(two))])[None]
        got = ll.store.batch_targets(captured, {"input_ids": packed, "position_ids": places})
        assert torch.equal(got.ids[0, len(one) :], want[1].ids)
        with pytest.raises(KeyError, match="several documents are packed into needs `lengths` or"):
            ll.store.batch_targets(captured, {"input_ids": packed})
        padded = torch.nn.functional.pad(packed, (3, 0))
        some = {"input_ids": padded, "attention_mask": (padded != 0).int()}
        some["documents"] = [[captured.find(one), captured.find(two)]]
        got = ll.store.batch_targets(captured, some)
        assert torch.equal(got.ids[0, 3 + len(one) :], want[1].ids)
        assert not got.mask[0, :3].any()
        none = {"input_ids": packed, "attention_mask": torch.zeros_like(packed)}
        assert not ll.store.batch_targets(captured, none).mask.any()

    def test_a_token_that_the_mask_keeps_is_not_padding(self, captured):
        row = torch.tensor([[*texts()[0], 2]])  # with an end that was not captured
        with pytest.raises(KeyError, match=r"90, 13, 2\], 6 tokens long, at token 0 of row 0"):
            ll.store.batch_targets(
                captured, {"input_ids": row, "attention_mask": torch.ones_like(row)}
            )

    def test_a_teacher_whose_head_is_padded(self, tmp_path):
        """What it says of no token is left out, in the place of ids that the student has not."""
        teacher, larger = teacher_model(), teacher_model()
        larger.resize_token_embeddings(V + 8, mean_resizing=False)
        larger.lm_head.weight.data[V:] = larger.lm_head.weight.data[:8]
        said = [
            trainer(tmp_path, student_model(), teacher=t, k=K)._targets_of(collate(data(2)))
            for t in (teacher, larger)
        ]
        assert (said[1].ids < V).all()
        assert (said[1].ids == said[0].ids).double().mean() > 0.99  # others may be ties
        torch.testing.assert_close(said[1].logprobs, said[0].logprobs)

    def test_labels(self, captured):
        batch = collate(data(2))
        targets = ll.store.batch_targets(captured, batch)
        logits = torch.randn(*batch["input_ids"].shape, V, requires_grad=True)
        found = ll.store.distill_loss(logits, batch["labels"], targets, parts=True, **HOW)
        ce = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        assert found.ce.item() == pytest.approx(ce.item(), abs=1e-5)
        assert found.loss.item() == pytest.approx(0.5 * (found.ce + found.kd).item(), abs=1e-5)
        found.loss.backward()
        assert (logits.grad[:, -1] == 0).all()
        with pytest.raises(ValueError, match="labels must have the shape of targets"):
            ll.store.distill_loss(logits, batch["labels"][:, 1:], targets, **HOW)


def train_on_a_rank(rank, path, store):
    """In a process: the student after four steps, and what it read and logged."""
    how = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "logging_steps": 1}
    found = trainer(path, student_model(), how | {"max_steps": 4}, store=store)
    seen, real = [], Store.targets_for

    def recorded(self, ids, *more):
        seen.append(ids.tolist())
        return real(self, ids, *more)

    Store.targets_for = recorded
    found.train()
    model = found.accelerator.unwrap_model(found.model)
    torch.save(
        (parameters(model), seen, logged(found, "loss"), logged(found, "kd_loss")),
        path / f"{rank}.pt",
    )
    torch.distributed.destroy_process_group()


def test_two_ranks_read_their_own_documents(captured, tmp_path):
    together(2, train_on_a_rank, tmp_path, captured.path)
    (one, seen, loss, kd), (two, other, _, _) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    alone = trainer(tmp_path, student_model(), {"max_steps": 4, "logging_steps": 1}, store=captured)
    alone.train()
    assert_same(one, two, 0)
    assert_same(one, parameters(alone.model))
    assert seen != other
    assert all(len(ids) == 2 for ids in seen[:4])
    assert loss == pytest.approx(logged(alone, "loss"), abs=1e-3)
    assert kd == pytest.approx(logged(alone, "kd_loss"), abs=1e-3)
