"""When a run of jobs began: the time that faults by time count from.

It is when all regions first met: the first of them to go on from there says so in the rendezvous,
and all note it in the header of their logs, so that it stays through restarts and interruptions.
The clocks of all hosts must agree about as well as the faults are to.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from experiments.workdir import METRICS
from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.runtime.errors import StoreUnavailable

_POLL_SECONDS = 0.1


def agreed(exchange: JobExchange, workdir: Path) -> float:
    """Unix time at which the run began, seconds; all regions have met."""
    proposal = {"time": noted(workdir) or time.time()}
    while True:
        try:
            return exchange.agree("began", proposal)["time"]
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
