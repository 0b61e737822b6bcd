"""Measurements for the schedule: taken by each region at a send, reduced at the landing.

The numbers of every region travel in its payloads' headers, so that all regions get the same ones
and decide alike.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from lowcomm_jax.history import readable
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.round_programs import RoundPrograms


class Measurements:
    """Takes the measurements that the schedule of one engine reads."""

    def __init__(self, programs: RoundPrograms):
        self.programs = programs
        self.schedule = programs.method.schedule
        self.count = programs.regions.count
        cut = programs.fragments
        self._rows = [cut.rows(p) for p in range(len(cut))]
        self._names = tuple(tuple(cut.like(p)) for p in range(len(cut)))
        self._numel = np.array([cut.numel(p) for p in range(len(cut))])
        self._stopwatch = Stopwatch()
        self._region = programs.regions.sharding(REGION)

    def starts(self) -> None:
        """Call before inner steps are dispatched."""
        if self.schedule.measured:
            self._stopwatch.starts()

    def computed(self, state: TrainState, steps: int) -> None:
        """Call after `steps` inner steps were dispatched, since the last call of `starts`."""
        if self.schedule.measured:
            self._stopwatch.computed(state.inner.step, steps)

    def synchronised(self, state: TrainState, events: int) -> None:
        """Call after a step's sends and landings were dispatched."""
        if self.schedule.measured:
            self._stopwatch.synchronised(state.inner.params, events)

    def header(self, state: TrainState, step: int) -> dict[str, Any]:
        """Header of a payload that leaves now, float32 `[R, n]` by name."""
        header: dict[str, Any] = {}
        if self.schedule.statistic == "drift":
            age = np.maximum(1, step - np.maximum(0, state.counters.last_sent))
            scale = (1 / (age * self._numel)).astype(np.float32)
            header["drift"] = self.programs.drift_program(
                state.inner.params,
                state.anchor,
                state.inner.rounding,
                self._rows,
                scale,
                names_K=self._names,
            )
        if self.schedule.measured:
            seconds = leader().broadcast_from_leader(
                "seconds", lambda: self._stopwatch.seconds(self.count)
            )
            # On the mesh like everything in flight, so that a checkpoint can tell where it lies.
            header["seconds"] = place(seconds, self._region)
        return header

    def landed(self, state: TrainState, flight: InFlight, values: dict[str, Any]) -> TrainState:
        """Store the statistic that the schedule reads; puts reduced seconds into `values`."""
        if "seconds" in flight.header and flight.takes_part.any():
            # The slowest region's.
            seconds_R = np.asarray(readable(flight.header["seconds"]))
            values["seconds"] = seconds_R[flight.takes_part].max(axis=0)
        if self.schedule.statistic == "drift":
            drift = flight.header["drift"]
            return state.replace(
                rate=self.programs.header_program(drift, flight.weight, state.rate)
            )
        if self.schedule.statistic == "rate":
            return self._change_rate(state, flight, values["mean_norm"])
        return state

    def _change_rate(self, state: TrainState, flight: InFlight, mean_norm: jax.Array):
        """||mean Delta_p|| / sqrt(numel_p) / I_p, of reduced data; unchanged if nobody counted."""
        p, counters = int(flight.fragment), state.counters
        interval = max(1, int(counters.last_sent[p]) - max(0, int(counters.previous_sent[p])))
        scale = np.float32(1 / (np.sqrt(self._numel[p]) * interval))
        rate = _set_entry(state.rate, np.int32(p), mean_norm[0] * scale, flight.weight)
        return state.replace(rate=rate)


def make_measurements(programs: RoundPrograms) -> Measurements | None:
    """The measurements of an engine; None where its schedule reads none."""
    schedule = programs.method.schedule
    return Measurements(programs) if schedule.measured or schedule.statistic != "none" else None


@jax.jit
def _set_entry(vector: jax.Array, index, value: jax.Array, weight_R: jax.Array) -> jax.Array:
    return jax.numpy.where(weight_R.sum() > 0, vector.at[index].set(value), vector)


class Stopwatch:
    """Keeps the newest T_c (seconds per inner step) and T_s (seconds per sync).

    Measuring waits for the device at every event, and is done only for schedules that need it. In
    one process the sends and landings run on the device that computes: T_s is then their time on
    that device, without a link.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._step_seconds: float | None = None
        self._sync_seconds: float | None = None

    def starts(self) -> None:
        """Note that inner steps begin: time since the last ones (evaluating, saving) is left out.

        The very first steps are not timed, since they compile.
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
        """Note that a step's sends and landings are done; two of them count as a sync."""
        jax.block_until_ready(waits_for)
        now = time.perf_counter()
        if events and self._since is not None:
            self._sync_seconds = 2 * (now - self._since) / events
        self._since = now

    def seconds(self, regions: int) -> np.ndarray:
        """float32 `[R, 2]`, (T_c, T_s); NaN for what has not been measured yet."""
        newest = [np.nan if x is None else x for x in (self._step_seconds, self._sync_seconds)]
        return np.tile(np.float32(newest), (regions, 1))
