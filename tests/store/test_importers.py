"""What inference servers tell of a prompt becomes targets."""

import math
from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from logitless.store import Store, from_sglang, from_vllm
from tests.support import stores

V = 50


def rows():
    torch.manual_seed(0)
    return torch.randn(5, V).mul(2).log_softmax(-1)


class TestServers:
    """A prompt of five tokens, as each server tells of it."""

    TOKENS = (7, 3, 3, 9, 1)

    def vllm(self, k=4, after=True):
        """prompt_logprobs of place t are of the row before it, and hold the prompt's own token."""
        entries = [None]
        for row, token in zip(rows()[:-1], self.TOKENS[1:], strict=True):
            best = row.topk(k).indices.tolist()
            entries.append({i: SimpleNamespace(logprob=float(row[i])) for i in {*best, token}})
        last = rows()[-1]
        generated = [
            {i: SimpleNamespace(logprob=float(last[i])) for i in last.topk(k).indices.tolist()}
        ]
        outputs = [SimpleNamespace(logprobs=generated if after else None)]
        return SimpleNamespace(
            prompt_token_ids=list(self.TOKENS), prompt_logprobs=entries, outputs=outputs
        )

    def json(self, **how):
        found = self.vllm(after=False)
        entries = [
            e and {str(i): {"logprob": p.logprob, "rank": 1} for i, p in e.items()}
            for e in found.prompt_logprobs
        ]
        return {"choices": [{"prompt_logprobs": entries, "text": "x"}]} | how

    def sglang(self, k=4):
        own, top = [[None, self.TOKENS[0], None]], [None]
        for row, token in zip(rows()[:-1], self.TOKENS[1:], strict=True):
            own.append([float(row[token]), token, None])
            top.append([[float(row[i]), i, None] for i in row.topk(k).indices.tolist()])
        last = rows()[-1]
        after = [[[float(last[i]), i, None] for i in last.topk(k).indices.tolist()]]
        about = {"input_token_logprobs": own, "input_top_logprobs": top}
        return {"text": "x", "meta_info": about | {"output_top_logprobs": after}}

    def assert_right(self, tokens, targets, last=True, k=4):
        assert tokens.tolist() == list(self.TOKENS)
        want = ll.capture_topk(rows(), k)
        n = 5 if last else 4
        assert torch.equal(targets.ids[:n], want.ids[:n])
        assert (targets.logprobs - want.logprobs)[:n].abs().max() < 1e-6
        assert (targets.tail - want.tail)[:n].abs().max() < 1e-5
        if last:
            assert targets.mask is None
        else:
            assert targets.mask.tolist() == [[True] * k] * 4 + [[False] * k]

    def test_vllm(self, tmp_path):
        self.assert_right(*from_vllm(self.vllm(), k=4))
        self.assert_right(*from_vllm(self.vllm(after=False), k=4), last=False)
        tokens, targets = from_vllm(self.json(prompt_token_ids=self.TOKENS), k=4)
        self.assert_right(tokens, targets, last=False)
        self.assert_right(*from_vllm(self.json(), self.TOKENS, k=4), last=False)
        with stores.open_writer(tmp_path, vocab_size=V) as writer:
            writer.add(tokens, targets)
        _, stored = Store(tmp_path)[0]
        assert torch.equal(stored.mask[:, :4], targets.mask)
        assert not stored.mask[:, 4:].any()
        near = stored.logprobs[:4, :4] - targets.logprobs[:4]
        assert near.abs().max() < 0.02

    def test_sglang(self):
        self.assert_right(*from_sglang(self.sglang(), k=4))
        self.assert_right(*from_sglang(self.sglang()["meta_info"], self.TOKENS, k=4))

    def test_short_rows_are_masked(self):
        output = self.vllm()
        output.prompt_logprobs[2] = {3: SimpleNamespace(logprob=-1.0)}
        _, targets = from_vllm(output, k=4)
        assert targets.mask[1].tolist() == [True, False, False, False]
        assert targets.ids[1].tolist() == [3, 0, 0, 0]

    def test_the_prompt_s_own_token_may_be_kept_beside_the_k(self):
        _, targets = from_vllm(self.vllm(), k=5)
        for row, token in zip(targets.ids[:-1].tolist(), self.TOKENS[1:], strict=True):
            assert token in row

    def test_what_cannot_be_right(self):
        for change, message in (
            (
                lambda o: setattr(o, "prompt_logprobs", None),
                "output must have vLLM's prompt_logprobs, or vLLM's logprobs and the ids of its .*"
                "max_logprobs=k",
            ),
            (
                lambda o: setattr(o, "prompt_token_ids", None),
                "output must have the prompt_token_ids of its prompt, got none. Pass the ids",
            ),
            (lambda o: o.prompt_logprobs.pop(), "must have an entry for each of 5 tokens, got 4"),
            (
                lambda o: setattr(o, "prompt_logprobs", [*o.prompt_logprobs[1:], None]),
                "must begin with None, because the first token has no distribution",
            ),
            (
                lambda o: o.prompt_logprobs.__setitem__(3, None),
                "must have a distribution at position 3, got None",
            ),
            (
                lambda o: o.prompt_logprobs.__setitem__(slice(1, 5), o.prompt_logprobs[:0:-1]),
                "must include token 3, the token of the text at position 1, got .* another text",
            ),
            (
                lambda o: o.prompt_logprobs[2].update({3: SimpleNamespace(logprob=0.9)}),
                "must hold logarithms of probabilities, got 0.9 at position 2",
            ),
            (
                lambda o: o.prompt_logprobs[2].update({3: SimpleNamespace(logprob=-0.01)}),
                "must have probabilities that add up to at most 1 at each position, got",
            ),
        ):
            output = self.vllm()
            change(output)
            with pytest.raises(ValueError, match=message):
                from_vllm(output, k=4)


