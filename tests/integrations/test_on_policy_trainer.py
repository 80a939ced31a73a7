"""DistillTrainer(on_policy=...) and DistillTrainer(support="whole")."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

from transformers import GenerationConfig

import logitless as ll
from logitless.integrations.on_policy import draws_on_policy, seed_of
from logitless.lazy import logits as lazy
from tests.support.forked import together
from tests.support.on_policy import (
    CONFIG,
    assert_same,
    collate,
    logged,
    model_of,
    parameters,
    student_model,
    teacher_model,
    trainer,
)
from tests.support.tiny_models import V

pytestmark = pytest.mark.filterwarnings(
    "default",  # those of Transformers and its friends are theirs
    "error:logits of a fused head are materialised",
)


def divergence_of(logq, logp, name, beta):
    """The formulas of docs/distillation.md over log-probabilities."""
    q, p = logq.exp(), logp.exp()
    if name == "jsd":
        logm = (beta * p + (1 - beta) * q).log()
        return (beta * p * (logp - logm) + (1 - beta) * q * (logq - logm)).sum(-1)
    return {
        "forward_kl": (p * (logp - logq)).sum(-1),
        "reverse_kl": (q * (logq - logp)).sum(-1),
        "tvd": (p - q).abs().sum(-1) / 2,
    }[name]


class TestTrainer:
    def by_hand(self, batches, shares, accumulate, beta):
        """A loop without Trainer and without our losses: log_softmax over plain logits."""
        model, teacher = student_model(), teacher_model().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        drawn = []
        for step in range(len(batches) // accumulate):
            several = []
            for i in range(accumulate):
                batch, place = batches[step * accumulate + i], (3, step, i)
                drawn.append(draws_on_policy(0.5, *place))
                if drawn[-1]:
                    seed = seed_of(*place, rank=0)
                    batch = ll.hf.sample(model, batch, generation_config=CONFIG, seed=seed)
                several.append((batch, drawn[-1]))
            count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch, _ in several)
            for batch, sampled in several:
                given = batch["input_ids"], batch["attention_mask"]
                logq = model(given[0], attention_mask=given[1]).logits[:, :-1].log_softmax(-1)
                with torch.no_grad():
                    logp = teacher(given[0], attention_mask=given[1]).logits[:, :-1].log_softmax(-1)
                labels = batch["labels"][:, 1:]
                live = labels != -100
                kd = sum(w * divergence_of(logq, logp, n, beta) for n, w in shares.items())
                ce = -logq.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
                loss = 0.5 * kd + (0.0 if sampled else 0.5) * ce
                (loss[live].sum() / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model), drawn

    @pytest.mark.parametrize(
        ("divergence", "accumulate"),
        [("reverse_kl", 2), ("jsd", 1), ({"forward_kl": 0.7, "tvd": 0.6}, 2)],
    )
    @pytest.mark.few(2)
    def test_equals_a_loop_by_hand(self, divergence, accumulate, tmp_path):
        how = {"gradient_accumulation_steps": accumulate, "max_steps": 8 // accumulate}
        found = trainer(tmp_path, student_model(), how, divergence=divergence, beta=0.3)
        batches = []

        def recorded(samples):
            batches.append(collate(samples))
            return batches[-1]

        found.data_collator = recorded
        ll.report()
        found.train()
        assert not ll.report()
        shares = divergence if isinstance(divergence, dict) else {divergence: 1.0}
        want, drawn = self.by_hand(batches[:8], shares, accumulate, beta=0.3)
        assert 2 <= sum(drawn) <= 6
        assert_same(parameters(found.model), want)
        assert all(loss > 0 for loss in logged(found, "on_policy_kd_loss"))
        sampled = {i // accumulate for i, d in enumerate(drawn) if d}
        assert len(logged(found, "on_policy_kd_loss")) == len(sampled)
        assert "on_policy_ce_loss" not in found.state.log_history[0]

    def test_nothing_is_materialised(self, tmp_path, monkeypatch):
        def made(*_):
            raise AssertionError("logits were materialised")

        for support in ("whole", "tail"):
            how = {"support": support, "k": 8, "on_policy": 1.0}
            found = trainer(tmp_path, student_model(), {"max_steps": 1}, **how)
            with monkeypatch.context() as patch:
                patch.setattr(lazy.LazyLogits, "plain", made)
                found.train()
            assert len(logged(found, "on_policy_kd_loss")) == 1
            assert not logged(found, "ce_loss")
            assert not found.teacher.training
            assert all(p.grad is None for p in found.teacher.parameters())

    def test_whole_rows_equal_all_ids(self, tmp_path):
        """Whole rows, and the top-k with k = V, give the same loss in training and evaluation."""
        one = trainer(tmp_path, student_model(), on_policy=0.0, generation_config=None)
        how = {"support": "tail", "k": V, "on_policy": 0.0, "generation_config": None}
        two = trainer(tmp_path, student_model(), **how)
        one.train()
        two.train()
        for name in ("loss", "ce_loss", "kd_loss"):
            assert logged(one, name) == pytest.approx(logged(two, name), abs=1e-4)
        a, b = one.evaluate(), two.evaluate()
        assert a["eval_kd_loss"] == pytest.approx(b["eval_kd_loss"], abs=1e-4)
        assert a["eval_ce_loss"] == pytest.approx(b["eval_ce_loss"], abs=1e-4)
        alone = trainer(tmp_path, student_model(), ce_weight=0.0).evaluate()
        assert alone["eval_ce_loss"] > 1  # computed for the log

    def test_resumed_from_a_checkpoint(self, tmp_path):
        whole = trainer(tmp_path / "a", student_model(), {"max_steps": 6}, on_policy=0.7)
        whole.train()
        how = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
        trainer(tmp_path / "b", student_model(), how, on_policy=0.7).train()
        again = trainer(tmp_path / "b", student_model(), {"max_steps": 6}, on_policy=0.7)
        again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
        assert_same(parameters(again.model), parameters(whole.model), 1e-6)
        steps = [draws_on_policy(0.7, 3, step, 0) for step in range(6)]
        assert {*steps[:3]} == {*steps[3:]} == {True, False}

    def test_draws_have_the_probability(self):
        drawn = [draws_on_policy(0.3, 0, step, i) for step in range(1000) for i in range(2)]
        assert abs(sum(drawn) / 2000 - 0.3) < 0.04
        assert not any(draws_on_policy(0.0, 0, step, 0) for step in range(50))
        assert all(draws_on_policy(1.0, 0, step, 0) for step in range(50))
        assert len({seed_of(0, 1, 2, rank) for rank in range(8)}) == 8

    def test_lora_in_bf16(self, tmp_path):
        """The adapter learns, and the base stays. Sampling and teacher run under autocast."""
        peft = pytest.importorskip("peft", reason="needs peft: requirements/tests.txt")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        student = peft.get_peft_model(student_model(), config)
        before = parameters(student)
        how = {"bf16": True, "max_steps": 2, "learning_rate": 1.0}
        found = trainer(tmp_path, student, how, on_policy=1.0)
        ll.report()
        found.train()
        assert not ll.report()
        assert len(logged(found, "on_policy_kd_loss")) == 2
        after = parameters(student)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed
        assert all("lora_" in name for name in changed)

    def test_refusals(self, tmp_path):
        def refused(words, error=ValueError, **options):
            with pytest.raises(error, match=words):
                trainer(tmp_path, student_model(), **options)

        refused(r"on_policy must be in \[0, 1\], got 1\.5", on_policy=1.5)
        refused("on_policy must be a number, got 'half'", TypeError, on_policy="half")
        store = {"teacher": None, "store": tmp_path}
        refused("on_policy must be 0 with store=, .*got 0.5", **store, support="tail")
        refused("support must not be 'whole' with store=", **store, on_policy=0.0)
        refused("generation_config must be None without on_policy", on_policy=0.0)
        refused("must have do_sample=True", generation_config=GenerationConfig(max_new_tokens=2))
        refused("divergence must be one of 'forward_kl'.*got 'kl'", divergence="kl")
        refused("divergence must be one of .*got 'kl'", divergence={"kl": 1.0})
        refused("divergence must name at least one divergence, got an empty mapping", divergence={})
        refused(r"divergence\['tvd'\] must be a number", TypeError, divergence={"tvd": "1"})
        refused(
            "divergence must be one name, because only support",
            divergence={"tvd": 1.0},
            support="tail",
        )
        refused("support must be one of .* 'whole', got 'all'", support="all")
        small = model_of(1, vocab_size=V - 1)
        message = "must return at least as many logits per token as the student"
        refused(rf"{message} \({V}\) .* got {V - 1}", teacher=small)

    def test_a_teacher_whose_head_is_padded(self, tmp_path):
        larger = teacher_model()
        larger.resize_token_embeddings(V + 8, mean_resizing=False)
        one, two = (
            trainer(tmp_path, student_model(), {"max_steps": 2}, on_policy=1.0, teacher=t)
            for t in (teacher_model(), larger)
        )
        one.train()
        two.train()
        assert_same(parameters(one.model), parameters(two.model), 1e-6)


def train_on_a_rank(rank, path):
    how = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "max_steps": 4}
    found = trainer(path, student_model(), how)
    seen, real = [], found.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        seen.append((inputs.get("on_policy", False), inputs["input_ids"].tolist()))
        return real(model, inputs, *args, **kwargs)

    found.compute_loss = recorded
    found.train()
    model = found.accelerator.unwrap_model(found.model)
    torch.save((parameters(model), seen, logged(found, "on_policy_kd_loss")), path / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_sample_in_the_same_steps(tmp_path):
    together(2, train_on_a_rank, tmp_path)
    (one, seen, loss), (two, other, _) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert_same(one, two, 0)
    want = [draws_on_policy(0.5, 3, step, 0) for step in range(4)]
    assert [s for s, _ in seen] == [s for s, _ in other] == want
    assert all(a != b for (_, a), (_, b) in zip(seen, other, strict=True))
    assert len(loss) == sum(want)
