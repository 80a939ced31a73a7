"""SparseTargets in files: what is written is read, and no file is trusted."""

import contextlib
import copy
import io
import json
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import logitless as ll
from logitless.losses import sparse_teacher as distill
from tests.support.sparse_targets import assert_same, make


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
