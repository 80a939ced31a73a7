"""The table of docs/trainers.md has all trainers. `make test-trainers` writes this table."""

import re

from tests.support import trainer_table

OF_TRL = (
    "SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation", "GKD", "ORPO", "CPO", "TPO", "OnlineDPO",
)  # fmt: skip
OTHERS = (
    "Transformers", "PEFT", "Accelerate", "Lightning", "axolotl", "verl", "torchtitan", "ms-swift",
    "NeMo Automodel",
)  # fmt: skip
LAZY = 10  # rows; the workspace of the runs holds five in fp32


def test_rows():
    lines = trainer_table.read()
    names = {re.sub(r" [\d.]+\S*$", "", trainer) for trainer, *_ in lines}
    assert names == {*(f"TRL {name}" for name in OF_TRL), *OTHERS}
    for trainer, _, _, difference, rows in lines:
        ours, theirs = map(int, rows.split(" / "))
        assert ours <= LAZY < theirs, trainer
        assert float(difference) <= 2e-2, trainer
