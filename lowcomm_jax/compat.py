"""JAX names that are young or moving: each has one home here and a test that fails on upgrade."""

import jax

__all__ = ["all_gather_invariant"]


def all_gather_invariant(x: jax.Array, axis_name: str | tuple[str, ...], *, axis: int) -> jax.Array:
    """Gather `x` along `axis_name`; the result is typed equal on every device of that axis."""
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")
