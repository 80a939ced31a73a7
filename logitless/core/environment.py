"""The environment variables that every call reads.

os.environ encodes a name and raises two exceptions if it is not set. A lookup in the dictionary
inside of it, `variables`, is 60 times as fast; os.environ itself is read only for a set variable.
"""

import os
from typing import Any

variables: Any = getattr(os.environ, "_data", os.environ)


def _key(name: str) -> Any:
    return name if variables is os.environ else os.environ.encodekey(name)


CHECK = _key("LOGITLESS_CHECK")
IMPL = _key("LOGITLESS_IMPL")
