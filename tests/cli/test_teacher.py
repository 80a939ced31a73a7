"""`logitless teacher`: import, verify, info, merge; capture, of a model, is in tests/test_hf.py."""

import json

import pytest
import torch

import logitless as ll
from logitless import cli
from logitless.cli import teacher
from logitless.store import Store, Writer
from tests.support import stores
from tests.support.stores import documents


def answer(tokens, rows, k=4):
    """As vLLM's server gives it."""
    entries = [None]
    for row, token in zip(rows[:-1], tokens[1:], strict=True):
        kept = {*row.topk(k).indices.tolist(), token}
        entries.append({str(i): {"logprob": float(row[i])} for i in kept})
    return {"prompt_token_ids": tokens, "choices": [{"prompt_logprobs": entries}]}


@pytest.fixture
def answers(tmp_path):
    path, found = tmp_path / "answers.jsonl", []
    for seed in range(6):
        torch.manual_seed(seed)
        tokens = torch.randint(0, 50, (5 + seed,)).tolist()
        rows = torch.randn(len(tokens), 50)
        rows[torch.arange(len(tokens) - 1), tokens[1:]] += 4  # it is a good teacher
        found.append((tokens, rows.log_softmax(-1)))
    path.write_text("\n".join(json.dumps(answer(*one)) for one in found) + "\n\n")
    return path, found


def imported(path, out, k=4):
    how = ["--format", "vllm", "--vocab-size", "50", "--k", str(k), "--teacher", "t"]
    return cli.main(["teacher", "import", "--data", str(path), "--out", str(out), *how])


def test_import_and_verify(answers, tmp_path, capsys):
    path, found = answers
    assert imported(path, tmp_path / "s") == 0
    assert "6 documents" in capsys.readouterr().out
    store = Store(tmp_path / "s")
    for tokens, rows in found:
        _, got = store[store.find(tokens)]
        want = ll.capture_topk(rows, 4)
        assert torch.equal(got.ids[:-1].long(), want.ids[:-1])
    assert imported(path, tmp_path / "s") == 0  # again: nothing new
    assert len(Store(tmp_path / "s")) == 6
    assert cli.main(["teacher", "verify", str(tmp_path / "s")]) == 0
    printed = capsys.readouterr().out
    assert "6 documents, 45 tokens" in printed
    assert printed.rstrip().endswith("right")


def test_what_cannot_be_right_is_told_by_its_line(answers, tmp_path, capsys):
    path, _ = answers
    lines = path.read_text().splitlines()
    one = json.loads(lines[2])
    one["choices"][0]["prompt_logprobs"].pop(0)
    path.write_text("\n".join([*lines[:2], json.dumps(one)]))
    assert imported(path, tmp_path / "s") == 1
    assert "output 3: vLLM's prompt_logprobs must have an entry for" in capsys.readouterr().err
    assert len(Store(tmp_path / "s")) == 2  # those before it
    for text, said in (("{", "must have JSON in line 1"), ("[1]", "must have a JSON object in")):
        path.write_text(text)
        assert imported(path, tmp_path / "t") == 1
        assert said in capsys.readouterr().err


def test_a_bad_store_ends_in_an_error(tmp_path, capsys):
    found = []
    for tokens, targets in documents(40, 50):
        ids = targets.ids.clone()
        ids[:, 0] = tokens  # of the token itself, not of the next
        found.append((tokens, ll.SparseTargets(ids, targets.logprobs, targets.tail)))
    stores.write(tmp_path / "s", found)
    assert cli.main(["teacher", "verify", str(tmp_path / "s")]) == 1
    assert "offset -1" in capsys.readouterr().out
    assert cli.main(["teacher", "verify", str(tmp_path)]) == 1
    assert "must be a folder with a store.json" in capsys.readouterr().err


def test_info_and_its_plot(tmp_path, capsys):
    stores.write(tmp_path / "s", documents(40, 50), teacher="a model")
    plot = tmp_path / "new" / "plot.png"
    assert cli.main(["teacher", "info", str(tmp_path / "s"), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    for expected in ("documents", "90", "a model", "bytes per token", "entropy", "mass of the 8"):
        assert expected in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    stores.write(tmp_path / "empty", [])
    assert cli.main(["teacher", "info", str(tmp_path / "empty")]) == 0


def test_merge_takes_what_dead_workers_left(tmp_path, capsys):
    import os

    found = documents(5, 6, 7)
    stores.write(tmp_path / "a", found[:1])
    dead = Writer(tmp_path / "b", vocab_size=stores.V, k=stores.K, part=3)
    dead.add(*found[1])
    dead.add(*found[2])
    os.close(dead.lock)
    os.close(dead.journal.file)
    for action in ("info", "verify"):
        assert cli.main(["teacher", action, str(tmp_path / "b")]) == 0
        assert "bytes of documents are not in the store yet" in capsys.readouterr().out
    out = str(tmp_path / "out")
    assert cli.main(["teacher", "merge", out, str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert len(Store(out)) == 3


def test_ids_of_a_document():
    def tokenizer(text):
        return {"input_ids": [ord(c) for c in text]}

    assert teacher._ids({"input_ids": [1, 2]}, tokenizer, 9) == [1, 2]  # given: as they are
    assert teacher._ids({"text": "ab"}, tokenizer, None) == [97, 98]
    assert teacher._ids({"input_ids": None, "text": "ab"}, tokenizer, None) == [97, 98]
    assert teacher._ids({"text": "ab"}, tokenizer, 9) == [97, 98, 9]
    assert teacher._ids({"text": "ab"}, tokenizer, 98) == [97, 98]  # it ends by it already
    with pytest.raises(ValueError, match=r"must have text or input_ids, got \['prompt'\]"):
        teacher._ids({"prompt": "ab"}, tokenizer, None)


def test_batches_have_like_lengths_and_few_tokens():
    drawn = []
    lengths = [5, 1, 9, 2, 9, 30]
    given = (([0] * n, 10 * n) for n in lengths)
    found = list(teacher._batches(given, 20, drawn.append))
    assert [[len(d) for d in batch] for batch in found] == [[1, 2, 5], [9, 9], [30]]
    assert sum(drawn) == 10 * sum(lengths)
