"""The public names of the package."""

import subprocess
import sys

import logitless as ll


def test_dir_lists_the_public_names_alone():
    """NEWCOMER (f): completion offers store and hf, and no helpers."""
    names = {name for name in dir(ll) if not name.startswith("__")}
    assert names == {*ll.__all__, "hf"}


def test_hf_without_transformers_names_the_extra():
    """NEWCOMER (f)."""
    code = "import sys; sys.modules['transformers'] = None; import logitless as ll; ll.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "'logitless[teacher]'" in done.stderr
