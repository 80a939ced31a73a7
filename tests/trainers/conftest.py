"""These tests need a trainer, and run in its environment (`make test-trainers`, environments.py).

The variable LOGITLESS_TRAINERS names the file into which the rows of the table are written.
"""

import json
import os
from importlib.metadata import version

import pytest

ROWS = os.environ.get("LOGITLESS_TRAINERS")
collect_ignore_glob = [] if ROWS else ["test_*.py"]


@pytest.fixture
def compare(record_property):
    """Asserts that our run equals theirs and is lazy, and records a row of docs/trainers.md."""
    from tests.support.trainer_runs import LAZY, far

    def compare(library: str, case: str, writes: str, got, want, tolerance: float = 2e-5) -> None:
        difference = far(got, want)
        package = library.split(" ")[0] if library.startswith("TRL") else library
        installed = version(package.replace(" ", "-")).partition("+")[0]
        row = (f"{library} {installed}", writes, case, difference, tolerance)
        record_property("row", (*row, got.widest, want.widest))
        assert difference <= tolerance
        assert got.widest <= LAZY < want.widest
        assert not got.materialised
        assert not [text for text in got.warnings - want.warnings if "fuse" in text]

    return compare


def pytest_terminal_summary(terminalreporter):
    if ROWS:
        reports = [r for found in terminalreporter.stats.values() for r in found]
        calls = [r for r in reports if getattr(r, "when", "") == "call"]
        given = [p for r in calls for p in r.user_properties]
        with open(ROWS, "w") as file:
            json.dump([value for name, value in given if name == "row"], file)
