"""Compares what two commits compile for Hopper, launch by launch, without a GPU.

    python -m tests.support.same_ptx BEFORE [CALL]      (TRITON_INTERPRET unset)

BEFORE is a commit whose tests have the same calls (kernel_calls.py); CALL is part of the names of
the calls to compare, by default of all. A kernel that only moved, or got another name, has the same
PTX. For others, the command prints registers, bytes of stack and number of instructions of both,
also of those between a label and a branch back to it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from hashlib import sha256

import triton

from tests.support import aot, kernel_calls
from tests.support.cubin import resources
from tests.support.paths import ROOT


def compiled(name: str) -> dict[str, dict]:
    """The name, code and resources of each launch, by variant, call, and place in the call."""
    target = aot.TARGETS["cuda:90"]
    triton.runtime.driver.set_active(aot.Driver(target))
    found, seen, calls = {}, {}, kernel_calls.CALLS
    for variant in aot.VARIANTS:
        for call in (call for call in calls if name in call):
            kernel_calls.CALLS = {call: calls[call]}
            for i, (source, options, _) in enumerate(aot.launches_of(variant, "cuda:90")):
                key = source.hash(), *sorted(options.items())
                if key not in seen:
                    asm = triton.compile(source, target=target, options=options).asm
                    seen[key] = {"kernel": source.name, **code_of(asm["ptx"]), **resources(asm)}
                found[f"{variant}, {call}, {i}"] = seen[key]
    return found


def code_of(ptx: str) -> dict:
    """The hash of a kernel without names and lines of its source, and its instructions."""
    body = ptx.split("\n\t.section\t.debug")[0].split("\n)")[-1]
    lines = [line for line in body.splitlines() if not re.match(r"\s*(\.loc|\.file|//|$)", line)]
    text = re.sub(r"\s*//.*", "", "\n".join(lines))
    name = re.search(r"\.entry (\w+)\(", ptx)
    text = text.replace(name[1], "kernel") if name else text
    is_code = [line.startswith("\t") and ";" in line and line[1] != "." for line in lines]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$")}
    looped = set()  # the lines between a label and a later branch to it
    for i, line in enumerate(lines):
        to = re.search(r"\bbra(?:\.uni)?\s+(\S+);", line)
        looped |= set(range(labels[to[1]], i + 1)) if to and labels[to[1]] <= i else set()
    return {
        "hash": sha256(text.encode()).hexdigest()[:12],
        "instructions": sum(is_code),
        "in loops": sum(is_code[i] for i in looped),
    }


def compare(before: dict[str, dict], after: dict[str, dict]) -> None:
    changed: dict[tuple, list[str]] = {}
    for place in sorted({*before} | {*after}):
        old, new = before.get(place, {}), after.get(place, {})
        if old.get("hash") != new.get("hash"):
            changed.setdefault((json.dumps(old), json.dumps(new)), []).append(place)
    print(f"{len(before)} launches before, {len(after)} after; not equal: {len(changed)} forms")
    for (was, now), places in changed.items():
        old, new = json.loads(was), json.loads(now)
        print(f"{old.get('kernel')} -> {new.get('kernel')}: {places[0]} (and {len(places) - 1})")
        names = ("registers", "stack", "instructions", "in loops")
        print("    " + ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names))


def main(before: str, call: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", folder, before], check=True, cwd=ROOT)
        try:
            mine = os.path.join(folder, "tests", "support", "same_ptx.py")
            with open(__file__) as source, open(mine, "w") as copy:
                copy.write(source.read())
            results = []
            for root in (folder, str(ROOT)):
                done = subprocess.run(
                    [sys.executable, "-m", "tests.support.same_ptx", "--list", call], cwd=root,
                    env={**os.environ, "PYTHONPATH": root}, check=True, stdout=subprocess.PIPE,
                )  # fmt: skip
                results.append(json.loads(done.stdout))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], check=True, cwd=ROOT)
    compare(*results)


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(json.dumps(compiled(*sys.argv[2:])))
    else:
        main(*sys.argv[1:])
