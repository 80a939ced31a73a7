"""Records where lazy logits are materialised, for `report()` and for warnings."""

import os
import sys
import sysconfig
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

VARIABLE = "LOGITLESS_WARN_BYTES"
HEAD = "_logitless_head"  # key in a head's __dict__ for its name, if its model has several heads
PLACES = 1000  # the largest number of records; one more record replaces the oldest record
LIMIT = 1 << 30  # the default of LOGITLESS_WARN_BYTES for logits outside of a training forward

# A file name that begins with one of these strings belongs to logitless, to PyTorch, or to code
# that PyTorch generates.
INSIDE = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    "<string>",
)
# Lines of these libraries are reported only if no line of the user's own code is on the call stack.
LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning", "typing_extensions")
PYTHON = f"{sysconfig.get_paths()['stdlib']}{os.sep}"

INSTEAD = (
    "The logits stay lazy if a loss or a statistic is computed from them, or if only some of their"
    " rows are read. If all values are needed, call logits.materialize(), which gives no warning."
)


@dataclass(frozen=True)
class Materialised:
    """A record of an operation that materialised lazy logits of a head, at one line of code."""

    operation: str
    shape: tuple[int, ...]  # the shape of the largest logits that were materialised
    bytes: int  # the size of the largest logits that were materialised
    count: int
    line: str  # file:line
    head: str = ""  # the name of the head, if several heads of a model are fused

    def plus(self, other: "Materialised | None") -> "Materialised":
        """Merges two records of the same operation, line and head into one record."""
        if other is None:
            return self
        largest = max(self, other, key=lambda record: record.bytes)
        return replace(largest, count=self.count + other.count)

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count:,} times"
        fields = (self.operation, self.shape, in_units(self.bytes), times, self.line, self.head)
        return "  ".join(str(field) for field in fields if field != "")


NOTHING = "No lazy logits were materialised. Plain logits are not counted (see ll.is_fused)."


class Report(list[Materialised]):
    """A list of `Materialised` records, largest first. `print` shows one line per record."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or NOTHING

    __repr__ = __str__


@dataclass(frozen=True)
class Place:
    """The key of a record: the operation, the line of code, and the head of the logits."""

    operation: str
    line: str
    head: "weakref.ref[nn.Module] | None"  # None if the head is not a module


_seen: dict[Place, Materialised] = {}
_warned: set[str] = set()
_lock = threading.Lock()


def report(model: nn.Module | None = None) -> Report:
    """Returns the operations that materialised lazy logits since the last report.

    Each record has the fields `operation`, `shape`, `bytes`, `count`, `line` and `head`. The field
    `head` is the name of the head if several heads of a model are fused, and "" otherwise. If an
    operation materialised logits of several sizes, `shape` and `bytes` describe the largest logits.
    If `model` is given, the report contains only the logits of the model's heads. All other records
    are kept for the next report. Losses and functions such as `argmax` usually compute some rows at
    a time. Such calls do not materialise the logits and are not reported.

    >>> print(report(model))
    Tensor.numpy  (8, 4096, 128256)  15.7 GiB  12 times  evaluate.py:31
    """
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"model must be an nn.Module or None, got {type(model).__name__}.")
    heads = None if model is None else set(model.modules())
    with _lock:
        found = [
            place
            for place in _seen
            if heads is None or (place.head is not None and place.head() in heads)
        ]
        records = [_seen.pop(place) for place in found]
    merged: dict[tuple[str, str, str], Materialised] = {}
    for record in records:  # one line of code can materialise logits of several models
        key = (record.operation, record.line, record.head)
        merged[key] = record.plus(merged.get(key))
    return Report(sorted(merged.values(), key=lambda record: -record.bytes))


def note(z: Any, operation: str, warns: bool = True) -> None:
    """Records that `operation` materialises lazy logits z. Warns once per operation and line.

    A warning is given if the logits are larger than a limit. The default limit is 0 bytes for
    logits of a training forward, and LIMIT for all other logits. LOGITLESS_WARN_BYTES sets the same
    limit for all logits. If `warns` is false, no warning is given.
    """
    size, shape = z.numel() * z.element_size(), tuple(z.shape)
    frame = _caller((*INSIDE, *_libraries()), of_user=True) or _caller(INSIDE)
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"
    module = z.recipe.head.module
    place = Place(operation, line, None if module is None else weakref.ref(module))
    name = "" if module is None else module.__dict__.get(HEAD, "")
    with _lock:
        old = _seen.get(place)
        if old is None and len(_seen) >= PLACES:
            _seen.pop(next(iter(_seen)))
        _seen[place] = Materialised(operation, shape, size, 1, line, name).plus(old)
    limit = _limit(0 if z.recipe.trains else LIMIT)
    if warns and limit is not None and size > limit:
        which = f" The head is {name!r}." if name else ""
        message = (
            f"logits of a fused head are materialised by {operation}, at {line}.{which} The"
            f" materialised logits have the shape {shape} and take {in_units(size)}. {INSTEAD}"
        )
        warn_once(message, f"{operation} at {line}", frame)


def _limit(default: int) -> int | None:
    """The number of bytes above which materialised logits give a warning, or None."""
    text = os.environ.get(VARIABLE, "").strip()
    if text.lower() == "off":
        return None
    if text and not text.isdecimal():
        raise ValueError(
            f"{VARIABLE} must be a number of bytes or 'off', got {text!r}. Set {VARIABLE}=0 to get"
            " a warning for logits of any size."
        )
    return int(text) if text else default


def warn_once(message: str, key: str | None = None, frame: FrameType | None = None) -> None:
    """Warns once per `key`, which is the message by default.

    The warning points at the current line of `frame`. The default of `frame` is the innermost frame
    of the call stack outside of logitless and PyTorch.
    """
    key = key or message
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    frame = frame or _caller(INSIDE) or sys._getframe()
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _caller(inside: tuple[str, ...], of_user: bool = False) -> FrameType | None:
    """The innermost frame whose file name does not begin with a string in `inside`, or None.

    If `of_user` is true, frames of Python's standard library are left out too.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        standard = of_user and file.startswith((PYTHON, "<frozen")) and "-packages" not in file
        if not standard and not file.startswith(inside):
            break
        frame = frame.f_back
    return frame


def _libraries() -> Iterator[str]:
    """Yields the folder or the file of each imported library in LIBRARIES."""
    for name in LIBRARIES:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            yield f"{Path(file).parent}{os.sep}" if hasattr(module, "__path__") else file


def in_units(size: int) -> str:
    """A number of bytes as text, such as "1.5 GiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} bytes"
