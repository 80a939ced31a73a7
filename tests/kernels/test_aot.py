"""Every kernel compiles, with no GPU present, for the GPUs people have; for Hopper, unspilled."""

import json
import os
import re
import subprocess
import sys

import pytest
import triton

from tests.support.paths import ROOT

TARGETS = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(target):
    # A process of its own: here the kernels are interpreted.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.aot", target],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {row["kernel"].split()[0] for row in rows}
    assert kernels == {
        "_accumulate_kernel",
        "_blocks_kernel",
        "_finish_kernel",
        "_gather_gradient_kernel",
        "_gather_kernel",
        "_jsd_kernel",
        "_jsd_part_kernel",
        "_jsd_sum_kernel",
        "_merge_kernel",
        "_one_pass_kernel",
        "_pair_gradient_kernel",
        "_pair_read_kernel",
        "_partial_kernel",
        "_plain_kernel",
        "_read_kernel",
        "_reduce_kernel",
        "_repeats_kernel",
        "_scale_kernel",
        "_slots_kernel",
        "_spans_kernel",
        "_tail_kernel",
        "_topk_finish_kernel",
        "topk_stream_kernel",
    }
    # Of the compilers that we measure with; what another does, a measurement will have to say.
    if target == "cuda:90" and triton.__version__.startswith(("3.6.", "3.7.")):
        spilled = [row for row in rows if row["stack"]]
        assert not spilled
        # A walk over aligned rows reads 16 bytes at a time, but for the label.
        plain = [
            row for row in rows if re.search(r"^_\w+ bfloat16 V=32768 K=1( split)?$", row["kernel"])
        ]
        assert {row["kernel"].split()[0] for row in plain} >= {"_read_kernel", "_partial_kernel"}
        assert not [row for row in plain if row["narrow"] > 1]
