"""These tests need the packages of requirements/trainers.txt. `make test` leaves the tests out.

After a run of all cases, pytest rewrites the table of docs/trainers.md.
"""

import os

import pytest

IS_ON = bool(os.environ.get("LOGITLESS_TRAINERS"))
collect_ignore_glob = [] if IS_ON else ["test_*.py"]


@pytest.fixture
def outcome(record_property):
    """A function that records a row of the table in docs/trainers.md."""
    return lambda row: record_property("row", tuple(row))


def pytest_terminal_summary(terminalreporter):
    if not IS_ON:
        return
    from tests.support import trainer_table

    reports = [r for found in terminalreporter.stats.values() for r in found]
    given = [p for r in reports for p in getattr(r, "user_properties", ())]
    rows = {trainer_table.Row(*value) for name, value in given if name == "row"}
    if trainer_table.is_complete(rows):
        trainer_table.write(rows)
        terminalreporter.write_line(f"{trainer_table.PAGE.name}: {len(rows)} rows were written")
    else:
        terminalreporter.write_line(f"{trainer_table.PAGE.name}: unchanged, not all cases were run")
