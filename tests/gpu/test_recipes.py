"""The recipe with Liger's layers runs. Liger's kernels need a GPU."""

import pytest

from tests.support.pages import run

pytestmark = pytest.mark.gpu("Liger's kernels")


def test_liger(tmp_path, monkeypatch):
    for package in ("transformers", "liger_kernel"):
        pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.chdir(tmp_path)
    ((_, names),) = run("docs/recipes/liger.md")
    gradients = [p.grad for p in names["model"].parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
