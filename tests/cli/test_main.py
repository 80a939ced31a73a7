"""The command line: what every subcommand shares."""

import pytest

from logitless import cli
from logitless.cli import demo, main
from tests.support.forked import imported_by
from tests.support.sizes import ON_GPU


def test_a_missing_extra_is_named_with_its_remedy():
    with pytest.raises(
        SystemExit, match=r"demo needs no_such_module: in a clone, pip install '\.\[demo\]'"
    ):
        cli.require("demo", "sys", "no_such_module")


def test_ctrl_c_ends_a_command_quietly(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_importing_the_library_or_its_command_imports_nothing_optional():
    library = imported_by("import logitless")
    command = imported_by("import logitless.cli.demo")
    assert "logitless.losses" in library
    assert "logitless.cli.demo" in command
    assert "logitless.cli" not in library
    assert not {"rich", "matplotlib", "transformers"} & {*library, *command}


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
@pytest.mark.parametrize("command", ["doctor", "demo", "bench"])
def test_a_gpu_that_is_not_there_is_one_sentence(command):
    with pytest.raises(SystemExit) as left:
        main([command, "--device", "cuda"])
    assert left.value.code == "--device must be cpu, because PyTorch can use no GPU here, got cuda."
