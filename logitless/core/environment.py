"""The environment variables that every call of a loss reads.

os.environ.get is slow for a variable that is not set, because os.environ encodes the name and
raises two exceptions. A lookup in `variables`, the dictionary inside os.environ, is 60 times as
fast as os.environ.get. So a call looks up `CHECK` and `IMPL` in `variables`, and reads os.environ
only for a variable that is set.
"""

import os
from typing import Any

variables: Any = getattr(os.environ, "_data", os.environ)


def _key(name: str) -> Any:
    return name if variables is os.environ else os.environ.encodekey(name)


CHECK = _key("LOGITLESS_CHECK")
IMPL = _key("LOGITLESS_IMPL")
