"""The young JAX names we lean on: fails loudly when an upgrade moves one."""

import jax
import numpy as np

import lowcomm_jax as lc
from lowcomm_jax import compat


def test_all_gather_invariant_is_typed_equal_on_every_device():
    """`out_specs=P()` compiles only when the result is proven equal over the region axis."""
    mesh = lc.make_mesh(region=4, fsdp=2)
    x = np.arange(8, dtype=np.float32)
    gather = jax.shard_map(
        lambda part: compat.all_gather_invariant(part, "region", axis=0),
        mesh=mesh,
        in_specs=jax.P("region"),
        out_specs=jax.P(),
    )
    np.testing.assert_array_equal(jax.jit(gather)(x), x)
