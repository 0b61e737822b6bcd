"""Optax promotes dtypes (bias correction counts in integers)."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
