"""Tests with Inductor, which takes seconds per graph."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
# Vector instructions and precompiled headers would take most of a test's time.
QUICK = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
