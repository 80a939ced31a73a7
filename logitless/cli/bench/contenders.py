"""Which cases there are, and who takes part in them.

A family of cases is a module with `cases(device, quick)`, `at(device, shape, dtype)`, `inputs`, and
its contenders: `ours()`, `EAGER_OPS` (PyTorch's), and `RIVALS`, for each library the module to
import and a function that finds its ops there. What a library doesn't have, it sits out.
torch.compile compiles what PyTorch runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module, metadata

import torch

import logitless as ll

from . import heads, logits, teachers
from .cases import COMPILED, EAGER, OURS, Case, Mode, parse_shape

FAMILIES = {"logits": logits, "teachers": teachers, "heads": heads}
RIVALS = dict.fromkeys(name for family in FAMILIES.values() for name in family.RIVALS)
NAMES = (OURS, EAGER, COMPILED, *RIVALS)
Loaded = dict[tuple[str, str], dict[str, Callable]]  # ops by name, by family and contender


def choose(
    device: str, *, quick=False, families=None, ops=None, shapes=None, dtypes=None
) -> tuple[list[Case], list[str]]:
    """The cases that are asked for, and a line for each that this library cannot run."""
    found: dict[str, Case] = {}
    for name in families or FAMILIES:
        if shapes:
            kinds = dtypes or ["fp32" if device == "cpu" else "bf16"]
            places = [(parse_shape(shape), kind) for shape in shapes for kind in kinds]
            cases = [case for place in places for case in FAMILIES[name].at(device, *place)]
        else:
            cases = FAMILIES[name].cases(device, quick)
        for case in cases:
            if (not ops or case.op in ops) and (not dtypes or case.dtype in dtypes):
                case = replace(case, compiled=case.compiled and not quick)
                # Families share a case or two: the first stays.
                found.setdefault(case.name, case.for_cpu() if device == "cpu" else case)
    if not found:
        raise ValueError("no case has this family, op, shape and dtype.")
    missing = [c for c in found.values() if c.needs and not hasattr(ll, c.needs)]
    skipped = [f"skipped: {c.name}: this logitless has no {c.needs}" for c in missing]
    return [case for case in found.values() if case not in missing], skipped


def load(names: Iterable[str], device: str) -> tuple[Loaded, dict[str, str]]:
    """The ops of each contender that can run here, and for each a version or a reason not to."""
    loaded, standing = {}, {}
    for name in names:
        for family, module in FAMILIES.items():
            if name == OURS:
                loaded[family, name], standing[name] = module.ours(), ll.__version__
            elif name in (EAGER, COMPILED):
                loaded[family, name], standing[name] = module.EAGER_OPS, torch.__version__
            elif name in module.RIVALS and device == "cpu":
                standing[name] = "absent: needs a GPU"
            elif name in module.RIVALS:
                path, find_ops = module.RIVALS[name]
                try:
                    loaded[family, name] = find_ops(import_module(path))
                    standing[name] = version(path)
                except Exception as error:  # a rival may fail to import in its own way
                    standing[name] = f"absent: {short(error)}"
    return loaded, standing


def taking_part(case: Case, loaded: Loaded) -> dict[str, Callable]:
    """What each contender calls for this case."""
    keys = (f"{case.op} in place",) if case.mode == Mode.INPLACE else (case.work, case.op)
    found = {}
    for (family, name), ops in loaded.items():
        invited = name == OURS or not (case.alone or (name == COMPILED and not case.compiled))
        op = next((ops[key] for key in keys if key in ops), None)
        if family == case.family and invited and op is not None:
            found[name] = torch.compile(op, dynamic=False) if name == COMPILED else op
    return found


def version(path: str) -> str:
    """Of the package that a module comes from."""
    top = path.split(".")[0]
    known = getattr(import_module(top), "__version__", None)
    packages = metadata.packages_distributions().get(top, ())
    return known or next((metadata.version(package) for package in packages), "version unknown")


def short(error: BaseException) -> str:
    """An exception in one line of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:120]
