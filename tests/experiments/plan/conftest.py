"""Plans are tested under the strict promotion that all tests outside of training have."""

import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    """Switch off what `tests/experiments/conftest.py` does for training."""
