"""JAX names that are young or moving: each has one home here and a test that fails on upgrade."""

import jax

__all__ = ["all_gather_invariant", "vary"]


def all_gather_invariant(x: jax.Array, axis_name: str, *, axis: int) -> jax.Array:
    """Gather `x` along `axis_name`; the result is typed equal on every device of that axis."""
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")


def vary(x, axis_name: str):
    """Mark a replicated pytree as varying over `axis_name` (a no-op on the values)."""
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis_name, to="varying"), x)
