"""`ArrivalJobLoop`: asynchronous methods where every region is a job; the records are the server.

Each round is one arrival. A region that has made its steps sends its pseudo-gradient, measured
against the anchor as it received it, to the next round. The first record that is written for the
round decides whose arrival it is. So all regions apply the same arrivals in the same order, and
every one of them holds the server's state: the anchor and the outer state. Nobody waits for another
region; who has arrived stands still until its arrival has a number, and adopts the anchor there.

A report that came second goes to the next round. One that has no round before the run's last one is
taken back, and its steps travel with the last synchronisation.

Differs from one mesh (`schedule.arrivals`): real arrivals take the place of ticks, and no two of
them are at the same tick. The declared speeds decide only after how many steps a region arrives.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.runtime.job_carrier import JobCarrier
from lowcomm_jax.runtime.request import Arrived
from lowcomm_jax.runtime.round_job_loop import RoundJobLoop
from lowcomm_jax.schedule import Admission
from lowcomm_jax.schedule.base import Send
from lowcomm_jax.state.train_state import InFlight, TrainState, flight_key, with_inner, without
from lowcomm_jax.sync.round_programs import RoundPrograms


class ArrivalJobLoop(RoundJobLoop):
    """`RoundJobLoop` for `schedule.Arrivals`.

    A region that comes back takes what it would be given after an arrival, with inner moments of
    its own.
    """

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray, carrier: JobCarrier):
        super().__init__(programs, weights, carrier)
        delivery = carrier.delivery
        self._nbytes = programs.exchange.at(0).nbytes(self._like[0])
        delivery.whole = True  # each moves the anchor by itself, also in the last synchronisation
        self._steps = self.schedule.local_steps()[delivery.region]
        # When this region last arrived, on its clock, and the number of that arrival.
        self._arrived_s, self._number = 0.0, -1

    def admission(self) -> tuple[Admission, int]:
        return Admission(quorum=1, grace=0.0), 1

    # -- landings -------------------------------------------------------------------------------

    def land_round(
        self, state: TrainState, reported, arrived: Arrived, now: int, events: list[Event]
    ) -> TrainState:
        """Move the anchor by an arrival; whose it is adopts the anchor."""
        counters = state.counters.copy()
        ours = reported is not None and self.rounds.names_ours(self.landed)
        if ours:
            key, flight = reported
            self._number = self.landed
            state = state.replace(in_flight=without(state.in_flight, key))
        else:
            key, flight = flight_key(0, now), self.spectator(0, now)
            counters.sends[0] += 1
            counters.bytes_received += self._nbytes
        state = state.replace(counters=counters)
        state, values = self.update_anchor(state, self.all_payloads(flight, arrived))
        adopts, since = np.array([ours]), max(0, int(counters.last_landed[0, 0]))
        if ours:
            state = self.adopt(state, 0, flight, adopts, now)
        waited_s = time.monotonic() - self._arrived_s if ours else 0.0
        values = {**values, **self.measured(arrived, waited_s)}
        self.log_landing(state, 0, key, adopts, now - since, now, values, events)
        return state

    def update_anchor(self, state: TrainState, flight: InFlight, own=None, if_news: bool = False):
        """Move the anchor by one payload after another, in region order (several at the end)."""
        values: dict[str, jax.Array] = {}
        for region in np.flatnonzero(flight.takes_part):
            only = np.arange(self.total) == region
            weight = np.where(only, flight.weight, np.float32(0))
            one = dataclasses.replace(flight, weight=weight, takes_part=only)
            state, values = super().update_anchor(state, one, own, if_news)
        return state, values

    # -- reports --------------------------------------------------------------------------------

    def report(
        self, state: TrainState, now: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Arrive, if the steps since the last time are made, and wait for the new anchor."""
        since = now - max(0, int(state.counters.last_landed[0, 0]))
        if since < self._steps or self.landed == self.until:
            return state
        state = self.send(state, Send((0,)), now, mask, events)
        ((key, flight),) = state.in_flight.items()
        self._arrived_s = time.monotonic()
        sent, tried = events[-1].values, None
        while key in state.in_flight:
            if self.landed == self.until:
                sent["round"] = np.array(-1)
                return self._taken_back(state, key, flight)
            if tried != self.landed:
                tried = self.landed
                self.report_to(state, tried, flight)
            self.rounds.wait()
            self.tell(state)
            state = self.land_arrived(state, now, events)
        sent["round"] = np.array(self._number)
        return state

    def _taken_back(self, state: TrainState, key: str, flight: InFlight) -> TrainState:
        """The state as if it had not been sent; what was booked stays booked."""
        counters = state.counters.copy()
        counters.sends[0] -= 1
        in_flight = without(state.in_flight, key)
        return state.replace(codec=(flight.kept,), in_flight=in_flight, counters=counters)

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        """Others' payloads are received as their arrivals land, not at an own send."""
        found = super().traffic(exchange, like, mask, groups, header)
        return found if self._at_the_end else found._replace(received=0 * found.received)

    def post(self, state: TrainState, key: str, flight: InFlight, again: bool = False) -> None:
        if self._at_the_end:
            super().post(state, key, flight, again)

    # -- after a restart ------------------------------------------------------------------------

    def reconnect(self, state: TrainState) -> None:
        """Begin; nothing is in flight between two steps."""
        self._begun(state)

    def start_from_peer(
        self, state: TrainState, arrays: dict[str, np.ndarray], document: dict
    ) -> TrainState:
        state = super().start_from_peer(state, arrays, document)
        step, everyone = int(state.counters.step), np.ones(1, bool)
        state = self.adopt(state, 0, self.spectator(0, step), everyone, step)
        return with_inner(state, opt=at_step(state.inner.opt, step, everyone))
