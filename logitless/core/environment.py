"""The environment variables that every call of a loss reads.

os.environ.get takes 60 times as long as a lookup in the dictionary inside os.environ, because
os.environ encodes the name and raises two exceptions for a variable that is not set. So a call
looks up `CHECK` and `IMPL` in `variables`, and reads os.environ only for a variable that is set.
"""

import os
from typing import Any

variables: Any = getattr(os.environ, "_data", os.environ)


def _key(name: str) -> Any:
    return name if variables is os.environ else os.environ.encodekey(name)


CHECK = _key("LOGITLESS_CHECK")
IMPL = _key("LOGITLESS_IMPL")
