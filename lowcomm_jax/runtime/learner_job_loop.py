"""`LearnerJobLoop`: a learner that is a job of its own, and meets the others in rounds.

A learner does three things after each of its inner steps, and waits for nobody:

1. It lands the rounds that have arrived, in their order. The anchor moves by the payloads that the
   commit record names. The learner replaces its values of the fragment, admitted or not. A round
   that it reported to lands no sooner than tau ticks later: its own steps, or those of a faster
   learner.
2. It reports to every open round that it can: the fragment's last round has landed here, and a step
   has been made since. All reports to a round are thus encoded against the same anchor.
3. It opens the next round, if it has made as many steps as lie between two rounds (with P = H: one)
   since it saw the newest one open. So the fastest learner decides how often rounds begin.

How a round closes, and what the store holds of it: `rounds.RoundExchange`. A payload has the values
at its report; on one mesh it has those of the moment when the round closes.
"""

from __future__ import annotations

import numpy as np

from lowcomm_jax.history import Event
from lowcomm_jax.runtime.job_carrier import JobCarrier
from lowcomm_jax.runtime.request import Arrived
from lowcomm_jax.runtime.round_job_loop import RoundJobLoop
from lowcomm_jax.schedule import Admission
from lowcomm_jax.schedule.base import Send
from lowcomm_jax.state.train_state import (
    InFlight,
    TrainState,
    flight_key,
    in_send_order,
    with_item,
    without,
)
from lowcomm_jax.sync.round_programs import RoundPrograms


class LearnerJobLoop(RoundJobLoop):
    """`RoundJobLoop` for `schedule.Learners`; a learner that comes back copies all of a peer's."""

    copied, copied_inner = ("landing",), ("params", "rounding", "buffers", "opt")

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray, carrier: JobCarrier):
        super().__init__(programs, weights, carrier)
        self._seen = (-1, 0)  # the newest round, and the step at which it was first seen

    def admission(self) -> tuple[Admission, int]:
        return self.schedule.admission, self.total

    def begins(self, state: TrainState) -> None:
        self._seen = self.newest, int(state.counters.step) - 1

    def goes_on(self, state: TrainState) -> None:
        self._seen = self.landed - 1, int(state.counters.step)

    # -- landings -------------------------------------------------------------------------------

    def may_land(self, flight: InFlight, now: int) -> bool:
        """Whether the report of the next round is tau ticks old: by own steps, or by rounds."""
        ticks = self.schedule.opens(self.newest) - self.schedule.opens(self.landed)
        return now >= int(flight.due[0]) or ticks >= self.schedule.delay

    def land_round(
        self, state: TrainState, reported, arrived: Arrived, now: int, events: list[Event]
    ) -> TrainState:
        """Move the anchor by the payloads of all that were admitted, and adopt it."""
        p, counters = self.landed % self._fragments, state.counters.copy()
        key, flight = reported or (flight_key(p, now), self.spectator(p, now))
        if reported is None:
            counters.sends[p] += 1
        state = state.replace(in_flight=without(state.in_flight, key), counters=counters)
        if reported is not None and not self.rounds.names_ours(self.landed):
            state = state.replace(codec=with_item(state.codec, p, flight.kept))
        state, values = self.update_anchor(state, self.all_payloads(flight, arrived))
        everyone = np.ones(1, bool)
        state = self.adopt(state, p, flight, everyone, now)
        values = {**values, **self.measured(arrived)}
        self.log_landing(state, p, key, everyone, now - int(flight.sent), now, values, events)
        return state

    # -- reports --------------------------------------------------------------------------------

    def report(
        self, state: TrainState, now: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Report to all open rounds that this learner can, and open the next where it is time."""
        if self.newest > self._seen[0]:
            self._seen = self.newest, now
        for number in range(max(self.landed, self.committed), self._seen[0] + 1):
            if self._can_report(state, number, now):
                state = self._send_report(state, number, now, mask, events)
        number, since = self._seen[0] + 1, now - self._seen[1]
        if since >= self.schedule.gap(number) and self._can_report(state, number, now):
            state = self._send_report(state, number, now, mask, events)
            self._seen = number, now
        return state

    def _send_report(self, state, number: int, now: int, mask, events) -> TrainState:
        state = self.send(state, Send((number % self._fragments,)), now, mask, events)
        events[-1].values["round"] = np.array(number)
        return state

    def _can_report(self, state: TrainState, number: int, now: int) -> bool:
        p, last = number % self._fragments, self.landed + self._fragments
        within = self.until is None or number < self.until
        stepped = now > max(0, int(state.counters.last_landed[p, 0]))
        return within and number < last and stepped and self.own(state, number) is None

    def send_last(
        self, state: TrainState, p: int, step: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        return self.send(state, Send((p,)), step, mask, events)

    def post(self, state: TrainState, key: str, flight: InFlight, again: bool = False) -> None:
        if self._at_the_end:
            super().post(state, key, flight, again)
            return
        p = int(flight.fragment)
        # Its own report is counted, and the fragment's rounds before it have landed.
        number = (int(state.counters.sends[p]) - 1) * self._fragments + p
        self.report_to(state, number, flight)

    # -- after a restart ------------------------------------------------------------------------

    def reconnect(self, state: TrainState) -> None:
        """Report again what a restored state has reported and not landed."""
        self._begun(state)
        for key, flight in in_send_order(state.in_flight):
            self.post(state, key, flight, again=True)
        self._seen = self.newest, int(state.counters.step)
