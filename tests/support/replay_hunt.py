"""The faults of the hunt, one function per number, for replay.py."""

import gc
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll

V = 9
IDS = torch.arange(8).view(2, 4)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, 6), nn.Linear(6, V))


def teacher() -> tuple[Tensor, Tensor]:
    """Lazy logits without history, and the same logits as a plain tensor."""
    with torch.no_grad(), ll.lazy_logits():
        return ll.fuse(net(), head="1")(IDS), net()(IDS)


def targets(rows: int, k: int = 8, low: float | None = None, vocab: int = 1000):
    """A teacher's sorted targets. The log-probability of the last slot may be very low."""
    torch.manual_seed(rows)
    z = torch.randn(rows, 200).sort(-1, descending=True).values[:, :k] * 2
    if low is not None:
        z[:, -1] = low
    logp = z.log_softmax(-1) - 0.1
    ids = torch.rand(rows, vocab).topk(k).indices
    return ll.SparseTargets(ids, logp, torch.full((rows,), 1 - np.exp(-0.1)).log())


def writer(folder: Path, **how):
    return ll.store.Writer(folder, **({"vocab_size": 1000, "k": 8} | how))


def store(folder: Path, texts: list, apart: bool = False, **how):
    """A store of documents. With `apart`, each document has its own file."""
    with writer(folder, **how) as w:
        for text in texts:
            w.add(text, targets(len(text), how.get("k", 8), vocab=how.get("vocab_size", 1000)))
            if apart:
                w.flush()
    return ll.store.Store(folder)


def raised(call, kind: type[Exception] = Exception, words: str = "") -> None:
    """Asserts that a call raises an error of this kind, with these words."""
    with pytest.raises(kind, match=re.escape(words)):
        call()


def command(*arguments) -> tuple[int, str]:
    """The exit status and stderr of the command `logitless teacher`."""
    import contextlib
    import io

    from logitless import cli

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = cli.main(["teacher", *map(str, arguments)])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, said.getvalue()


def model_folder(folder: Path) -> Path:
    import tokenizers
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50}  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(folder / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def capture(folder: Path, line: object, *options) -> tuple[int, str]:
    (folder / "data.jsonl").write_text(json.dumps(line) + "\n")
    given = ("--model", model_folder(folder), "--data", folder / "data.jsonl", "--device", "cpu")
    return command("capture", *given, "--out", folder / "s", "--k", 4, *options)


def hunt_1(_):
    z, plain = teacher()
    student = torch.randn(2, 4, V)
    plain[..., 5:] = -torch.inf
    try:
        z[..., 5:] = -torch.inf
    except RuntimeError:
        return
    got, want = (ll.kl_div(student, t, direction="forward") for t in (z, plain))
    assert torch.allclose(got, want), f"{got:.4f}, of masked logits {want:.4f}"


def hunt_2(_):
    def part(z):
        last = z[:, -1]
        last[:, 3] = -30.0

    def data(z):
        z.data[..., 3] = -30.0

    def array(z):
        z.numpy()[..., 3] = -30.0

    for write in (part, data, array):
        z, plain = teacher()
        write(plain)
        try:
            write(z)
        except (RuntimeError, ValueError):
            continue
        got, want = (F.cross_entropy(t.view(-1, V), IDS.view(-1)) for t in (z, plain))
        assert torch.allclose(got, want), f"{write.__name__}: {got:.4f}, plain {want:.4f}"


def hunt_3(_):
    torch.manual_seed(0)
    h, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    for function in (lambda z: z.log_softmax(-1), torch.tanh):

        def second(z, function=function):
            (g,) = torch.autograd.grad((function(z) ** 2).sum(), h, create_graph=True)
            return torch.autograd.grad(g.square().sum(), (h, w))

        want = second(h @ w.T)
        try:
            got = second(ll.LinearLogits(h, w).lazy())
        except RuntimeError:
            continue
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a, b, rtol=1e-3), (
                f"{a.abs().sum():.0f}, plain {b.abs().sum():.0f}"
            )


