"""Replays every fault of tests/regressions.md with whatever logitless is importable.

    python -m tests.support.replay                           all numbers, with this checkout
    python -m tests.support.replay "HUNT 4" "CLIENTS W1"     these numbers
    PYTHONPATH=another/checkout python tests/support/replay.py

Each number is a function of replay_hunt.py or replay_clients.py that raises an AssertionError if
the behaviour is wrong. The functions use only what is public, so that they also run with the commit
in which the faults were found. Each function runs in its own process, because some faults end the
process. The results of both commits are in benchmarks/results/replay.txt.
"""

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

FILES = ("replay_hunt.py", "replay_clients.py")
SECONDS = 120  # for one number


def cases() -> dict[str, Callable[[Path], None]]:
    """The functions by number: hunt_4 is HUNT 4, clients_w1 is CLIENTS W1."""
    found = {}
    for file in FILES:
        path = Path(__file__).with_name(file)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, value in vars(module).items():
            source, _, number = name.partition("_")
            if source in ("hunt", "clients", "newcomer"):
                found[f"{source} {number}".upper()] = value
    return found


def outcome(case: Callable[[Path], None]) -> str:
    """`right`, or `wrong` and the reason, of a case that runs in a forked process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            _run(case, Path(folder), said)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        text = said.read()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ended = f"runs for {SECONDS} s" if number == signal.SIGALRM else signal.Signals(number).name
        return f"wrong ({ended})"
    return text


def _run(case: Callable[[Path], None], folder: Path, said: io.TextIOBase) -> None:
    """Runs in the forked process, and ends it."""
    signal.alarm(SECONDS)
    for number in (1, 2):  # which other libraries write to
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    text = "right"
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet[0], quiet[1], warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case(folder)
    except ImportError as error:
        text = f"not run ({error})"
    except BaseException as error:
        words = (
            str(error).replace(f"{folder}{os.sep}", "")
            or traceback.extract_tb(error.__traceback__)[-1].line
            or ""
        )
        kind = "" if type(error) is AssertionError else f"{type(error).__name__}: "
        text = f"wrong ({kind}{' '.join(words.split())[:120]})"
    said.write(text)
    said.flush()
    os._exit(0)


def main(names: list[str]) -> int:
    import torch

    import logitless as ll

    torch.set_num_threads(1)
    checkout = Path(ll.__file__).parents[1]
    asked = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    print(f"logitless {commit}, torch {torch.__version__.split('+')[0]}", flush=True)
    found = {name: case for name, case in cases().items() if not names or name in names}
    wrong = 0
    for name, case in found.items():
        text = outcome(case)
        wrong += text.startswith("wrong")
        print(f"{name}: {text}", flush=True)
    print(f"{len(found)} numbers, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
