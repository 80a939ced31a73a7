"""Runs each trainer's tests in an environment with its newest release, and prints the table.

    python -m tests.trainers [TRAINER ...] [-k EXPRESSION]

A run of all trainers rewrites the table of docs/trainers.md.
"""

import argparse
import json
import os
import subprocess
import sys

from tests.support import trainer_table
from tests.support.paths import ROOT
from tests.trainers import environments

FILES = {
    "transformers": ("test_loops.py", "test_transformers.py"),
    "axolotl": ("test_axolotl.py",),
    "verl": ("test_verl.py",),
    "torchtitan": ("test_torchtitan.py",),
    "ms-swift": ("test_swift.py",),
    "nemo-automodel": ("test_automodel.py",),
    "trl": ("test_trl.py", "test_trl_gradients.py", "test_recipes.py"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help=", ".join(FILES))
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="passed to pytest")
    args = parser.parse_args()
    names = args.trainers or [*FILES]
    rows, missing, failed = [], [], []
    for name in names:
        try:
            found = environments.prepare(name)
        except subprocess.CalledProcessError as error:
            print(f"{name} cannot be installed: {error}", file=sys.stderr)
            missing.append(name)
            continue
        print(f"\n{name} {found.version}", flush=True)
        if run(found, args.k) not in (0, 5):  # 5: no test matches the expression
            failed.append(name)
        rows += [trainer_table.Row(*row) for row in json.loads(rows_of(found).read_text())]
    print("\n" + trainer_table.text(rows, missing))
    if not (args.trainers or args.k or failed):
        trainer_table.write(rows, missing)
    if failed or missing:
        raise SystemExit(f"failed: {failed or 'none'}, not installed: {missing or 'none'}")


def rows_of(found: environments.Environment):
    return found.python.parents[1] / "rows.json"


def run(found: environments.Environment, expression: str) -> int:
    files = [f"tests/trainers/{file}" for file in FILES[found.trainer]]
    workers = ("-n", "2", "--dist", "worksteal") if found.trainer == "trl" else ()
    options = ("-q", "-W", "default", *workers, "-k", expression)
    offline = {
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled", "LOGITLESS_TRAINERS": str(rows_of(found)),
    }  # fmt: skip
    return subprocess.run(
        [found.python, "-m", "pytest", *options, *files], cwd=ROOT, env={**os.environ, **offline}
    ).returncode


if __name__ == "__main__":
    main()
