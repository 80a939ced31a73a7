"""Replaces a function of the library wherever a module has imported it."""

import contextlib
import sys
from collections.abc import Callable
from unittest import mock


def replaced(right: Callable, wrong: Callable) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "logitless":
            for own, value in [*vars(module).items()]:
                if value is right:
                    stack.enter_context(mock.patch.object(module, own, wrong))
    return stack
