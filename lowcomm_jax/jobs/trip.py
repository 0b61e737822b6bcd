"""A payload on its way between jobs, and what comes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from lowcomm_jax.jobs.slicing import Slicing, named
from lowcomm_jax.state import InFlight

PyTree = Any
HEADER, ANCHOR = "header", "anchor"


@dataclasses.dataclass
class Trip:
    """A payload under way.

    Attributes:
      name: under which the jobs exchange it; terms: on which (`exchange.start`).
      members: the regions that do, ascending.
      like: shapes and dtypes of what comes of each region, by name.
      silent: this region only listens.
      slicing: how payloads are reduced in slices; None = everyone gets those of all.
    """

    name: str
    terms: dict[str, Any]
    members: tuple[int, ...]
    like: dict[str, jax.ShapeDtypeStruct]
    silent: bool
    slicing: Slicing | None


def decided(flight: InFlight) -> dict[str, int]:
    """What the schedule has decided of a payload."""
    what = {"step": flight.sent, "fragment": flight.fragment, "level": flight.level}
    return {name: int(x) for name, x in what.items()}


def everyones(payload: PyTree, rows: dict[str, np.ndarray]) -> PyTree:
    """A payload with a row for every member, `[N, ...]`."""
    return jax.tree.structure(payload).unflatten(rows[name] for name in named(payload))


def counted(
    flight: InFlight, payload: PyTree, rows: dict[str, np.ndarray], counted_N: np.ndarray
) -> InFlight:
    """The flight as all members' together; those left out have weight 0."""
    return dataclasses.replace(
        flight,
        payload=payload,
        weight=np.where(counted_N, rows["weight"], np.float32(0)),
        header={name: rows[f"{HEADER}/{name}"] for name in flight.header},
        takes_part=counted_N,
    )
