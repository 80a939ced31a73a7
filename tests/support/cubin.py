"""Reads the resources of a kernel that is compiled for an NVIDIA GPU."""

import re
import subprocess
import tempfile

from triton import knobs


def resources(asm) -> dict:
    """Returns the registers, bytes of stack, and loads of single 16-bit numbers of a kernel.

    Register spills show up as bytes of stack.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    narrow = len(re.findall(r"ld\.global[.\w:]*\.b16", asm["ptx"]))
    return {"registers": int(registers), "stack": int(stack), "narrow": narrow}
