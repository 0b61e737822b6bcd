"""What is due after which step: landings, sends, and what the schedule concludes from them.

A job that is one region of several puts off what is due while it cannot reach the others, and
trains on; `Clock.behind` counts the steps since. Later all of it is done in its order, as by a
region that sits out: nothing is sent, and nothing that arrives is adopted, since it would undo what
has been trained meanwhile. So anchors and decisions are those of the other regions, and the next
thing that is sent has all that was trained. Slower regions may still train where this one was long
ago: they are waited for.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from lowcomm_jax import boundary
from lowcomm_jax.arrivals import due
from lowcomm_jax.history import Event
from lowcomm_jax.state import TrainState

if TYPE_CHECKING:
    from lowcomm_jax.roundtrip import RoundTrips


_SLOWER = 4  # times as long as here may a step take elsewhere


@dataclasses.dataclass
class Alone:
    """How fast this job has trained since it could not reach the others; until it is with them.

    Attributes:
      first, last: (step, seconds) when something was put off; None = nothing is.
    """

    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def put_off(self, step: int) -> None:
        """Something is still put off after this step."""
        self.last = step, time.monotonic()
        self.first = self.first or self.last

    def patience_s(self, steps: int) -> float:
        """How long others may take for so many steps."""
        if self.first is None or self.first[0] == self.last[0]:
            return 0.0
        (first, began_s), (last, ended_s) = self.first, self.last
        return _SLOWER * steps * (ended_s - began_s) / (last - first)


def upcoming(trips: RoundTrips, state: TrainState) -> int:
    """The first step after which something is still to be sent or to land."""
    done = state.clock.settled
    dues = [int(f.due[f.waiting].min()) for f in state.in_flight.values()]
    return max(done + 1, min([trips.schedule.next_send(done, state.clock), *dues]))


def settle(
    trips: RoundTrips, state: TrainState, mask: np.ndarray, events: list[Event]
) -> TrainState:
    """Do all that is due up to the clock's step, as far as the others can be reached.

    Args:
      mask: bool `[R]`: who takes part in what is sent at the clock's step.
      events: what is done is added.
    """
    now, nobody = int(state.clock.step), np.zeros_like(mask)
    trips.carrier.trained = now
    while (at := upcoming(trips, state)) <= now:
        if trips.alone.first is not None:
            trips.carrier.be_patient(trips.alone.patience_s(at - state.clock.settled))
        # As it was then: nothing of it may depend on how late it is done.
        clock = dataclasses.replace(state.clock.copy(), step=np.int64(at), behind=np.int64(1))
        who, state = mask if at == now else nobody, state.replace(clock=clock)
        state, done = _at(trips, state, who, events, at == now)
        behind = np.int64(now - at + (not done))
        clock = dataclasses.replace(state.clock, step=np.int64(now), behind=behind)
        state = state.replace(clock=clock)
        if not done:
            trips.alone.put_off(now)
            trips.carrier.still_behind()
            return state
        if at == now and trips.alone.first is not None and (clock.last_sent == at).any():
            # Sent in time: the others are where this region is.
            trips.alone = Alone()
            trips.carrier.be_patient(0.0)
    return state.replace(clock=dataclasses.replace(state.clock, behind=np.int64(0)))


def _at(
    trips: RoundTrips, state: TrainState, mask: np.ndarray, events: list[Event], adopt: bool
) -> tuple[TrainState, bool]:
    """What is due at the clock's step: (state, whether all of it is done).

    `adopt`: whether regions adopt what lands.
    """
    schedule, carrier, step = trips.schedule, trips.carrier, int(state.clock.step)
    # Put off between its sends and their landing, it is taken up there.
    sends = not (state.clock.last_sent == step).any()
    if sends and schedule.next_send(step - 1, state.clock) == step and not carrier.reachable():
        return state, False
    if not carrier.arrives(state, due(state, step)):
        return state, False
    if not schedule.land_after_send:
        state = trips.land(state, due(state, step), step, events, adopt)
    sent = trips.sends(state, step) if sends else ()
    mask = mask & schedule.senders(step, trips.count)
    for p in sent:
        state = trips.send(state, p, step, mask, events)
    if schedule.land_after_send:
        for p in sent:
            state = boundary.cross(trips, state, p, step, mask, events)
    else:
        keys = due(state, step)
        if not carrier.arrives(state, keys):
            return state, False
        state = trips.land(state, keys, step, events, adopt)
    state = _decide(trips, state, [e for e in events if e.kind == "land" and e.step == step])
    carrier.settled(state, trips.fragments)
    return state, True


def _decide(trips: RoundTrips, state: TrainState, landings: list[Event]) -> TrainState:
    """Let the schedule draw its conclusions from what has just landed."""
    schedule, step = trips.schedule, int(state.clock.step)
    decided = schedule.decide(step, state.clock, landings)
    if decided is None:
        return state
    state.clock.decided = decided
    if not schedule.land_after_send:
        return state
    # What was sent at this boundary lands at the next one, which has just been settled.
    then = np.full(trips.count, schedule.next_send(step, state.clock), np.int64)
    flights = {
        k: dataclasses.replace(f, due=then) if f.sent == step else f
        for k, f in state.in_flight.items()
    }
    return state.replace(in_flight=flights)
