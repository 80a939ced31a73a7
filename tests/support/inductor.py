"""Tests with Inductor, which takes seconds per graph."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
# Vector instructions take most of a test's time. PyTorch hashes its headers with openssl.
QUICK = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": bool(shutil.which("openssl"))}
