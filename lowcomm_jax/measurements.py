"""What regions measure for the schedule: taken at a send, reduced at the landing.

The numbers of every region travel in its payloads' headers, so that all regions see the same ones
and decide alike.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from lowcomm_jax.processes import place, team
from lowcomm_jax.programs import Programs
from lowcomm_jax.regions import REGION
from lowcomm_jax.state import InFlight, TrainState
from lowcomm_jax.stopwatch import Stopwatch


class Measurements:
    """Measures what the schedule of one engine asks for; nothing where it asks for nothing."""

    def __init__(self, programs: Programs):
        self.programs = programs
        self.schedule = programs.method.schedule
        self.count = programs.recipe.regions.count
        cut = programs.fragments
        self._rows = [cut.rows(p) for p in range(len(cut))]
        self._names = tuple(tuple(cut.like(p)) for p in range(len(cut)))
        self._numel = np.array([cut.numel(p) for p in range(len(cut))])
        self._stopwatch = Stopwatch()
        self._region = programs.recipe.regions.sharding(REGION)

    def starts(self) -> None:
        """Inner steps are about to be dispatched."""
        if self.schedule.measured:
            self._stopwatch.starts()

    def computed(self, state: TrainState, steps: int) -> None:
        """`steps` inner steps have been dispatched since the last call of `starts`."""
        if self.schedule.measured:
            self._stopwatch.computed(state.inner.step, steps)

    def synchronised(self, state: TrainState, events: int) -> None:
        """A step's sends and landings have been dispatched."""
        if self.schedule.measured:
            self._stopwatch.synchronised(state.inner.params, events)

    def header(self, state: TrainState, step: int) -> dict[str, Any]:
        """What every region sends along with a payload, float32 `[R, n]` by name."""
        header: dict[str, Any] = {}
        if self.schedule.statistic == "drift":
            age = np.maximum(1, step - np.maximum(0, state.clock.last_sent))
            scale = (1 / (age * self._numel)).astype(np.float32)
            header["drift"] = self.programs.drift(
                state.inner.params, state.anchor, self._rows, scale, names_K=self._names
            )
        if self.schedule.measured:
            seconds = team().told("seconds", lambda: self._stopwatch.seconds(self.count))
            # On the mesh like everything in flight, so that a checkpoint can tell where it lies.
            header["seconds"] = place(seconds, self._region)
        return header

    def landed(self, state: TrainState, flight: InFlight, values: dict[str, Any]) -> TrainState:
        """Keep what the schedule chooses by; `values` of the landing get the reduced seconds."""
        if "seconds" in flight.header and flight.takes_part.any():
            # The slowest region's.
            values["seconds"] = np.asarray(flight.header["seconds"])[flight.takes_part].max(axis=0)
        if self.schedule.statistic == "drift":
            drift = flight.header["drift"]
            return state.replace(rate=self.programs.mean_header(drift, flight.weight, state.rate))
        if self.schedule.statistic == "rate":
            return self._change_rate(state, flight, values["mean_norm"])
        return state

    def _change_rate(self, state: TrainState, flight: InFlight, mean_norm: jax.Array):
        """||mean Delta_p|| / sqrt(numel_p) / I_p, from reduced data only; nobody's says nothing."""
        p, clock = int(flight.fragment), state.clock
        interval = max(1, int(clock.last_sent[p]) - max(0, int(clock.previous_sent[p])))
        scale = np.float32(1 / (np.sqrt(self._numel[p]) * interval))
        rate = _set_entry(state.rate, np.int32(p), mean_norm[0] * scale, flight.weight)
        return state.replace(rate=rate)


def measured_by(landing_state: Any) -> dict[str, jax.Array]:
    """What a landing rule measured: `correction_ratio` `[R]` of Taylor delay correction."""
    ratio = optax.tree.get(landing_state, "correction_ratio", None)
    return {} if ratio is None else {"correction_ratio": jax.numpy.copy(ratio)}


@jax.jit
def _set_entry(vector: jax.Array, index, value: jax.Array, weight_R: jax.Array) -> jax.Array:
    return jax.numpy.where(weight_R.sum() > 0, vector.at[index].set(value), vector)
