"""`logitless teacher`: import, verify, info, merge, size."""

import json

import pytest
import torch

import logitless as ll
from logitless import cli
from logitless.cli import teacher_data, teacher_import
from logitless.store import Store, Writer
from tests.support import stores
from tests.support.servers import served
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
    assert (
        "answers.jsonl, line 3: vLLM's prompt_logprobs must have an entry for"
        in capsys.readouterr().err
    )
    assert len(Store(tmp_path / "s")) == 2  # those before it
    path.write_text("[1]")
    assert imported(path, tmp_path / "t") == 1
    assert "line 1: a line must be a JSON object, got '[1]'" in capsys.readouterr().err
    assert imported(tmp_path / "missing.jsonl", tmp_path / "u") == 1
    assert "--data must name files, got" in capsys.readouterr().err
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize("at_once", [1, 12, 4096])
def test_documents_are_added_in_groups(at_once, answers, tmp_path, capsys, monkeypatch):
    """An output that only the writer refuses is named by its line, wherever its group begins."""
    monkeypatch.setattr(teacher_import, "AT_ONCE", at_once)
    path, found = answers
    lines = [json.dumps(answer(*one)) for one in found]
    bad = json.loads(lines[4])
    own = str(bad["prompt_token_ids"][1])
    entry = {own: {"logprob": -0.5}, "50": {"logprob": -2.0}}
    bad["choices"][0]["prompt_logprobs"][1] = entry
    path.write_text("\n".join([*lines[:4], lines[0], json.dumps(bad), lines[5]]))
    assert imported(path, tmp_path / "s") == 1
    error = capsys.readouterr().err
    assert "line 6: targets.ids must be in the vocabulary of 50, got 50" in error
    assert len(Store(tmp_path / "s")) == 4
    heavy = json.loads(lines[4])
    heavy["choices"][0]["prompt_logprobs"][2] |= {"1": {"logprob": 0.0}, "2": {"logprob": 0.0}}
    path.write_text("\n".join([*lines[:4], json.dumps(heavy)]))
    assert imported(path, tmp_path / "s") == 1
    assert (
        "line 5: vLLM's prompt_logprobs must have probabilities that add up"
        in capsys.readouterr().err
    )
    path.write_text("\n".join(lines))
    assert imported(path, tmp_path / "s") == 0
    assert len(Store(tmp_path / "s")) == 6


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
    assert "row_bytes" not in printed  # of the header, only what its author has given
    assert plot.read_bytes().startswith(b"\x89PNG")
    stores.write(tmp_path / "empty", [])
    assert cli.main(["teacher", "info", str(tmp_path / "empty")]) == 0


def test_merge_takes_what_dead_workers_left(tmp_path, capsys):
    found = documents(5, 6, 7)
    stores.write(tmp_path / "a", found[:1])
    dead = Writer(tmp_path / "b", vocab_size=stores.V, k=stores.K, part=3)
    dead.add(*found[1])
    dead.add(*found[2])
    dead.lock.release()
    dead.journal.close()
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

    def ids(fields, end=None, vocab_size=100):
        return teacher_data.ids_of(
            teacher_data.Line("f, line 1", fields, 0), tokenizer, end, vocab_size
        )

    assert ids({"input_ids": [1, 2]}, 9) == [1, 2]  # given: as they are
    assert ids({"text": "ab"}) == [97, 98]
    assert ids({"input_ids": None, "text": "ab"}) == [97, 98]
    assert ids({"text": "ab"}, 9) == [97, 98, 9]
    assert ids({"text": "ab"}, 98) == [97, 98]  # it ends by it already
    with pytest.raises(ValueError, match=r"line 1: a document must .* got \['prompt'\]"):
        ids({"prompt": "ab"})
    with pytest.raises(
        ValueError, match=r"line 1: tokens must be ids of a vocabulary of 98, got 98"
    ):
        ids({"text": "ab"}, vocab_size=98)


def test_batches_have_like_lengths_and_few_tokens():
    drawn = []
    lengths = [5, 1, 9, 2, 9, 30]
    given = (([0] * n, 10 * n) for n in lengths)
    found = list(teacher_data.batches(given, 20, drawn.append))
    assert [[len(d) for d in batch] for batch in found] == [[1, 2, 5], [9, 9], [30]]
    assert sum(drawn) == 10 * sum(lengths)


