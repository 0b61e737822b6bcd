"""A region's own parts of eager rules, and empty payloads (`rules.outer.eager`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowcomm_jax.state.train_state import InFlight

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnParts:
    """What eager rules swap in every region: its own part of the mean that lands for a fresh one.

    The fresh part that is added at one boundary is the late part that is subtracted at the next, so
    that differences between anchors do not add up.

    Attributes:
      payload: what was just sent, leaves `[R, ...]`.
      share: float32 `[R]`, of each region in the mean of `payload`; 0 = it adds nothing.
      late: float32 `[R]`, of each region in the mean that lands; 0 = it subtracts nothing.
    """

    payload: PyTree
    share: jax.Array
    late: jax.Array


def own_parts(arrived: InFlight, fresh: InFlight | None, applied: bool) -> OwnParts:
    """The own parts where a payload lands; `applied`: as in `schedule.base.Move`."""
    late = arrived if applied else emptied(arrived)
    new = emptied(arrived) if fresh is None else fresh
    return OwnParts(new.payload, _shares(new.weight), _shares(late.weight))


@jax.jit
def _shares(weight_R: jax.Array) -> jax.Array:
    """Share of each region in the mean; zeros when nobody is in it."""
    total = jnp.sum(weight_R)
    return jnp.where(total > 0, weight_R / jnp.where(total > 0, total, 1.0), 0.0)


def emptied(flight: InFlight) -> InFlight:
    """An empty payload: with all weights 0 its mean is 0."""
    return dataclasses.replace(flight, weight=jnp.zeros_like(flight.weight))
