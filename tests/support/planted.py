"""Plants bugs in a copy of the library, one at a time, and runs the tests that should find each.

    python -m tests.support.planted                  all bugs of planted_bugs.py
    python -m tests.support.planted --only NAME      one bug
    python -m tests.support.planted --list           names, rooms and files of all bugs

The bugs are planted in a temporary folder, so that no file of the working tree ever changes. The
tests of each bug run in a new process. This process is forked from a process that has imported
PyTorch and pytest. So the processor seconds of a bug do not contain the import of PyTorch. At the
end, the tests that failed run once more in the copy without any bug, because a test that fails
without a bug has found nothing.
"""

import argparse
import compileall
import importlib
import os
import py_compile
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT
from tests.support.planted_bug import Bug
from tests.support.planted_bugs import BUGS

LIMIT = 900  # seconds of wall time; a bug that makes a test run longer counts as found
IMPORTED = ("torch", "numpy", "pytest")  # modules that are imported before the first fork
LEFT_OUT = (".git", ".venv*", "__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache")


class Outcome(NamedTuple):
    """The outcome of the tests of one bug."""

    bug: Bug
    failed: str  # the first test that failed, "" if all passed, or "no end in LIMIT s"
    seconds: float  # processor time

    @property
    def found(self) -> bool:
        return bool(self.failed)


def occurrences(bug: Bug, root: Path) -> int:
    """The number of times that the right text occurs in the file. It must be 1 to plant the bug."""
    return (root / bug.file).read_text().count(bug.right)


def outcomes(bugs: Iterable[Bug], root: Path = ROOT) -> Iterable[Outcome]:
    """Runs the tests of each bug over a copy of the tree in `root`."""
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        # Bytecode is validated by hash, because a changed file may have the time and size of the
        # original file.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "logitless", quiet=1, invalidation_mode=by_hash)
        failed = []
        for bug in bugs:
            file = copy / bug.file
            text = file.read_text()
            if text.count(bug.right) != 1:
                yield Outcome(bug, "", 0.0)
                continue
            file.write_text(text.replace(bug.right, bug.wrong))
            result = _run(copy, bug.tests)
            file.write_text(text)
            failed += [result[0]] if "::" in result[0] else []
            yield Outcome(bug, *result)
        if failed:
            test, _ = _run(copy, sorted(set(failed)))
            if test:
                raise SystemExit(f"{test} fails without a bug: it has found nothing.")


def _run(tree: Path, tests: Iterable[str]) -> tuple[str, float]:
    """The first test that fails, and the processor seconds of the run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = tree.parent / "failed"
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = -1
        try:
            os.setsid()  # so that killpg ends the child together with its own processes
            code = _test(tree, list(tests), report)
        finally:  # the child must not return to the parent's code, which would remove the copy
            os._exit(code)
    failed = _failure(child, report)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return failed, seconds


def _failure(child: int, report: Path) -> str:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if report.exists():
                return report.read_text()
            if code:
                raise RuntimeError(f"pytest ended with {code}, and no test failed.")
            return ""
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"no end in {LIMIT} s"


class _First:
    """A plugin of pytest that writes the name of the first failure to a file."""

    def __init__(self, report: Path):
        self.report = report

    def _write(self, report) -> None:
        if report.failed and not self.report.exists():
            self.report.write_text(report.nodeid)

    pytest_runtest_logreport = pytest_collectreport = _write


def _test(tree: Path, tests: list[str], report: Path) -> int:
    """Runs pytest over the copy, in a process that has not imported the library yet."""
    import pytest

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "logitless")]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ |= {"TMPDIR": str(tree.parent), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(tree)]
    return int(pytest.main([*options, *tests], plugins=[_First(report)]))


def line(outcome: Outcome) -> str:
    verdict = f"found by {outcome.failed}" if outcome.found else "NOT FOUND"
    return f"{outcome.bug.name:34} {outcome.bug.room:10} {outcome.seconds:6.1f} s  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="the name of one bug")
    parser.add_argument("--list", action="store_true", help="list the bugs, and run nothing")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in (None, bug.name)]
    if not bugs:
        raise SystemExit(f"--only must be the name of a bug (see --list), got {options.only!r}.")
    if options.list:
        for bug in bugs:
            print(f"{bug.name:34} {bug.room:10} {bug.file}")
        return 0
    results = []
    for outcome in outcomes(bugs):
        results.append(outcome)
        print(line(outcome), flush=True)
    found, seconds = sum(r.found for r in results), sum(r.seconds for r in results)
    print(f"{found} of {len(results)} found, in {seconds:.0f} processor seconds")
    return int(found < len(results))


if __name__ == "__main__":
    sys.exit(main())
