"""When a run of jobs began: the origin of the times in scripts of faults.

The origin is the moment at which all regions first met. The first region past it writes it to the
rendezvous, and every region writes it to the header of its log, so that it survives restarts and
interruptions. The clocks of the hosts must agree as closely as the faults need.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from experiments.workdir import METRICS
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.errors import StoreUnavailable

_POLL_SECONDS = 0.1


def agreed(exchange: RemoteExchange, workdir: Path) -> float:
    """Unix time at which the run began, seconds; all regions have met."""
    proposal = {"nanoseconds": round(1e9 * (noted(workdir) or time.time()))}
    while True:
        try:
            return exchange.agree("began", proposal)["nanoseconds"] / 1e9
        except StoreUnavailable:
            time.sleep(_POLL_SECONDS)


def noted(workdir: Path) -> float | None:
    """The same from a region's log, if it has one that says."""
    path = workdir / METRICS
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    return json.loads(first).get("began") if first.endswith("\n") else None
