"""The environment variables that every call of a loss reads.

os.environ.get takes 60 times as long as a lookup in the dictionary inside os.environ, because
os.environ encodes the name and raises two exceptions for a variable that is not set. A call looks
up `CHECK` and `IMPL` in `variables`, and reads os.environ only for a variable that is set.
"""

import os

variables: dict = os.environ._data  # pyright: ignore[reportAttributeAccessIssue]
CHECK = os.environ.encodekey("LOGITLESS_CHECK")
IMPL = os.environ.encodekey("LOGITLESS_IMPL")