def hunt_4(_):
    for read in (np.from_dlpack, torch.from_dlpack, lambda z: z.share_memory_(),
                 lambda z: z.apply_(lambda value: value)):  # fmt: skip
        z, plain = teacher()
        try:
            got = torch.as_tensor(np.asarray(read(z)))
        except (RuntimeError, BufferError):
            continue
        assert torch.equal(got, plain), "reads other memory"


def _rank(rank: int, folder: Path) -> None:
    where = dist.FileStore(str(folder / "ranks"), 3)
    dist.init_process_group("gloo", store=where, rank=rank, world_size=3)
    x, target = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    want = ll.cross_entropy(x, target)
    for widths in ((1, 2, 3), (2, 3, 1), (3, 1, 2), (1, 3, 2), (3, 2, 1)):
        own = x.narrow(1, sum(widths[:rank]), widths[rank])
        got = ll.cross_entropy(ll.VocabShard(own, vocab=6), target)
        assert torch.allclose(got, want), f"{got:.4f}, unsharded {want:.4f}, widths {widths}"
    dist.destroy_process_group()


def hunt_5(folder):
    ranks = []
    for rank in range(1, 3):
        ranks.append(os.fork())
        if not ranks[-1]:
            signal.alarm(60)
            try:
                _rank(rank, folder)
            finally:
                os._exit(0)
    _rank(0, folder)
    for child in ranks:
        os.waitpid(child, 0)


def hunt_6(folder):
    texts = [list(range(i, i + 60)) for i in range(0, 300, 60)]
    ids = torch.tensor(texts)
    want = store(folder / "s", texts).targets_for(ids)
    (file,) = (folder / "s").glob("*.safetensors")
    good = file.read_bytes()
    for i in range(60):
        at = len(good) * (20 + i) // 80
        file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
        try:
            got = ll.store.Store(folder / "s").targets_for(ids)
        except (ValueError, KeyError):
            pass
        else:
            same = torch.equal(got.ids, want.ids) and torch.equal(got.logprobs, want.logprobs)
            assert same, f"byte {at}: other targets, no error"
        try:
            ll.store.merge(folder / f"m{i}", [folder / "s"])
        except ValueError:
            continue
        raise AssertionError(f"byte {at}: merged")


def hunt_7(folder):
    torch.manual_seed(0)
    prompt = torch.randint(0, 1000, (70,))
    texts = [torch.cat([prompt, torch.randint(0, 1000, (10,))]) for _ in range(1000)]
    found, rows = store(folder, texts), torch.stack(texts[::125])
    batch = {
        "input_ids": F.pad(rows, (0, 16)),
        "attention_mask": F.pad(torch.ones_like(rows), (0, 16)),
    }
    times = []
    for _ in range(3):
        start = time.perf_counter()
        ll.store.batch_targets(found, batch)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3, f"{min(times):.2f} s for 8 rows"


def hunt_8(folder):
    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with writer(folder) as w:
        one = targets(6)
        before = tensors()
        for i in range(300):
            w.add([i, *range(5)], one)
        grown = tensors() - before
    assert grown < 100, f"{grown} tensors for 300 pending documents"


def hunt_9(folder):
    assert capture(folder, {"input_ids": [1, 2, 3]})[0] == 0
    for length in (-1, 0):
        status, _ = capture(folder, {"input_ids": [1, 2, 3]}, "--max-length", length)
        assert status, f"--max-length {length} is accepted"


def hunt_10(folder):
    w = writer(folder)
    del w
    gc.collect()
    writer(folder).close()


def hunt_11(folder):
    texts = [list(range(500))] * 1
    found = store(folder, texts)
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, 4096)
    raised(lambda: found.targets_for(torch.tensor(texts)), ValueError)


def hunt_12(folder):
    found = store(folder, [[1, 2], [1, 2, 3]], apart=True)
    got = found.targets_for(torch.tensor([[1, 2, 3, 0, 0]]))
    assert got.mask.any(-1).tolist() == [[True] * 3 + [False] * 2]


