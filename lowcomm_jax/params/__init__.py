"""A user's parameter pytree: named leaves with roles, cut into fragments, laid out on devices.

In: any pytree of arrays. Out: a `Layout` (leaf names, which leaves are trained), `Fragments` (a
static cut of the trained leaves, one of which travels at a time), and shardings of parameters and
optimizer state.
"""

from lowcomm_jax.params.fragments import Fragments, partition
from lowcomm_jax.params.layout import Layout, make_layout
from lowcomm_jax.params.sharding import fsdp_specs, leaf_shardings, optimizer_shardings

__all__ = [
    "Fragments",
    "Layout",
    "fsdp_specs",
    "leaf_shardings",
    "make_layout",
    "optimizer_shardings",
    "partition",
]
