"""What happens between inner steps: sends, landings, and the bookkeeping of payloads in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lowcomm_jax import agenda
from lowcomm_jax.arrivals import Arrivals, hurried
from lowcomm_jax.exchange import Traffic, two_shot
from lowcomm_jax.history import Event
from lowcomm_jax.measurements import Measurements, measured_by
from lowcomm_jax.programs import Programs
from lowcomm_jax.schedule import delay_per_region
from lowcomm_jax.state import InFlight, TrainState, flight_key, with_inner, with_item, without
from lowcomm_jax.token_mean import restart_count
from lowcomm_jax.topology import Groups

PyTree = Any

_SENT_VALUES = ("delta_norm", "left_out", "weight", "codec_error")


class RoundTrips:
    """Runs the events of one engine. Host-side; every numeric part is a compiled program.

    Attributes:
      programs: the compiled programs.
      carrier: how payloads reach the other regions; arrivals: those of everyone, from it.
      weights: float32 `[R]`, weights of the regions unless tokens decide.
      alone: what this job does while it cannot reach the others.
      empty: what no region takes part in is sent nevertheless, as jobs must, which cannot know.
    """

    def __init__(self, programs: Programs, weights: str | np.ndarray):
        self.programs = programs
        self.method, self.carrier = programs.method, programs.recipe.carrier
        self.schedule, self.arrivals = self.method.schedule, Arrivals(self.carrier)
        self.count, self.empty = programs.recipe.regions.count, self.carrier.always
        self.fragments = programs.fragments
        self.by_tokens = isinstance(weights, str) and weights == "tokens"
        equal = np.ones(self.count, np.float32)
        self.weights = equal if isinstance(weights, str) else weights
        self.alone = agenda.Alone()
        self._like = [self.fragments.like(p) for p in range(len(self.fragments))]
        self._rows = [self.fragments.rows(p) for p in range(len(self.fragments))]
        self.measurements = Measurements(programs)
        self._delay = delay_per_region(self.schedule.delay, self.count)
        self._averaged = list(programs.averaged())
        if self._averaged and self.carrier.always:
            raise ValueError(
                f"leaves {self._averaged} of role 'average' cannot be averaged between jobs: give "
                "them the role 'local'"
            )

    def as_jobs(self, adopting: Callable[[int], np.ndarray]) -> None:
        """Do on a mesh what jobs did: see `empty` and `Arrivals.adopting`."""
        self.empty, self.arrivals.adopting = True, adopting

    def next_event(self, state: TrainState) -> int:
        """Inner steps until something is sent or lands (at least 1)."""
        if self.method.signal == "gradient":
            return np.iinfo(np.int32).max
        return max(1, agenda.upcoming(self, state) - int(state.clock.step))

    def after(self, state: TrainState, steps: int, mask: np.ndarray):
        """Advance the clock by `steps` steps and do what is due then: (state, events)."""
        self.measurements.computed(state, steps)
        clock = state.clock
        step, behind = np.int64(clock.step + steps), np.int64(clock.behind + steps)
        state = state.replace(clock=dataclasses.replace(clock, step=step, behind=behind))
        events: list[Event] = []
        state = agenda.settle(self, state, mask, events)
        # What was put off says nothing of the time that a sync takes.
        self.measurements.synchronised(state, sum(event.step == step for event in events))
        return state, events

    # -- send -----------------------------------------------------------------------------------

    def sends(self, state: TrainState, step: int) -> tuple[int, ...]:
        """The fragments that leave after this step."""
        busy = {
            int(f.fragment)
            for f in state.in_flight.values()
            if not (self.schedule.land_after_send and bool((f.due <= step).all()))
        }
        return self.schedule.sends(
            step, state.clock, frozenset(busy), lambda: np.asarray(state.rate)
        )

    def send(self, state, p: int, step: int, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Send fragment p from the regions of `mask`; unless `empty`, not if there are none."""
        if self.method.base == "received":
            for region in np.flatnonzero(mask):
                alone = np.arange(self.count) == region
                state = self._send(state, p, step, alone, events, flight_key(p, step, region))
            return state
        return self._send(state, p, step, mask, events, flight_key(p, step))

    def _send(self, state, p: int, step: int, mask, events: list[Event], key: str) -> TrainState:
        if not mask.any() and not self.empty:
            return state
        kept = self.carrier.before(state.codec[p])
        keep = self.method.landing is not None and bool((self._delay > 0).any())
        level = self.schedule.level(state.clock)
        turn = int(state.clock.sends[p]) % len(state.bases[p])
        out = self.programs.send(
            self.fragments.leaves(state.inner.params, p),
            self.fragments.leaves(state.received or state.anchor, p),
            state.codec[p],
            self._rows[p],
            mask,
            self._base_weights(state, p),
            state.bases[p][turn],
            keep=keep,
            level=level,
        )
        groups = self.groups(int(state.clock.sends[p]))
        traffic = self._traffic(p, level, mask, groups)
        clock = state.clock.copy()
        clock.previous_sent[p], clock.last_sent[p] = clock.last_sent[p], step
        clock.sends[p] += 1
        clock.bytes_sent += traffic.sent
        clock.bytes_received += traffic.received
        flight = InFlight(
            payload=out["payload"],
            snapshot=out["snapshot"],
            accepted=out["accepted"],
            weight=out["weight"],
            fragment=np.int64(p),
            sent=np.int64(step),
            due=step + self._delay,
            takes_part=mask.copy(),
            moved=np.bool_(False),
            level=np.int64(level),
            header=self.measurements.header(state, step),
            kept=kept,
        )
        exchange, number = self.programs.exchange.at(level), int(clock.sends.sum())
        self.carrier.start(key, number, flight, state.anchor, groups, exchange, self.fragments)
        values = {k: out[k] for k in _SENT_VALUES if k in out}
        events.append(Event.of_send(step, p, key, mask, traffic, values, groups))
        state = state.replace(
            codec=with_item(state.codec, p, out["codec_state"]),
            bases=with_item(state.bases, p, with_item(state.bases[p], turn, out["bases"])),
            in_flight={**state.in_flight, key: flight},
            clock=clock,
        )
        if self.by_tokens:
            counted = restart_count(state.inner.tokens, mask, np.int32(p))
            state = with_inner(state, tokens=counted)
        return self._average(state, mask, flight) if p == 0 and self._averaged else state

    def _traffic(self, p: int, level: int, mask: np.ndarray, groups: Groups | None) -> Traffic:
        exchange, header = self.programs.exchange.at(level), 4 * self.schedule.header_floats()
        traffic = self.carrier.traffic(exchange, self._like[p], mask, groups, header)
        if p == 0 and self._averaged:
            return traffic.plus(two_shot(self.programs.averaged_bytes(), mask))
        return traffic

    def groups(self, number: int) -> Groups | None:
        """Who exchanges in a fragment's round `number`; None = all regions with one another."""
        del number
        return None

    def _base_weights(self, state: TrainState, p: int) -> jax.Array:
        return state.inner.tokens[:, p] if self.by_tokens else self.weights

    def _average(self, state: TrainState, mask: np.ndarray, flight: InFlight) -> TrainState:
        """Average leaves of role `average` over the participants, without delay."""
        chosen = {k: state.inner.buffers[k] for k in self._averaged}
        averaged = self.programs.average(chosen, flight.weight, mask)
        return with_inner(state, buffers={**state.inner.buffers, **averaged})

    # -- land -----------------------------------------------------------------------------------

    def land(self, state, keys: list[str], step: int, events, adopt: bool = True) -> TrainState:
        """Land payloads where they are due: first all anchors move, then regions adopt them.

        `adopt`: whether they do; else they keep their own values.
        """
        moved: dict[str, dict[str, Any]] = {}
        for key in [key for key in keys if not state.in_flight[key].moved]:
            state, flight = self.arrivals.wait(state, key, adopted=adopt)
            state, moved[key] = self.move(state, flight)
            state = self.measurements.landed(state, flight, moved[key])
        for key in keys:
            state = self._adopt_flight(state, key, step, moved.get(key, {}), events, adopt)
        return state

    def land_now(self, state, keys: list[str], step: int, events: list[Event]) -> TrainState:
        """Land payloads in all regions that still wait for them, due or not."""
        return self.land(hurried(state, keys, step), keys, step, events)

    def _adopt_flight(self, state, key: str, step: int, values, events, adopt) -> TrainState:
        flight = state.in_flight[key]
        p, due = int(flight.fragment), flight.takes_part & (flight.due <= step)
        lands = due & adopt & self.arrivals.adopters(flight)
        state = self.adopt(state, p, flight, lands, step)
        values = {**values, **measured_by(state.landing[p])}
        since = flight.sent
        if self.method.base == "received":
            since = np.maximum(state.clock.last_landed[p], 0)
        self.log_landing(state, p, key, lands, step - since, step, values, events)
        waiting = flight.takes_part & ~due
        if not waiting.any():
            return state.replace(in_flight=without(state.in_flight, key))
        moved = dataclasses.replace(
            flight, payload=None, header={}, kept=None, takes_part=waiting, moved=np.bool_(True)
        )
        return state.replace(in_flight={**state.in_flight, key: moved})

    def move(self, state: TrainState, flight: InFlight, own=None, if_news: bool = False):
        """Move the anchor by a payload; returns (state, device metrics)."""
        p = int(flight.fragment)
        personal = self.method.codec is not None and self.method.codec.personal
        turn = state.clock.number(p, int(flight.sent)) % len(state.bases[p])
        anchor, outer, codec, bases, values = self.programs.move(
            self.fragments.leaves(state.anchor, p),
            state.outer[p],
            flight.payload,
            flight.weight,
            self._rows[p],
            own,
            state.codec[p] if personal else None,
            state.bases[p][turn],
            if_news=if_news,
            level=int(flight.level),
        )
        bases, outer = with_item(state.bases[p], turn, bases), with_item(state.outer, p, outer)
        bases, anchor = with_item(state.bases, p, bases), {**state.anchor, **anchor}
        state = state.replace(anchor=anchor, outer=outer, bases=bases)
        return state.replace(codec=with_item(state.codec, p, codec)) if personal else state, values

    def adopt(self, state, p: int, flight: InFlight, lands: np.ndarray, step: int) -> TrainState:
        """Let the regions of `lands` adopt the anchor by the landing rule."""
        params, landing = self.programs.adopt(
            self.fragments.leaves(state.inner.params, p),
            self.fragments.leaves(state.anchor, p),
            state.landing[p],
            flight.snapshot,
            flight.accepted,
            lands,
            np.full(self.count, step - int(flight.sent), np.int32),
            self._rows[p],
            np.int32(step),
        )
        state = with_inner(state, params={**state.inner.params, **params})
        if state.received:
            now = self.programs.receive(state.received, state.anchor, lands)
            state = state.replace(received=now)
        return state.replace(landing=with_item(state.landing, p, landing))

    def log_landing(self, state, p, key, lands, staleness, step, values, events) -> None:
        """Note a landing in the clock and in the events."""
        clock = state.clock
        clock.last_landed[p] = np.where(lands, step, clock.last_landed[p])
        clock.staleness[p] = np.where(lands, staleness, clock.staleness[p])
        values = {**values, **self.carrier.times(key)}
        events.append(Event.of_landing(step, p, key, lands, staleness, values))
