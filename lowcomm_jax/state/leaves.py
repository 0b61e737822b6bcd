"""The names of the training state's arrays.

`state_leaves` gives the whole state as a flat dict `name -> array`, `flight_records` a JSON record
of each payload in flight. Names are paths in `TrainState`, such as `inner/opt/0/mu/a` or
`in_flight/1@8/payload/b`.
With several trainers all names start with the trainer's, `trainer_<i>/inner/params/a`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.state.train_state import TrainState

PyTree = Any
Named = dict[str, Any]

# Axis along which the leaves under a prefix are stacked over regions; None: no region axis.
# `anchor` and `outer` carry an axis of their own, 1 or R long. `in_flight` holds stacked arrays,
# its counters travel in the JSON record.
REGION_AXIS: dict[str, int | None] = {
    "inner": 0,
    "frozen": None,
    "anchor": None,
    "received": 0,
    "outer": None,
    "codec": 0,
    "landing": 0,
    "rate": None,
    "merge": None,
    "servers": None,
    "in_flight": 0,
    "channels": 0,
    "counters": None,
    "counters/last_landed": 1,
    "counters/staleness": 1,
    "counters/bytes_sent": 0,
    "counters/bytes_received": 0,
}
ANCHORED = ("anchor", "outer")
_TRAINER = re.compile(r"trainer_\d+/")
FLIGHT_ARRAYS = ("payload", "snapshot", "accepted", "weight", "header", "kept")


def trainer_prefix(number: int | str) -> str:
    """The start of the names of a trainer's arrays, `trainer_<i>/`."""
    return f"trainer_{number}/"


def own_name(name: str) -> str:
    """The name without its trainer's prefix, if it has one."""
    match = _TRAINER.match(name)
    return name[match.end() :] if match else name


def field_of(name: str) -> str:
    """The field in an array's name: `inner` for `inner/params/a`, of any trainer."""
    return own_name(name).partition("/")[0]


def region_axis(name: str) -> int | None:
    """Region axis of a leaf of the whole state."""
    own = own_name(name)
    return REGION_AXIS[own] if own in REGION_AXIS else REGION_AXIS[field_of(own)]


def region_count(state: TrainState) -> int:
    """Number of regions R of a state."""
    return state.inner.step.shape[0]


def named_leaves(prefix: str, tree: PyTree) -> Named:
    """Leaves of `tree` by path.

    Raises:
      ValueError: two leaves share a name (`{"a/b": x, "a": {"b": y}}`).
    """
    named: Named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = f"{prefix}/{path_name(path)}" if path else prefix
        if name in named:
            raise ValueError(f"two leaves are called {name!r}: rename one of them")
        named[name] = leaf
    return named


def state_leaves(state: TrainState) -> Named:
    """All arrays of the state by name; the scalars of `in_flight` are in `flight_records`."""
    named: Named = {}
    for field in dataclasses.fields(state):
        if field.name not in ("layout", "in_flight"):
            named |= named_leaves(field.name, getattr(state, field.name))
    for key, flight in state.in_flight.items():
        for part in FLIGHT_ARRAYS:
            named |= named_leaves(f"in_flight/{key}/{part}", getattr(flight, part))
    return named


def flight_records(state: TrainState) -> list[dict]:
    """A checkpoint's record of each payload in flight, in send order, as JSON values."""
    return [
        {
            "key": key,
            "fragment": int(flight.fragment),
            "sent": int(flight.sent),
            "due": np.asarray(flight.due).tolist(),
            "takes_part": np.asarray(flight.takes_part).tolist(),
            "moved": bool(flight.anchor_updated),
            "level": int(flight.level),
            "header": {name: x.shape[1] for name, x in flight.header.items()},
            "payload": flight.payload is not None,
            "snapshot": flight.snapshot is not None,
            "kept": flight.kept is not None,
            "specs": {
                name: _spec(leaf)
                for part in FLIGHT_ARRAYS
                for name, leaf in named_leaves(part, getattr(flight, part)).items()
            },
        }
        for key, flight in state.in_flight.items()
    ]


def _spec(leaf: Any) -> list:
    """Mesh axes of every dimension; replicated when the array lies on no named mesh."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]