class TestCompletions:
    """A prompt of two tokens and a completion of three, with `logprobs`."""

    PROMPT, TOKENS = [7, 3], [3, 9, 1]

    def entries(self, k=4):
        """Of each generated token: the row before it, with the token itself."""
        found = []
        for row, token in zip(rows()[1:4], self.TOKENS, strict=True):
            found.append({i: float(row[i]) for i in {*row.topk(k).indices.tolist(), token}})
        return found

    def assert_right(self, tokens, targets):
        assert tokens.tolist() == self.PROMPT + self.TOKENS
        want = ll.capture_topk(rows(), 4)
        assert targets.mask.any(-1).tolist() == [False, True, True, True, False]
        assert torch.equal(targets.ids[1:4], want.ids[1:4])
        assert (targets.logprobs - want.logprobs)[1:4].abs().max() < 1e-6

    def vllm(self, **more):
        logprobs = [{i: SimpleNamespace(logprob=p) for i, p in e.items()} for e in self.entries()]
        outputs = [SimpleNamespace(token_ids=tuple(self.TOKENS), logprobs=logprobs)]
        about = {"prompt_token_ids": self.PROMPT, "prompt_logprobs": None, "outputs": outputs}
        return SimpleNamespace(**(about | more))

    def test_vllm(self, tmp_path):
        tokens, targets = from_vllm(self.vllm(), k=4)
        self.assert_right(tokens, targets)
        with stores.open_writer(tmp_path, vocab_size=V) as writer:
            writer.add(tokens, targets)
        assert Store(tmp_path)[0][1].mask.any(-1).tolist() == [False, True, True, True, False]

    def test_vllm_s_prompt_and_completion(self):
        row = rows()[0]
        prompt = [None, {i: SimpleNamespace(logprob=float(row[i])) for i in (3, 4)}]
        output = self.vllm(prompt_logprobs=prompt)
        tokens, targets = from_vllm(output, k=4, completion=True)
        assert tokens.tolist() == self.PROMPT + self.TOKENS
        assert targets.mask.any(-1).tolist() == [True] * 4 + [False]
        tokens, targets = from_vllm(output, k=4)
        assert tokens.tolist() == self.PROMPT
        assert targets.mask.any(-1).tolist() == [True] * 2

    def test_vllm_s_servers(self):
        """Both forms of an OpenAI-compatible server, with return_tokens_as_token_ids."""
        named = [{f"token_id:{i}": p for i, p in e.items()} for e in self.entries()]
        tokens = [f"token_id:{i}" for i in self.TOKENS]
        plain = {"tokens": tokens, "top_logprobs": named}
        content = [
            {"token": token, "logprob": e[token],
             "top_logprobs": [{"token": i, "logprob": p} for i, p in e.items()]}
            for token, e in zip(tokens, named, strict=True)
        ]  # fmt: skip
        for logprobs in (plain, {"content": content}):
            choice = {"logprobs": logprobs}
            output = {"prompt_token_ids": self.PROMPT, "choices": [{}, choice]}
            self.assert_right(*from_vllm(output, k=4, choice=1))
        words = {"tokens": [" a"] * 3, "top_logprobs": [{" a": -1.0}] * 3}
        with pytest.raises(ValueError, match="name tokens by their ids, got ' a'"):
            from_vllm({"choices": [{"logprobs": words}]}, self.PROMPT, k=4)

    def test_sglang(self):
        own = [[e[t], t, None] for e, t in zip(self.entries(), self.TOKENS, strict=True)]
        top = [[[p, i, None] for i, p in e.items()] for e in self.entries()]
        about = {"output_token_logprobs": own, "output_top_logprobs": top}
        self.assert_right(*from_sglang({"meta_info": about}, self.PROMPT, k=4))

    def test_the_limit_of_vllm_is_said(self):
        words = "at most 20 log-probabilities per token, unless vLLM is started with max_"
        with pytest.raises(ValueError, match=words):
            from_vllm({"prompt_token_ids": [1]}, k=64)

    def test_bad_outputs_of_vllm(self):
        good = {"prompt_token_ids": [7, 3], "prompt_logprobs": [None, {"3": -1.0}]}
        assert from_vllm(good, k=4)[0].tolist() == [7, 3]
        for output, message in (
            ({"choices": []}, "must have a list of completions in its choices, got none"),
            ({"choices": 5}, "must have a list of completions in its choices, got int"),
            ({"prompt_logprobs": [None, {"3": None}]}, "must hold logarithms of .*, got None"),
            ({"prompt_logprobs": [None, {"3": "x"}]}, "must hold logarithms of prob.*, got 'x' at"),
            ({"prompt_logprobs": [None, [3]]}, "must map ids to log-probabilities, got list at po"),
            ({"prompt_logprobs": [None, {"three": -1.0}]}, "must name tokens by their ids, got"),
            ({"prompt_logprobs": {"a": 1}}, "prompt_logprobs must be a list, got dict"),
            ({"prompt_logprobs": [None, {"3": math.nan}]}, "must hold logarithms of .*, got nan"),
            ({"prompt_token_ids": [7, 1.5]}, "must have whole numbers as token ids, got 1.5"),
            ({"prompt_token_ids": [7, True]}, "must have whole numbers as token ids, got True"),
            ({"prompt_token_ids": [7, -3]}, "must have whole numbers as token ids, got -3"),
            ({"prompt_logprobs": [None, {"3": -1.0, "-4": -2.0}]}, "by their ids, got '-4'"),
            ({"prompt_logprobs": [None, {"3": -1.0, "1_0": -2.0}]}, "by their ids, got '1_0'"),
            ({"prompt_logprobs": [None, {"3": -1.0, "": -2.0}]}, "by their ids, got ''"),
            ({"prompt_logprobs": [None, {"3": -1.0, "4": True}]}, "logarithms of .*, got True"),
            ({"prompt_logprobs": [None, {"3": -1.0, "4": math.nan}]}, "logarithms of .*, got nan"),
            ({"prompt_logprobs": [None, {"3": {"logprob": -1.0}, "4": {}}]}, "of .*, got None"),
            (
                {"prompt_logprobs": [None, {"3": -1.0, str(2**70): -2.0}]},
                "must have token ids below 2\\^63, got a",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                from_vllm(good | output, k=4)

    def test_bad_outputs_of_sglang(self):
        for own, top, message in (
            ([[None, 7]], [None, [[-1.0, 3]]], "must have an entry for each of 1 tokens, got 2"),
            ([[None, 7], [-1.0]], [None, [[-1.0, 3]]], r"must have lists of \(logprob, id, text\)"),
            ([[None, 7], [-1.0, 3]], [None, [3]], r"of \(logprob, id, text\), got 3"),
            ([[None, 7], [-1.0, 3]], [None, [[None, 3]]], "must hold logarithms of .*, got None"),
        ):
            about = {"input_token_logprobs": own, "input_top_logprobs": top}
            with pytest.raises(ValueError, match=message):
                from_sglang({"meta_info": about}, k=4)

    def test_entries_of_every_form(self):
        """Usual entries are checked as a whole, and other entries number by number."""
        for entry in (
            {"3": {"logprob": -1.0, "rank": 1}, "12": {"logprob": -2.5}},
            {"3": -1.0, "12": -2.5},
            {3: -1.0, 12: -2.5},
            {"token_id:3": -1.0, "token_id:12": -2.5},
            {"token_id:3": {"logprob": -1.0}, "12": {"logprob": -2.5}},
            {"3": -1, "12": -2.5},
            {"3": SimpleNamespace(logprob=-1.0), 12: {"logprob": -2.5}},
            {"03": -1.0, "12": {"logprob": -2.5}},
        ):
            output = {"prompt_token_ids": [7, 3], "prompt_logprobs": [None, entry]}
            tokens, targets = from_vllm(output, k=3)
            assert tokens.tolist() == [7, 3]
            assert targets.ids[0].tolist() == [3, 12, 0]
            assert targets.logprobs[0].tolist() == [-1.0, -2.5, -math.inf]
            assert targets.mask.tolist() == [[True, True, False], [False] * 3]

    def test_no_slots(self):
        with pytest.raises(ValueError, match=r"k must lie in \[1, 65536\], got 0"):
            from_vllm(self.vllm(), k=0)
