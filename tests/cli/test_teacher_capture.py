"""`logitless teacher capture`: a model over documents in files."""

import json
import re

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")

import logitless as ll
from logitless import cli
from logitless.cli.teacher_size import Expected, Pace
from logitless.store import Store
from tests.support import stores
from tests.support.tiny_models import V, build

pytestmark = pytest.mark.filterwarnings("default")  # those of Transformers are theirs


def saved(path):
    """A model and its tokenizer, also in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(V - 1)} | {"[UNK]": V - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    teacher = build("LlamaForCausalLM").eval()
    teacher.save_pretrained(path)
    return teacher, tokenizer


BAD_LINES = (
    ('{"input_ids": "abc"}', "line 2: input_ids must be a list of ids, got 'abc'"),
    ('{"input_ids": 5}', "line 2: input_ids must be a list of ids, got 5"),
    ('{"input_ids": {"a": 1}}', "line 2: input_ids must be a list of ids, got {'a': 1}"),
    ('{"input_ids": [1, 6.5]}', "line 2: input_ids must be whole numbers from 0 below"),
    ('{"input_ids": [1, true]}', "line 2: input_ids must be whole numbers from 0 below"),
    ('{"input_ids": [1, -1]}', "line 2: input_ids must be whole numbers from 0 below"),
    (f'{{"input_ids": [{V}]}}', f"line 2: input_ids must be whole numbers from 0 below {V}"),
    ('{"text": 5}', "line 2: a document must have a string as text, or input_ids, got text 5"),
    ('{"prompt": "a"}', "line 2: a document must have a string as text, or input_ids, got ["),
    ('{"text": "\\udcff"', "line 2: a line must be a JSON object, got"),
    (b'{"text": "\xff"}', "line 2: text must be in UTF-8, got"),
)  # fmt: skip
BAD_OPTIONS = (
    (["--device", "bogus"], "--device must be a device that PyTorch can use here, got 'bogus'"),
    (["--device", "cuda:99"], "--device must be a device that PyTorch can use here, got 'cuda"),
    (["--device", "meta"], "--device must be a device that PyTorch can use here, got 'meta'"),
    (["--dtype", "bogus"], "--dtype must be auto, bfloat16, float16 or float32, got 'bogus'"),
    (["--dtype", "int8"], "--dtype must be auto, bfloat16, float16 or float32, got 'int8'"),
    (["--data", "missing.jsonl"], "--data must name files, got missing.jsonl: no such file"),
    (["--data", "."], "--data must name files, got .: a folder"),
    (["--temperature", "0"], "temperature must"),
    (["--k", "1000000"], "k must lie in"),
    (["--eos"], "the tokenizer must have an end-of-text token for --eos, got none"),
    (["--upload", "folder"], "upload must be an address such as s3://bucket/targets, got 'fol"),
    (["--upload", ""], "upload must be an address such as s3://bucket/targets, got ''"),
    (["--upload", "http://a/b"], "upload must be an address that fsspec can write, such as s3"),
    (["--sample", "9", "--k", "64"], "--k must not be passed together with --sample, got 64"),
    (["--sample", "9", "--values", "u8"], "--values must not be passed together with"),
    (["--seed", "1"], "--seed must be passed with --sample, got 1 without --sample"),
)  # fmt: skip


def capture(folder, *options, out="s") -> int:
    """The exit status of the command for the model in this folder."""
    command = ["teacher", "capture", "--model", str(folder / "model"), "--device", "cpu"]
    return cli.main([*command, "--out", str(folder / out), *map(str, options)])


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """A command that must end with 1 before the model is loaded, and make no folder."""
    from transformers import AutoModelForCausalLM

    saved(tmp_path / "model")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    (tmp_path / "data.jsonl").write_text('{"text": "w1 w2"}')

    def run(*options):
        assert capture(tmp_path, "--data", tmp_path / "data.jsonl", *options) == 1
        assert not (tmp_path / "s").exists()

    return run


def test_bad_documents_are_refused_before_the_model_is_loaded(refused, tmp_path, capsys):
    """The file and the line are named."""
    for line, message in BAD_LINES:
        line = line if isinstance(line, bytes) else line.encode()
        data = b"\xef\xbb\xbf" + b'{"text": "w1 w2"}\n' + line + b"\n"
        (tmp_path / "data.jsonl").write_bytes(data)
        refused()
        assert f"data.jsonl, {message}" in capsys.readouterr().err


def test_bad_options_are_refused_before_the_model_is_loaded(refused, capsys):
    for option, message in BAD_OPTIONS:
        refused(*option)
        assert message in capsys.readouterr().err


def test_lines_of_text_keep_their_blanks(tmp_path):
    """A tokenizer sees leading blanks."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf  one \r\n   \n\ttwo\n")
    found = [line.fields["text"] for line in cli.teacher._data.lines([tmp_path / "a.txt"])]
    assert found == ["  one ", "\ttwo"]


