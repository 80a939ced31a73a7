"""Makes Triton's interpreter about twice as fast by removing repeated work."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

# These names of Triton are private. If a version of Triton lacks one of them, nothing is patched.
_patch_lang: Any = getattr(interpreter, "_patch_lang", None)
_np_dtype_of: Any = getattr(interpreter, "_get_np_dtype", None)
_executor: Any = getattr(interpreter, "GridExecutor", None)
_launch: Any = _executor and _executor.__call__
_patched = set()  # names of the modules (tl, tl.core) that the present launch has patched
_np_dtypes: dict[str, np.dtype] = {}  # keys are the names of Triton's dtypes


def _launch_and_patch(self, *args, **kwargs):
    _patched.clear()
    return _launch(self, *args, **kwargs)


def _patch_once(fn):
    modules = {m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core}
    if modules <= _patched:
        return None
    _patched.update(modules)
    return _patch_lang(fn)


def _np_dtype_once(dtype):
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _np_dtype_of(dtype)
    return _np_dtypes[dtype.name]


def make_faster() -> None:
    """Makes each launch patch triton.language only once, and caches dtypes.

    Without this change, Triton searches and patches all of triton.language at every call of a
    device function, although the launch has patched triton.language before.
    """
    if not (_patch_lang and _np_dtype_of and _launch):
        return
    _executor.__call__ = _launch_and_patch
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _np_dtype_once