def test_numbers_that_cannot_be(capsys):
    """-1 would drop the last token of every document, and 0 all of them."""
    options = "--max-length -1, --max-length 0, --vocab-size 0, --k 0, --batch-tokens -5"
    for option in (*options.split(", "), "--max-length 1.5"):
        command = f"teacher capture --model m --data d --out o {option}"
        with pytest.raises(SystemExit) as ended:
            cli.main(command.split())
        assert ended.value.code == 2
        said = f"{option.split()[0]}: must be a whole number of at least 1, got"
        assert said in capsys.readouterr().err


def test_import_of_completions(tmp_path):
    """All completions of each output."""
    rows = torch.randn(3, 50).log_softmax(-1)
    choices = []
    for tokens in ([4, 5], [6]):
        entries = [
            {f"token_id:{i}": float(row[i]) for i in {*row.topk(4).indices.tolist(), token}}
            for row, token in zip(rows, tokens, strict=False)
        ]
        ids = [f"token_id:{i}" for i in tokens]
        choices.append({"logprobs": {"tokens": ids, "top_logprobs": entries}})
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [1, 2, 3], "choices": choices}))
    assert imported(path, tmp_path / "s") == 0
    store = Store(tmp_path / "s")
    assert [store[i][0].tolist() for i in range(2)] == [[1, 2, 3, 4, 5], [1, 2, 3, 6]]
    assert store[1][1].mask.any(-1).tolist() == [False, False, True, False]


def test_size(tmp_path, capsys):
    """Bytes per token of each K, as the files then have them."""
    assert cli.main(["teacher", "size", "--tokens", "1e9", "--k", "64", "--vocab", "151936"]) == 0
    assert "| 64 | 224.0 | 224 GB |" in capsys.readouterr().out
    assert cli.main(["teacher", "size", "--tokens", "1e9", "--vocab", "32000"]) == 0
    assert capsys.readouterr().out.count("GB") == 5
    of_sample = ["teacher", "size", "--tokens", "1e9", "--vocab", "151936", "--sample", "50"]
    assert cli.main(of_sample) == 0
    assert "| 50 | 44.8 | 44.8 GB |" in capsys.readouterr().out
    assert cli.main([*of_sample, "--distinct", "12"]) == 0
    assert "| 50 | 38.0 | 38 GB |" in capsys.readouterr().out
    for k, values in ((8, "u8"), (5, "f16")):
        path = tmp_path / values
        store = stores.write(path, documents(9000, k=k), k=k, values=values)
        (shard,) = path.glob("*.shard")
        assert shard.stat().st_size / 9000 == pytest.approx(store.info.token_bytes(), rel=0.02)
    plain, vocab = of_sample[:6], ["teacher", "size", "--tokens", "5", "--vocab", "5"]
    for command, message in (
        ([*of_sample, "--distinct", "-3"], "--distinct must lie in [1, 50] (the number of draws)"),
        ([*of_sample, "--distinct", "51"], "--distinct must lie in [1, 50] (the number of draws)"),
        ([*of_sample, "--k", "64"], "--k must not be passed together with --sample, got [64]"),
        ([*of_sample, "--values", "u8"], "--values must not be passed together with --sample"),
        ([*plain, "--distinct", "3"], "--distinct must be passed with --sample, got 3 without"),
        ([*vocab, "--k", "9"], "k must lie in [1, 5], got 9"),
    ):
        assert cli.main(command) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["teacher", "size", "--tokens", "many", "--vocab", "5"])
    with pytest.raises(SystemExit):
        cli.main([*plain, "--sample", "70000"])
    assert "--sample: must be at most 65536, got '70000'" in capsys.readouterr().err


def test_address(tmp_path, capsys):
    """Commands that describe and merge stores read a store over HTTP."""
    found = documents(30, 20)
    stores.write(tmp_path / "s", found)
    with served(tmp_path / "s") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
        assert cli.main(["teacher", "verify", server.url]) == 0
        assert cli.main(["teacher", "info", server.url]) == 0
        assert "documents" in capsys.readouterr().out
        assert cli.main(["teacher", "merge", str(tmp_path / "m"), server.url]) == 0
    stores.assert_holds(Store(tmp_path / "m"), found)


def test_parquet(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    stores.write(tmp_path / "s", documents(30, 20))
    assert cli.main(["teacher", "to-parquet", str(tmp_path / "s"), str(tmp_path / "p")]) == 0
    assert "2 documents in " in capsys.readouterr().out
    assert len(list((tmp_path / "p").iterdir())) == 1
