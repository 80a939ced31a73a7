"""The table of docs/trainers.md is complete. `make test-trainers` writes this table."""

import re

from tests.support import trainer_table
from tests.support.paths import ROOT

TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation", "GKD", "ORPO", "CPO", "TPO")


def test_rows():
    rows, _ = trainer_table.read()
    assert len({(row.library, row.case) for row in rows}) == len(rows) > 50
    assert {row.library for row in rows} == {
        "TRL", "Transformers", "PEFT", "Accelerate", "Lightning",
    }  # fmt: skip
    for name in (*TRAINERS, "OnlineDPO"):
        assert any(row.case.startswith(name) for row in rows if row.library == "TRL"), name
    assert {row.call for row in rows} == {"`use_in_trl`", "`fuse`", "`fuse` and `use_in_trl`"}
    assert {row.equal for row in rows} == {row.lazy for row in rows} == {"yes"}


def test_versions_are_those_of_the_requirements():
    _, versions = trainer_table.read()
    found = dict(re.findall(r"(\w+) ([\d.]+\d)", versions))
    assert found.keys() == {*trainer_table.PACKAGES}
    text = "".join(
        (ROOT / "requirements" / name).read_text() for name in ("trainers.txt", "tests.txt")
    )
    pinned = dict(re.findall(r"^(\w+)==([\d.]+)", text, re.MULTILINE))
    assert {name: pinned[name] for name in found} == found
