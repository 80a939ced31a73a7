"""The names of all kernels, and of the kernels that some code launches."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from logitless import kernels
from logitless.kernels.launch import Launch


def every_kernel() -> set[str]:
    """The names of all kernels that logitless/kernels can launch."""
    folder = Path(kernels.__file__).parent
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    return set(re.findall(r"[lL]aunch\(\s*(\w+_kernel)\b", text))


@contextlib.contextmanager
def launched() -> Iterator[set[str]]:
    """Yields a set with the names of the kernels that are launched in this block."""
    names, run = set(), Launch.__call__

    def recorded(self, *tensors):
        names.add(self.kernel.fn.__name__)
        return run(self, *tensors)

    with mock.patch.object(Launch, "__call__", recorded):
        yield names
