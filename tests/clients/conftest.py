"""Tests that need the packages of requirements/clients.txt; `make test` leaves them out."""

import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

# The folder with the tests of Transformers' release, which `make test-clients` unpacks.
TESTS = os.environ.get("LOGITLESS_CLIENTS")
collect_ignore_glob = [] if TESTS else ["test_*.py"]


MARKS = (
    "accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test",
    "is_training_test", "order", "slow", "torch_compile_test",
)  # fmt: skip


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: a mark of Transformers' tests")


class Nothing:
    """In place of a mixin that the release's archive lacks."""


def as_package(name: str, folder: Path) -> None:
    """Makes the tests of Transformers a package, whose missing parts have no tests."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
    for part, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        path = folder.joinpath(*part.split("."))
        if not path.with_suffix(".py").exists():
            outer = f"{name}.{part.split('.')[0]}"
            sys.modules[outer] = types.ModuleType(outer)
            sys.modules[f"{name}.{part}"] = module = types.ModuleType(f"{name}.{part}")
            setattr(module, mixin, Nothing)


if TESTS:
    as_package("transformers_tests", Path(TESTS))
