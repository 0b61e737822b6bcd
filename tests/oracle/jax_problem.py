"""The same loss as problem.py as a JAX function, for tests that drive the engine."""

import jax
import jax.numpy as jnp


def loss_fn(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
    """Return 0.5 * mean((x @ flat - y)^2) for batch {"x": [B, d], "y": [B]}; `rng` is unused."""
    del rng
    flat = jnp.concatenate([jnp.ravel(params[key]) for key in sorted(params)])
    residual = batch["x"] @ flat - batch["y"]
    return 0.5 * jnp.mean(residual * residual)