def test_capture_from_the_command_line(tmp_path, capsys, monkeypatch):
    """A model and its tokenizer in a folder, documents as text and as ids; then again: resumed."""
    teacher, tokenizer = saved(tmp_path / "model")
    random = torch.Generator().manual_seed(5)
    documents = [torch.randint(3, V, (5 + i,), generator=random).tolist() for i in range(6)]
    (tmp_path / "a.txt").write_text("\n".join(" ".join(f"w{i}" for i in d) for d in documents[:3]))
    lines = [json.dumps({"input_ids": d}) for d in documents[3:]]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    how = ["--data", tmp_path / "a.txt", tmp_path / "b.jsonl", "--k", 8]
    how += ["--batch-tokens", 16, "--max-length", 9]
    assert capture(tmp_path, *how) == 0
    assert "6 documents added, 0 were already in" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")  # without a RANK
    assert capture(tmp_path, *how) == 0
    assert "rank 0: 0 documents added, 6 were already in" in capsys.readouterr().out
    assert capture(tmp_path, *how, "--eos") == 1
    assert "the tokenizer must have an end-of-text token for --eos" in capsys.readouterr().err
    store = Store(tmp_path / "s", tokenizer=ll.store.tokenizer_hash(tokenizer))
    assert cli.teacher._tokenizer_hash(str(tmp_path / "model")) == store.info.tokenizer
    assert store.info.teacher == str(tmp_path / "model")
    for tokens in documents:
        with torch.no_grad():
            want = ll.capture_topk(teacher(torch.tensor([tokens[:9]])).logits, 8)[0]
        stores.assert_near(store[store.find(tokens[:9])][1], want)


def test_capture_of_samples(tmp_path, capsys):
    """Draws instead of the most probable tokens, reproducible by --seed."""
    saved(tmp_path / "model")
    documents = [torch.arange(3, 13 + i).tolist() for i in range(3)]
    data = tmp_path / "b.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": d}) for d in documents))

    def run(name, *more):
        assert capture(tmp_path, "--data", data, "--sample", 12, *more, out=name) == 0
        return Store(tmp_path / name)

    store, again, other = run("s"), run("t"), run("u", "--seed", "1")
    assert (store.info.values, store.info.k) == ("counts", 12)
    differ = 0
    for tokens in documents:
        got, same, new = (s[s.find(tokens)][1] for s in (store, again, other))
        assert torch.equal(got.ids, same.ids)
        assert torch.equal(got.logprobs, same.logprobs)
        differ += int((got.ids != new.ids).sum())
        torch.testing.assert_close(got.logprobs.exp().sum(-1), torch.ones(len(tokens)))
    assert differ
    capsys.readouterr()
    assert cli.main(["teacher", "info", str(tmp_path / "s")]) == 0
    assert "distinct ids per token" in capsys.readouterr().out
    assert cli.main(["teacher", "verify", str(tmp_path / "s")]) == 0


def test_the_expected_time():
    pace = Pace(ll.store.Header(1000, 8), Expected(10, 7.2e6), world=1)
    got = pace.sentence(1000.0)
    assert got.startswith("first batch: 1,000 tokens/s, ")
    assert got.endswith(" kB/s; at this speed, all documents take 2:00:00 (h:min:s)")


def test_the_size_is_printed_before_and_the_speed_while_it_runs(tmp_path, capsys):
    saved(tmp_path / "model")
    random = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, V, (40,), generator=random).tolist() for _ in range(300)]
    (tmp_path / "a.txt").write_text("\n".join(" ".join(f"w{i}" for i in d) for d in texts))
    (tmp_path / "b.jsonl").write_text(json.dumps({"input_ids": [3] * 500}))
    data = (tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert capture(tmp_path, "--data", *data, "--k", 8, "--max-length", 30) == 0
    printed = capsys.readouterr()
    store = Store(tmp_path / "s")
    assert store.tokens == 301 * 30
    line = printed.out.splitlines()[0]
    numbers = [
        int(n.replace(",", ""))
        for n in re.findall(r"[0-9][0-9,]+(?= (?:bytes|documents|tokens))", line)
    ]
    size, documents, tokens = numbers[:3]
    assert documents == 301
    assert tokens == pytest.approx(store.tokens, rel=0.02)
    actual = sum(shard.size for shard in store.shards)
    assert size == pytest.approx(actual, rel=0.15)  # the index of short documents varies
    assert line.endswith("; the expected time is printed after the first batch")
    words = r"first batch: [0-9,]+ tokens/s, .*/s; at this speed, all documents take \d+:\d\d:\d\d "
    assert len(re.findall(words, printed.out)) == 1
    assert re.search(r"tokens/s, [0-9.,]+ [kM]?B/s|tokens/s, [0-9.,]+ bytes/s", printed.err)
