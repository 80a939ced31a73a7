"""A store of a few documents."""

import pytest

from tests.support import stores
from tests.support.stores import LENGTHS, documents


@pytest.fixture
def some(tmp_path):
    found = documents(*LENGTHS)
    return found, stores.write(tmp_path / "store", found)
