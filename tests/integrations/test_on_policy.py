"""`sample`: the prompts of a batch, and the completions that a student draws."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

from transformers import GenerationConfig

import logitless as ll
from logitless.integrations.on_policy import checked_config
from tests.support.on_policy import CONFIG, EOS, NEW, PAD, collate, data, student_model
from tests.support.tiny_models import V

pytestmark = pytest.mark.filterwarnings(
    "default",  # those of Transformers and its friends are theirs
    "error:logits of a fused head are materialised",
)
GREEDY = GenerationConfig(
    do_sample=True, max_new_tokens=NEW, top_k=1, eos_token_id=EOS, pad_token_id=PAD
)


def completion(model, prompt, eos=EOS):
    """Greedy decoding of one prompt without a cache, up to and including the end."""
    tokens = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


class TestSample:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_equals_decoding_by_hand(self, side):
        """Padding on either side, prompts of several lengths, and ends at several places."""
        model = ll.fuse(student_model()).eval()
        texts = [d["input_ids"] for d in data(6)]
        prompts = [text[: 2 + len(text) % 2] for text in texts]
        eos = completion(model, prompts[1], -1)[2]
        answers = [completion(model, prompt, eos) for prompt in prompts]
        assert min(map(len, answers)) < NEW == max(map(len, answers))
        batch = collate(data(6))
        batch["input_ids"][batch["attention_mask"] == 0] = 77  # which must not be read
        batch["labels"][2, len(texts[2]) - 1] = -100  # which is behind the prompt
        if side == "left":
            for row, text in enumerate(texts):
                for t in batch.values():
                    t[row] = t[row].roll(t.shape[1] - len(text))
        unused = min({*range(V)}.difference(*answers))
        config = GenerationConfig(**(GREEDY.to_dict() | {"eos_token_id": [unused, eos]}))
        got = ll.hf.sample(model, batch, generation_config=config)
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            rest = width - len(prompt) - len(answer)
            assert got["input_ids"][row].tolist() == prompt + answer + [PAD] * rest
            assert got["attention_mask"][row].tolist() == [1] * (width - rest) + [0] * rest
            want = [-100] * len(prompt) + answer + [-100] * rest
            assert got["labels"][row].tolist() == want

    def test_a_row_without_labels_is_a_prompt(self):
        model = ll.fuse(student_model())
        ids = torch.tensor([[7, 8, 9], [10, 11, 12]])
        one = ll.hf.sample(model, {"input_ids": ids}, generation_config=CONFIG, seed=1)
        labels = torch.full_like(ids, -100)
        two = ll.hf.sample(
            model, {"input_ids": ids, "labels": labels}, generation_config=CONFIG, seed=1
        )
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert torch.equal(one["input_ids"][:, :3], ids)
        config = GenerationConfig(**(CONFIG.to_dict() | {"num_return_sequences": 3}))
        many = ll.hf.sample(model, {"input_ids": ids}, generation_config=config, seed=1)
        assert torch.equal(many["input_ids"][:, :3], ids.repeat_interleave(3, 0))
        assert (many["labels"][:, :3] == -100).all()

    def test_samples_are_drawn_from_the_whole_distribution(self):
        """The default has no top-k, even if the model's own generation_config has one."""
        model = ll.fuse(student_model())
        model.generation_config.update(top_k=1, top_p=0.1, do_sample=True)
        with torch.no_grad():
            q = model.eval()(torch.tensor([[7, 8]])).logits[0, -1].softmax(-1)
        batch = {"input_ids": torch.tensor([[7, 8]]).expand(4000, 2)}
        config = checked_config(None)
        assert config.max_new_tokens == 128
        config.max_new_tokens = 1
        drawn = ll.hf.sample(model, batch, generation_config=config, seed=0)["labels"][:, 2]
        share = drawn.bincount(minlength=V) / 4000
        assert (share - q).abs().max() < 5 * math.sqrt(q.max() / 4000)
        assert (share > 0).sum() > 40

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.1, "top_k": 2, "top_p": 0.5},
            {"repetition_penalty": 0.01},
            {"min_p": 0.5},
            {"suppress_tokens": [*range(6, V, 2)]},
            {"exponential_decay_length_penalty": (0, 3.0), "eos_token_id": EOS},
            {"num_return_sequences": 2},
        ],
    )
    def test_only_the_callers_options_hold(self, options):
        """Those of the model's own generation_config do not, apart from token ids."""

        def drawn(**options):
            config = GenerationConfig(do_sample=True, max_new_tokens=NEW, **options)
            return ll.hf.sample(model, collate(data(4)), generation_config=config, seed=1)["labels"]

        model = student_model()
        own = model.generation_config
        own.update(eos_token_id=options.get("eos_token_id"))
        want, other = drawn(), drawn(**options)
        own.update(do_sample=True, **options)
        assert torch.equal(drawn(), want)
        assert torch.equal(drawn(**options), other)
        assert not torch.equal(other, want)
        assert model.generation_config is own

    def test_seeds_and_modes(self):
        ll.report()  # forgets the lazy logits that other tests materialised
        model = ll.fuse(student_model()).train()
        model.model.layers[0].eval()
        modes = [m.training for m in model.modules()]
        inside = []
        model.lm_head.register_forward_hook(lambda *_: inside.append(model.model.training))
        batch = collate(data(4))
        torch.manual_seed(9)
        before = torch.get_rng_state()
        one, two, other = (
            ll.hf.sample(model, batch, generation_config=CONFIG, seed=s)["input_ids"]
            for s in (1, 1, 2)
        )
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(one, two)
        assert one.shape != other.shape or not torch.equal(one, other)
        ll.hf.sample(model, batch, generation_config=CONFIG)
        assert not torch.equal(torch.get_rng_state(), before)
        assert [m.training for m in model.modules()] == modes
        assert inside
        assert not any(inside)
        assert not ll.report()

    def test_a_seed_changes_no_other_device(self, monkeypatch):
        """torch.manual_seed would seed all GPUs, of which only those of the model are restored."""
        model, seeded = student_model(), []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        ll.hf.sample(model, collate(data(2)), generation_config=CONFIG, seed=1)
        assert seeded == []

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"labels": None}, None, ""),
            ({"input_ids": None}, TypeError, r"inputs must be a batch with the tensor input_ids"),
            ({"input_ids": torch.ones(4)}, TypeError, "input_ids must"),
            ({"input_ids": torch.ones(4, dtype=torch.int64)}, ValueError, r"shape \(B, T\)"),
            ({"labels": torch.ones(4, 8, dtype=torch.int64)}, ValueError,
             r"labels must be -100 for the tokens of the prompt .* got no prompt in row 0"),
            ({"labels": [1, 2]}, TypeError, r"labels must be a Tensor, got list"),
            ({"attention_mask": 1}, TypeError, r"attention_mask must be a Tensor, got int"),
            ({"labels": torch.ones(4, 7)}, ValueError, r"labels must have the shape of input_ids"),
            ({"attention_mask": torch.ones(4, 1, 8, 8)}, ValueError, "attention_mask must have"),
            ({"pixel_values": torch.ones(4)}, ValueError, "must have only the columns .* pixel_v"),
            ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}, ValueError,
             "position_ids must be 0 only once per row, .* got 2 texts in row 0"),
        ],
    )  # fmt: skip
    def test_refused_batches(self, change, error, words):
        batch = collate(data(4)) | change
        batch = {name: t for name, t in batch.items() if t is not None}
        if error is None:
            ll.hf.sample(student_model(), batch, generation_config=CONFIG)
            return
        with pytest.raises(error, match=words):
            ll.hf.sample(student_model(), batch, generation_config=CONFIG)

    def test_refused_arguments(self):
        model, batch = student_model(), collate(data(2))
        with pytest.raises(ValueError, match=r"must have do_sample=True, .* got do_sample="):
            ll.hf.sample(model, batch, generation_config=GenerationConfig(max_new_tokens=3))
        with pytest.raises(ValueError, match=r"must have max_new_tokens, .* got max_new_tokens=No"):
            ll.hf.sample(model, batch, generation_config=GenerationConfig(do_sample=True))
        with pytest.raises(TypeError, match="must be a GenerationConfig, got dict"):
            ll.hf.sample(model, batch, generation_config={"do_sample": True})
        config = GenerationConfig(do_sample=True, max_new_tokens=3, temperature=0.0)
        with pytest.raises(ValueError, match=r"must have a temperature above 0, .* got temp.*=0"):
            ll.hf.sample(model, batch, generation_config=config)
        config = GenerationConfig(do_sample=True, max_new_tokens=3, num_beams=2)
        with pytest.raises(ValueError, match=r"must have num_beams=1, .* got num_beams=2"):
            ll.hf.sample(model, batch, generation_config=config)
        config = GenerationConfig(do_sample=True, max_new_tokens=3, stop_strings=["a"])
        with pytest.raises(ValueError, match=r"stop_strings=None, .* got stop_strings=\['a'\]"):
            ll.hf.sample(model, batch, generation_config=config)
        with pytest.raises(ValueError, match=r"seed must be in \[0, 2\^63\), got -1"):
            ll.hf.sample(model, batch, seed=-1)
        with pytest.raises(TypeError, match=r"seed must be an int or None, got 1\.5"):
            ll.hf.sample(model, batch, seed=1.5)
        with pytest.raises(TypeError, match=r"model must have the method generate .* got Linear"):
            ll.hf.sample(torch.nn.Linear(2, 2), batch)
        rule = r"sample must be called with only the arguments .* 'config'"
        with pytest.raises(TypeError, match=rule):
            ll.hf.sample(model, batch, config=CONFIG)
