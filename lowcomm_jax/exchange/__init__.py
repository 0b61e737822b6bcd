"""How payloads travel between regions inside one program, and how many bytes that takes.

In: every region's pseudo-gradient of one fragment, the codec, and who takes part. Out: the mean
over the regions that took part, and the bytes announced for it (`Traffic`). `MeshExchange` averages
over all regions, `GroupExchange` over small groups; `entries` takes selected entries (channels),
`shares` moves buffers. Exchanges between separate jobs are in `rounds`; its public names (`store`,
`peers`, errors) resolve here, too.
"""

from __future__ import annotations

import importlib
from typing import Any

from lowcomm_jax.exchange.mesh import (
    InSlices,
    MeshExchange,
    Traffic,
    all_gather,
    in_halves,
    pair,
    two_shot,
)
from lowcomm_jax.exchange.pairs import GroupExchange

# Of rooms above this one: resolved when asked for, so that no import points up.
_BETWEEN_JOBS = {
    "Arrived": "rounds.request",
    "ExchangeContext": "store.context",
    "Lost": "store.errors",
    "Missing": "store.errors",
    "Parted": "store.errors",
    "Rejected": "store.errors",
    "RemoteExchange": "rounds.remote",
    "StoreUnavailable": "store.errors",
    "Superseded": "store.errors",
    "Timing": "store.timing",
    "Transport": "store.transport",
    "Unreadable": "store.errors",
    "peers": "rounds.connect",
    "store": "rounds.connect",
}

__all__ = [
    "GroupExchange",
    "InSlices",
    "MeshExchange",
    "Traffic",
    "all_gather",
    "in_halves",
    "pair",
    "two_shot",
    *_BETWEEN_JOBS,
]


def __getattr__(name: str) -> Any:
    if name not in _BETWEEN_JOBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowcomm_jax.{_BETWEEN_JOBS[name]}"), name)
