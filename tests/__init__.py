"""One folder per room of the package; what several rooms share is in support/."""

import pytest

pytest.register_assert_rewrite("tests.support", "tests.differential")  # before they are imported
