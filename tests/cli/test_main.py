"""The command line: what every subcommand shares."""

import pytest

from logitless import cli
from logitless.cli import doctor, main
from tests.support.forked import imported_by
from tests.support.sizes import ON_GPU


def test_a_missing_extra_is_named_with_its_remedy():
    with pytest.raises(
        SystemExit, match=r"teacher needs no_such_module: in a clone, pip install '\.\[teacher\]'"
    ):
        cli.require("teacher", "sys", "no_such_module")


def test_ctrl_c_ends_a_command_quietly(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_importing_the_library_or_its_command_imports_nothing_optional():
    """Neither Triton, nor an extra, nor a part of PyTorch that takes long to import."""
    library, command = imported_by("import logitless", "import logitless.cli.teacher")
    assert "logitless.losses" in library
    assert "logitless.cli.teacher" in command
    assert "logitless.cli" not in library
    optional = ("rich", "matplotlib", "transformers", "numpy", "safetensors")
    slow = ("triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx")
    assert [name for name in library if name.startswith((*optional, *slow))] == []
    assert not {*optional[:3]} & command


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence():
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--device", "cuda"])
    assert left.value.code == "--device must be cpu, because PyTorch can use no GPU here, got cuda."
