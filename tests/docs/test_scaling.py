"""docs/scaling.md says what benchmarks/scale.py prints, and its Python runs; the example too."""

import re

import pytest

from benchmarks import scale
from tests.support.forked import printed_by
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/scaling.md").read_text()


COMMANDS = re.findall(r"^`python -m benchmarks\.scale (.*)`:$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_tables_are_what_is_printed(command, capsys):
    scale.main(command.split())
    assert capsys.readouterr().out in PAGE


def test_example():
    """Four processes: head and loss over all of them, and over 2 x 2 with FSDP2."""
    printed = printed_by(ROOT / "examples/tensor_parallel.py", "--steps", "3", ranks=4)
    found = re.findall(r"^(.*), (\d) x (\d) ranks: weights within (.*) of one", printed, re.M)
    assert [name for name, *_ in found] == ["tensor parallel", "FSDP2 x tensor parallel"]
    assert all(float(far) < 1e-5 for *_, far in found)
