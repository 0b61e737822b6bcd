"""Payloads that a channel has sent and not landed yet (`lowcomm_jax.channels`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What regions keep of the values that they sent, where a landing rule reads it.

    Attributes:
      values: before the codec, fp32 leaves `[R, slots, ...]`.
      filled: bool `[R, slots, N]`, which places of the payload hold an entry, the same in all
        regions; None where leaves travel as they are.
      accepted: bool `[R, slots]`, whose contribution counts. Others land on the mean itself.
    """

    values: PyTree
    filled: jax.Array | None
    accepted: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ChannelFlights:
    """Payloads in flight of one channel with a delay, in its slots (`Channel.slot`).

    Attributes:
      payload: encoded values, leaves `[R, slots, ...]`.
      weight: float32 `[R, slots]`, weight of each region in the mean; 0 for those not accepted.
      kept: of the values sent; None without a landing rule.
      takes_part: bool `[R, slots]`, regions that took part in the send and still wait for the
        landing; on the host (NumPy).
    """

    payload: PyTree
    weight: jax.Array
    kept: Kept | None
    takes_part: np.ndarray

    @property
    def on_devices(self) -> tuple[PyTree, jax.Array, Kept | None]:
        """What the program of the inner steps takes and replaces."""
        return self.payload, self.weight, self.kept

    def left_by(self, regions_R: np.ndarray) -> ChannelFlights:
        """The same payloads; these regions no longer wait for them."""
        waits = self.takes_part & ~np.asarray(regions_R, bool)[:, None]
        return dataclasses.replace(self, takes_part=waits)


def left_by(
    channels: dict[str, ChannelFlights], regions_R: np.ndarray
) -> dict[str, ChannelFlights]:
    """`ChannelFlights.left_by` of every channel."""
    return {name: flights.left_by(regions_R) for name, flights in channels.items()}
