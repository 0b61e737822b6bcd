"""What the end of an exchange brings: everyone's arrays side by side, by region."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from lowcomm_jax.exchange.between import wire
from lowcomm_jax.exchange.between.errors import Rejected
from lowcomm_jax.exchange.between.request import Gathered
from lowcomm_jax.exchange.between.slices import side_by_side
from lowcomm_jax.exchange.between.tally import Tally


@dataclasses.dataclass(frozen=True)
class Arrived:
    """The end of an exchange, the same in every region but for what was measured.

    Attributes:
      participants: bool `[R]`, as the commit record says; False outside the group.
      arrays: `[R, ...]` each; zeros for regions that did not take part.
      reduced: `[parts, ...]`, of payloads that were reduced in slices; `arrays` are then what came
        beside them.
      bytes_sent, bytes_received: payload bytes this region has moved since the last `Arrived`.
      seconds: from our payload being computed to everything being here.
      waited: of these, how long `finish` was blocked.
    """

    participants: np.ndarray
    arrays: dict[str, np.ndarray]
    reduced: dict[str, np.ndarray] | None
    bytes_sent: int
    bytes_received: int
    seconds: float
    waited: float


def nothing(like: dict[str, jax.ShapeDtypeStruct], count: int) -> Arrived:
    """An exchange in which nobody took part."""
    arrays = side_by_side({}, count, wire.shapes_of(like))
    return Arrived(np.zeros(count, bool), arrays, None, 0, 0, 0.0, 0.0)


def arrange(
    gathered: Gathered,
    like: dict[str, jax.ShapeDtypeStruct],
    count: int,
    waited: float,
    tally: Tally,
) -> Arrived:
    """Put the regions' arrays into rows.

    Raises:
      Rejected: a region's payload has other shapes than `like`.
    """
    expected = wire.shapes_of(like)
    for region, own in gathered.arrays.items():
        found = wire.shapes_of(own)
        if found != expected:
            raise Rejected(f"payload of region {region} is {found}, expected {expected}")
    participants = np.zeros(count, bool)
    participants[list(gathered.commit.payloads)] = True
    return Arrived(
        participants=participants,
        arrays=side_by_side(gathered.arrays, count, expected),
        reduced=gathered.reduced,
        bytes_sent=tally.take("sent"),
        bytes_received=tally.take("received"),
        seconds=gathered.seconds,
        waited=waited,
    )