def hunt_13(folder):
    got = store(folder, [[1, 2], [3, 4], [1, 2, 3]]).targets_for(torch.tensor([[1, 2, 3, 4]]))
    assert got.mask is None or got.mask.any(-1).all(), "the last row is masked"


def hunt_14(_):
    z, plain = teacher()
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]], dtype=torch.uint8)
    assert torch.equal(z[mask] + 0, plain[mask])
    assert z[[]].shape == plain[[]].shape


def hunt_15(folder):
    want = targets(200, 64, low=-9999.0)
    with writer(folder, k=64) as w:
        w.add(list(range(200)), want)
    got = ll.store.Store(folder)[0][1]
    p, tail = want.logprobs.exp(), want.tail.exp()
    inside = (p * (want.logprobs - got.logprobs)).nan_to_num(0.0).sum(-1)
    kl = float((inside + tail * (want.tail - got.tail)).abs().mean())
    assert kl < 2e-5, f"KL {kl:.1e} in the mean"


def hunt_16(folder):
    import transformers

    text = {"input_ids": list(range(5))}
    store(folder / "s", [text["input_ids"]], vocab_size=50, k=4)
    options = {"label_smoothing_factor": 0.3, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(folder))
    raised(
        lambda: ll.hf.DistillTrainer(
            model, arguments, train_dataset=[text], store=folder / "s", ce_weight=0.5,
            divergence="forward_kl", support="tail",
        ),
        ValueError, "label_smoothing_factor",
    )  # fmt: skip


def hunt_17(_):
    x = torch.randn(4, V, requires_grad=True)
    raised(lambda: ll.row_loss(lambda s: s.logprob.detach(), x, torch.arange(4)), RuntimeError)
    raised(lambda: ll.row_loss(lambda s: s.logprob * 1j, x, torch.arange(4)), TypeError)


def hunt_18(_):
    for how in ({"workspace": -1}, {"workspace": "x"}, {"accumulate": "foo"},
                {"logits_dtype": torch.int8}, {"drop_ignored": 3}):  # fmt: skip
        raised(lambda how=how: ll.fuse(net(), head="1", **how), words=f"{next(iter(how))} must")
    raised(lambda: ll.fuse(net(), head=3), TypeError, words="head must")


def hunt_19(folder):
    store(folder, [[1, 2, 3]])
    (file,) = folder.glob("*.safetensors")
    (folder / "0-000000-copy.safetensors").write_bytes(file.read_bytes())
    raised(lambda: ll.store.Store(folder), ValueError, words="0-000000-copy.safetensors")


def hunt_20(folder):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    raised(lambda: writer(folder), OSError)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    left = [file.name for file in folder.iterdir() if "unfinished" in file.name]
    assert not left, f"{left} stays"


def hunt_21(folder):
    status, said = capture(folder, {"input_ids": [1, 2]}, "--device", "bogus")
    assert status == 1
    assert "--device" in said
    status, said = capture(folder, {"input_ids": "abc"})
    assert status == 1
    assert "line 1" in said
    (folder / "answers.jsonl").write_text(json.dumps({"choices": []}) + "\n")
    options = ("--out", folder / "t", "--vocab-size", 50, "--k", 4, "--format", "vllm")
    status, said = command("import", *options, "--data", folder / "answers.jsonl")
    assert status == 1
    assert "line 1" in said


def hunt_22(_):
    said = []
    for z in teacher():
        try:
            z.view(3, -1, V)
        except RuntimeError as error:
            said.append(str(error).split("\n")[0])
    assert said[0] == said[1], said[0]


def hunt_23(_):
    x = torch.randn(4, V)
    raised(lambda: ll.row_loss(lambda s: s.entropy, x, torch.arange(4)), words="entropy=True")
    raised(lambda: ll.global_mean(torch.ones(()), None), words="count must")


def hunt_24(folder):
    texts, one = [[i, *range(5)] for i in range(400)], targets(6)
    with writer(folder) as w:
        start = time.perf_counter()
        for text in texts:
            w.add(text, one)
        took = (time.perf_counter() - start) / len(texts)
    assert took < 1e-3, f"{1000 * took:.1f} ms per document"
