r"""Data parallel training (AllReduce): gradients are averaged over all regions at every step.

.. math::  \theta \leftarrow \theta + \mathrm{inner}\Big(\tfrac1R \sum_r g_r\Big)

The baseline: the bytes that other methods save are counted against it.

An absent region keeps its old parameters. When it takes part again, it computes its gradient at the
anchor, like everyone else, and adopts the result: no stale gradient enters the mean. Non-trainable
leaves are its own old ones in that step.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.schedule import Staggered


@published(law="data_parallel")
def ddp(codec: Any = None, inner_batching: Any = None) -> Method:
    """Exchange gradients at every step; the inner optimizer steps on their mean.

    Args:
      codec: wire codec of the gradients; None = dense fp32.
      inner_batching: as in `diloco`.
    """
    return Method(
        name="ddp",
        schedule=Staggered(period=1),
        outer=None,
        codec=codec,
        inner_batching=inner_batching,
        signal="gradient",
    )
