"""Every kernel compiles, with no GPU present, for the GPUs people have; for Hopper, unspilled."""

import json
import re

import pytest
import triton

from tests.support.forked import printed_by
from tests.support.launches import every_kernel
from tests.support.paths import ROOT

HOPPER = "cuda:90"
TARGETS = ["cuda:80", "cuda:100", "hip:gfx942", HOPPER]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(target, request):
    kernels, mode = sorted(every_kernel()), []
    if request.config.option.few:  # each kernel for one GPU
        at = TARGETS.index(target)
        kernels, mode = kernels[::2] if target == HOPPER else kernels[2 * at + 1 :: 6], ["--few"]
    # A process of its own: here the kernels are interpreted.
    printed = printed_by(ROOT / "tests/support/aot.py", target, *mode, "--only", *kernels)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert {row["kernel"].split()[0] for row in rows} == {*kernels}
    for row in rows:  # what profilers show
        family = row["kernel"].split()[0].strip("_").removesuffix("_kernel")
        assert row["compiled"].startswith(f"logitless_{family}")
        assert row["profile"]["name"].startswith(family)
        assert row["profile"]["bytes"] > 0
    # Of the compilers that we measure with; what another does, a measurement will have to say.
    if target == HOPPER and triton.__version__.startswith(("3.6.", "3.7.")):
        # These tiles of narrow heads are the fastest of a sweep, although they spill some bytes.
        # It had no D = 96 with an odd vocabulary, whose 40 bytes are seen here and not measured.
        allowed = {"_narrow_bwd_kernel": 32, "_narrow_fwd_kernel": 24}
        odd = {"_narrow_bwd_kernel bfloat16 V=50257 D=96": 40}
        spilled = [
            row for row in rows
            if row["stack"] > odd.get(row["kernel"], allowed.get(row["kernel"].split()[0], 0))
        ]  # fmt: skip
        assert not spilled
        # Kernels that read whole aligned rows read 16 bytes at a time, except for the label.
        # These two read no whole row.
        plain = [
            row for row in rows if re.search(r"^_\w+ bfloat16 V=32768 ", row["kernel"])
            and not row["kernel"].startswith(("_narrow_expected", "_gather"))
        ]  # fmt: skip
        names = {row["kernel"].split()[0] for row in plain}
        assert mode or names >= {"_stats_fwd_kernel", "_stats_split_fwd_kernel"}
        assert not [row for row in plain if row["narrow"] > 1]
