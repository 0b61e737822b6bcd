"""A payload's arrays as they travel between jobs, and as those of all who sent together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.rounds.slicing import named
from lowcomm_jax.state.train_state import InFlight

PyTree = Any

HEADER = "header"


def arrays_that_travel(flight: InFlight) -> dict[str, Any]:
    """The arrays of a payload that travel, `[1, ...]` by name."""
    return named(flight.payload) | arrays_beside(flight)


def arrays_beside(flight: InFlight) -> dict[str, Any]:
    """Those beside the pseudo-gradient: headers, and the weight."""
    headers = {f"{HEADER}/{name}": x for name, x in flight.header.items()}
    return headers | {"weight": flight.weight}


def arrays_to_send(flight: InFlight) -> dict[str, Any]:
    """The arrays of a payload that travel, `[1, ...]` by name, whole in this process."""
    return {name: whole(x) for name, x in arrays_that_travel(flight).items()}


def everyones(payload: PyTree, rows: dict[str, np.ndarray]) -> PyTree:
    """A payload with a row for every member, `[N, ...]`."""
    return jax.tree.structure(payload).unflatten(rows[name] for name in named(payload))


def with_everyones_rows(
    flight: InFlight, payload: PyTree, rows: dict[str, np.ndarray], counted_N: np.ndarray
) -> InFlight:
    """The flight as all members' together; those left out have weight 0."""
    return dataclasses.replace(
        flight,
        payload=payload,
        weight=np.where(counted_N, rows["weight"], np.float32(0)),
        header={k.removeprefix(f"{HEADER}/"): x for k, x in rows.items() if k.startswith(HEADER)},
        takes_part=counted_N,
    )


def nobodys_flight(p: int, step: int) -> InFlight:
    """A payload of fragment p in flight to which this region adds nothing, `[1, ...]`."""
    return InFlight(
        payload=None,
        snapshot=None,
        accepted=np.ones(1, bool),
        weight=np.zeros(1, np.float32),
        fragment=np.int64(p),
        sent=np.int64(step),
        due=np.full(1, step, np.int64),
        takes_part=np.zeros(1, bool),
        anchor_updated=np.bool_(False),
        level=np.int64(0),
        header={},
    )
