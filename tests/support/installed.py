"""Tries an installed logitless: checks which packages are there, and runs README and a smoke test.

    python -m tests.support.installed            after an install without extras
    python -m tests.support.installed teacher    after an install of this extra, or of several

`make release` runs this file outside of the clone, in an environment that has the wheel only.
"""

import importlib
import sys
from importlib.util import find_spec

import torch

import logitless as ll
from tests.support.pages import python_of, small_models

# Modules that the library runs without, and the extras that bring these modules.
OPTIONAL = {
    "rich": {"teacher"},
    "matplotlib": {"teacher"},
    "transformers": {"teacher"},
    "accelerate": {"teacher"},
    "s3fs": {"remote"},
    "gcsfs": {"remote"},
    "pyarrow": {"parquet"},
}


def check_packages(*extras: str) -> None:
    """The environment has the optional modules of the given extras, and no other."""
    for module, brought_by in OPTIONAL.items():
        there = find_spec(module) is not None
        assert there == bool(brought_by & {*extras}), f"{module} with extras {extras}: {there}"


def run_readme() -> int:
    """Runs the Python of README.md, and returns the number of blocks that ran.

    Blocks that need Transformers run only if Transformers is installed.
    """
    names, count = {"__name__": "README.md", "torch": torch, "ll": ll}, 0
    for block in python_of("README.md"):
        if "transformers" not in block or find_spec("transformers") is not None:
            with small_models():
                exec(compile(block, "README.md", "exec"), names)
            count += 1
    return count


def smoke_test() -> None:
    """Compares cross-entropy and its gradients with PyTorch in fp64, over three sources of logits.

    The sources are a tensor, a LinearLogits, and the logits of a fused layer.
    """
    torch.manual_seed(0)
    hidden, target = torch.randn(6, 16, requires_grad=True), torch.randint(50, (6,))
    layer = torch.nn.Linear(16, 50, bias=False)
    leaves = (hidden, layer.weight)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    cross_entropy = torch.nn.functional.cross_entropy
    right = cross_entropy(exact[0] @ exact[1].T, target)
    right_gradients = torch.autograd.grad(right, exact)
    losses = {
        "a tensor": ll.cross_entropy(layer(hidden), target),
        "LinearLogits": ll.cross_entropy(ll.LinearLogits(hidden, layer.weight), target),
        "fuse": cross_entropy(ll.fuse(torch.nn.Sequential(layer), head="0")(hidden), target),
    }
    for name, loss in losses.items():
        gradients = torch.autograd.grad(loss, leaves)
        for ours, theirs in zip((loss, *gradients), (right, *right_gradients), strict=True):
            error = (ours.double() - theirs).abs().max().item()
            assert error < 1e-5, f"cross-entropy over {name} has an error of {error:.0e}"


def check_integrations() -> None:
    """Without its trainer, an integration says what it needs. None is an extra of ours."""
    for name in ("axolotl", "verl", "torchtitan", "swift", "automodel"):
        said = "nothing"
        try:
            importlib.import_module(f"logitless.integrations.{name}")
        except ModuleNotFoundError as error:
            said = str(error)
        assert "This integration needs" in said, f"{name} says {said}"


def check_modules() -> int:
    """Imports every module of the library that needs no extra, and returns their number."""
    names = [*ll.__all__, *(["hf"] if find_spec("transformers") else [])]
    for name in names:
        getattr(ll, name)
    importlib.import_module("logitless.cli")
    return len(names)


def main(*extras: str) -> None:
    check_packages(*extras)
    names, blocks = check_modules(), run_readme()
    check_integrations()
    smoke_test()
    print(f"{ll.__file__}: {names} public names, {blocks} blocks of README and the smoke test work")


if __name__ == "__main__":
    main(*sys.argv[1:])
