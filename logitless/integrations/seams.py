"""What the integrations share: checks of the place where a trainer lets us in, and of the effect.

Both raise RuntimeErrors, because axolotl swallows every ImportError of a plug-in.
"""

import importlib
import inspect
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class NoEffectError(RuntimeError):
    """The first step of a trainer computed plain logits."""


class UnknownTrainerError(RuntimeError):
    """A function of a trainer that an integration relies on is gone, or takes other arguments."""


def check_effect(found: Any, strict: bool = True) -> None:
    """Raises if `found`, the result of `is_fused`, is false; warns instead if not `strict`."""
    if found or os.environ.get("LOGITLESS_FUSE") == "0":
        return
    message = f"logitless has no effect in this run: {found.reason}"
    if strict:
        raise NoEffectError(f"{message} With strict=False, this is a warning.")
    warnings.warn(message, stacklevel=3)


def check_seams(library: str, known: Mapping[str, str]) -> None:
    """Compares functions of a library, as "module:name", with the parameters that we know."""
    for place, expected in known.items():
        module, _, names = place.partition(":")
        try:
            function: Any = importlib.import_module(module)
            for name in names.split("."):
                function = getattr(function, name)
        except ModuleNotFoundError as error:
            if error.name == module.partition(".")[0]:
                raise ModuleNotFoundError(
                    f"This integration needs {library}, which is not installed.", name=error.name
                ) from error
            raise _unknown(library, place, expected, str(error)) from error
        except (ImportError, AttributeError) as error:
            raise _unknown(library, place, expected, str(error)) from error
        if (found := ", ".join(inspect.signature(function).parameters)) != expected:
            raise _unknown(library, place, expected, f"it takes ({found})")


def _unknown(library: str, place: str, expected: str, found: str) -> UnknownTrainerError:
    try:
        installed = version(library)
    except PackageNotFoundError:
        installed = "of an unknown version"
    return UnknownTrainerError(
        f"logitless does not know {library} {installed}: {place} must take ({expected}), but"
        f" {found}. Install a version from the table in docs/trainers.md."
    )
