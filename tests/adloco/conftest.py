"""These tests run user code: losses and Optax optimizers, which promote dtypes (optax.adamw)."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
