"""The tests of a GPU run without one too, at small sizes."""

import ast
from pathlib import Path


def test_tests_of_a_gpu_call_what_there_is():
    """A GPU test passed an argument that `measure` no longer had: nobody had run it.

    Without a GPU those tests run at small sizes; the few that cannot are marked with the reason.
    """
    here = Path(__file__).parent
    assert "skip" not in (here / "conftest.py").read_text()
    for path in sorted(here.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        tests = [f for f in tree.body if isinstance(f, ast.FunctionDef) and "test_" in f.name]
        marked = [f for f in tests if any("mark.gpu" in ast.unparse(d) for d in f.decorator_list)]
        assert len(marked) < len(tests), f"{path.name} runs nowhere but on a GPU"
