import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_cpu(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs a function with the CPU as the default device, even if that is a GPU."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # `torch.get_default_device` takes three times as long, and `with torch.device` slows down
        # all operations inside.
        if torch.empty(0).is_cpu:
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run
