"""A region's own parts of eager rules, and empty payloads (`rules.outer.eager`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowcomm_jax.state.train_state import InFlight

PyTree = Any


def own_parts(late: InFlight | None, fresh: InFlight | None) -> PyTree:
    """Extra arguments of the eager rule: own fresh and own late part with their shares.

    The fresh part that is added at one boundary is the late part that is subtracted at the next, so
    that differences between anchors do not add up.
    """
    some = late if fresh is None else fresh
    nothing = (some.payload, jnp.zeros_like(some.weight))  # a payload of weight 0 counts as 0

    def part(flight):
        return nothing if flight is None else (flight.payload, _shares(flight.weight))

    (own, weight), (own_late, weight_late) = part(fresh), part(late)
    return {"own": own, "own_late": own_late, "weight": weight, "weight_late": weight_late}


@jax.jit
def _shares(weight_R: jax.Array) -> jax.Array:
    """Share of each region in the mean; zeros when nobody is in it."""
    total = jnp.sum(weight_R)
    return jnp.where(total > 0, weight_R / jnp.where(total > 0, total, 1.0), 0.0)


def emptied(flight: InFlight | None) -> InFlight | None:
    """An empty payload: with all weights 0 its mean is 0."""
    if flight is None:
        return None
    return dataclasses.replace(flight, weight=jnp.zeros_like(flight.weight))
