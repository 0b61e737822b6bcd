"""Checkpoint tests drive the engine with user code, which promotes dtypes (optax.adamw)."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
