"""Seconds of an inner step and of a synchronisation, as this process measures them.

Measuring waits for the device at every event, so it is done only for schedules that ask for it.
In one process the sends and landings run on the device that computes, so T_s is what they cost
there; no link lies in between.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np


class Stopwatch:
    """Keeps the newest T_c (seconds per inner step) and T_s (seconds per sync)."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._step_seconds: float | None = None
        self._sync_seconds: float | None = None

    def starts(self) -> None:
        """Inner steps begin: what the host did since the last one (evaluating, saving) is none.

        The very first ones are not timed, since they compile.
        """
        if self._since is not None:
            self._since = time.perf_counter()

    def computed(self, waits_for: Any, steps: int) -> None:
        """Note that `steps` inner steps have run since they began."""
        jax.block_until_ready(waits_for)
        now = time.perf_counter()
        if self._since is not None:
            self._step_seconds = (now - self._since) / steps
        self._since = now

    def synchronised(self, waits_for: Any, events: int) -> None:
        """Note that a step's sends and landings, two of which make a sync, are done."""
        jax.block_until_ready(waits_for)
        now = time.perf_counter()
        if events and self._since is not None:
            self._sync_seconds = 2 * (now - self._since) / events
        self._since = now

    def seconds(self, regions: int) -> np.ndarray:
        """float32 `[R, 2]`, (T_c, T_s); NaN for what has not been measured yet."""
        newest = [np.nan if x is None else x for x in (self._step_seconds, self._sync_seconds)]
        return np.tile(np.float32(newest), (regions, 1))
