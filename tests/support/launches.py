"""Which kernels there are, and which of them a piece of work launches."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from logitless import kernels
from logitless.kernels.launch import Launch


def every_kernel() -> set[str]:
    """What is launched anywhere in logitless/kernels."""
    folder = Path(kernels.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    return set(re.findall(r"Launch\(\s*(\w+_kernel)\b", text))


@contextlib.contextmanager
def launched() -> Iterator[set[str]]:
    """The kernels that are launched in this block, by name."""
    names, run = set(), Launch.__call__

    def recorded(self, *tensors):
        names.add(self.kernel.fn.__name__)
        return run(self, *tensors)

    with mock.patch.object(Launch, "__call__", recorded):
        yield names
