"""The loop over a run's events: which fragments are due after a step, their sends and landings.

Order after inner step t: land payloads of earlier steps that are due, send, land payloads without
delay; then the schedule decides (`Schedule.decide`). Everything here runs on the host and decides
by the counters in the state; every numeric part is a compiled program (`round_programs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic, two_shot
from lowcomm_jax.history import Event
from lowcomm_jax.optimizers import state_field
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.schedule import delay_per_region
from lowcomm_jax.state.train_state import (
    Decided,
    InFlight,
    TrainState,
    flight_key,
    in_send_order,
    round_of,
    with_inner,
    with_item,
    with_taken_over,
    without,
)
from lowcomm_jax.sync.channel_loop import ChannelLoop
from lowcomm_jax.sync.measurements import make_measurements
from lowcomm_jax.sync.round_programs import RoundPrograms

PyTree = Any

_SENT_VALUES = ("delta_norm", "left_out", "weight", "codec_error")


class SyncLoop:
    """Runs the events of one engine whose regions are all in one program.

    `OnePeriodLoop`, `GossipLoop`, `LearnerLoop` and `TwoLevelLoop` change the order of events, or
    who averages with whom. `runtime.job_loop` has loops for a job that is one region of several.

    Attributes:
      programs: the compiled programs.
      weights: float32 `[R]`, weights of the regions unless tokens decide (`by_tokens`).
      total: number of regions of the run.
      count: number of regions in this job.
      sends_empty: whether a fragment is sent that no region takes part in.
    """

    sends_empty = False

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray):
        self.programs, self.method = programs, programs.method
        self.schedule = self.method.schedule
        self.count, self.total = programs.regions.count, programs.setup.regions
        self.fragments = programs.fragments
        self.by_tokens = isinstance(weights, str) and weights == "tokens"
        equal = np.ones(self.count, np.float32)
        self.weights = equal if isinstance(weights, str) else weights
        self.measurements = make_measurements(programs)
        self._like = [self.fragments.like(p) for p in range(len(self.fragments))]
        self._rows = [self.fragments.rows(p) for p in range(len(self.fragments))]
        self._delay = delay_per_region(self.schedule.delay, self.count)
        self._averaged = list(programs.averaged())
        if self._averaged and self.method.base == "received":
            raise ValueError(
                f"leaves {self._averaged} of role 'average' need a send of all regions at once, "
                f"and {self.method.name} sends one by one: give them the role 'local'"
            )
        count, apart = len(self.fragments), self.method.rules_differ
        self._lands_by_rule = [self.method.landing_of(p) is not None for p in range(count)]
        self._rules = [p if apart else 0 for p in range(count)]  # of `RoundFunctions.rules_K`
        self.channels = None
        if programs.channels is not None:
            self.channels = ChannelLoop(programs.channels, self.weights, len(self.fragments))

    # -- due events -----------------------------------------------------------------------------

    def upcoming(self, state: TrainState) -> int:
        """The next step after which a fragment is to be sent or a payload to land."""
        done = state.counters.done_until
        dues = [int(f.due[f.waiting].min()) for f in state.in_flight.values()]
        return max(done + 1, min([self.schedule.next_send(done, state.counters), *dues]))

    def next_event(self, state: TrainState) -> int:
        """Inner steps until the next send or landing, at least 1."""
        if self.method.signal == "gradient":
            return np.iinfo(np.int32).max
        return max(1, self.upcoming(state) - int(state.counters.step))

    def after(self, state: TrainState, steps: int, mask: np.ndarray):
        """Advance the counters by `steps` steps and run the events that are due then.

        Args:
          mask: bool `[R]`: who takes part in the sends.

        Returns:
          (state, events).
        """
        if self.measurements is not None:
            self.measurements.computed(state, steps)
        now = state.counters
        step, behind = np.int64(now.step + steps), np.int64(now.behind + steps)
        state = state.replace(counters=dataclasses.replace(now, step=step, behind=behind))
        events: list[Event] = []
        state = self.run_due(state, mask, events)
        if self.measurements is not None:
            self.measurements.synchronised(state, sum(event.step == step for event in events))
        return state, events

    def run_due(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Run all events due up to the counters' step, in order; appends to `events`."""
        now = int(state.counters.step)
        while (at := self.upcoming(state)) <= now:
            state = self.events_at(as_of(state, at, behind=1), mask, events)
            state = as_of(state, now, behind=now - at)
        return as_of(state, now, behind=0)

    def events_at(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Run the events of the counters' step: landings, sends, landings of delay 0."""
        state = self.before_sends(state, events)
        state, sent = self.send_due(state, mask, events)
        state = self.after_sends(state, sent, mask, events)
        return self.decide(state, events)

    def before_sends(self, state: TrainState, events: list[Event]) -> TrainState:
        """Land payloads of earlier steps first, so that no progress is counted twice."""
        return self.land_due(state, events)

    def after_sends(
        self, state: TrainState, sent: Sequence[int], mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Land the fragments just `sent` that have no delay."""
        del sent, mask
        return self.land_due(state, events)

    def land_due(self, state: TrainState, events: list[Event]) -> TrainState:
        step = int(state.counters.step)
        return self.land(state, due(state, step), step, events)

    def send_due(
        self, state: TrainState, mask: np.ndarray, events: list[Event]
    ) -> tuple[TrainState, tuple[int, ...]]:
        """Send the fragments that leave after this step: (state, their numbers)."""
        step = int(state.counters.step)
        mask, leaving = mask & self.schedule.senders(step, self.count), self.sends(state, step)
        for p in leaving:
            state = self.send(state, p, step, mask, events)
        return state, leaving

    def decide(self, state: TrainState, events: list[Event]) -> TrainState:
        """Let the schedule decide from the step's landings, and store its decisions."""
        decided = self.conclusions(state, events)
        if decided is not None:
            state.counters.decided = decided
        return state

    def conclusions(self, state: TrainState, events: list[Event]) -> Decided | None:
        """The schedule's new decisions; None = nothing changes."""
        step = int(state.counters.step)
        landings = [e for e in events if e.kind == "land" and e.step == step]
        return self.schedule.decide(step, state.counters, landings)

    # -- inner steps ----------------------------------------------------------------------------

    def inner_steps(
        self, state: TrainState, given: Sequence[Any], n: np.int32
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The first n inner steps of a block; payloads in flight are exchanged beside them.

        Args:
          given: arguments of `RoundPrograms.inner_program` before n.

        Returns:
          (state, metrics `[R, S]`).
        """
        concurrent = self.programs.concurrent
        waiting = [] if concurrent is None else self.to_exchange(state)
        if not waiting:
            inner, metrics = self.programs.inner_program(*given, n, single=False)
            return state.replace(inner=inner), metrics
        flights = [state.in_flight[key] for key in waiting]
        kinds = [concurrent.kind(self._like[int(f.fragment)], int(f.level)) for f in flights]
        payloads = [(kind, f.payload, f.weight) for kind, f in zip(kinds, flights)]
        (inner, metrics), brought = concurrent(given, n, payloads)
        exchanged = {
            key: dataclasses.replace(flight, brought=buffers)
            for key, flight, buffers in zip(waiting, flights, brought)
        }
        in_flight = {**state.in_flight, **exchanged}
        return state.replace(inner=inner, in_flight=in_flight), metrics

    def to_exchange(self, state: TrainState) -> list[str]:
        """Payloads in flight whose collectives are still to be done."""
        flights = in_send_order(state.in_flight)
        return [k for k, f in flights if f.brought is None and not f.anchor_updated]

    # -- send -----------------------------------------------------------------------------------

    def sends(self, state: TrainState, step: int) -> tuple[int, ...]:
        """The fragments that leave after this step; one in flight is not sent again."""
        return self.schedule.sends(
            step, state.counters, self.in_flight_at(state, step), lambda: np.asarray(state.rate)
        )

    def in_flight_at(self, state: TrainState, step: int) -> frozenset[int]:
        """Fragments that are in flight when this step's sends are chosen."""
        del step
        return frozenset(int(f.fragment) for f in state.in_flight.values())

    def send(self, state, p: int, step: int, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Send fragment p from the regions of `mask`.

        An empty mask sends nothing, unless `sends_empty`. With `base="received"` each region's
        contribution is a payload of its own.
        """
        if self.method.base == "received":
            for region in np.flatnonzero(mask):
                only = np.arange(self.count) == region
                state = self._send(state, p, step, only, events, flight_key(p, step, region))
            return state
        return self._send(state, p, step, mask, events, flight_key(p, step))

    def _send(self, state, p: int, step: int, mask, events: list[Event], key: str) -> TrainState:
        """Encode the pseudo-gradient of fragment p, book it, and put it in flight under `key`."""
        if not mask.any() and not self.sends_empty:
            return state
        with_snapshot = self._lands_by_rule[p] and bool((self._delay > 0).any())
        level = self.schedule.level(state.counters)
        out = self.programs.payload_program(
            self.fragments.leaves(state.inner.params, p),
            self.fragments.leaves(state.received or state.anchor, p),
            state.codec[p],
            self._rows[p],
            mask,
            self._base_weights(state, p),
            with_snapshot=with_snapshot,
            level=level,
            rounding=self._rounding(state, p),
        )
        groups = self.groups(int(state.counters.sends[p]))
        traffic = self._traffic(p, level, mask, groups)
        counters = state.counters.copy()
        counters.previous_sent[p], counters.last_sent[p] = counters.last_sent[p], step
        counters.sends[p] += 1
        counters.bytes_sent += traffic.sent
        counters.bytes_received += traffic.received
        flight = InFlight(
            payload=out["payload"],
            snapshot=out["snapshot"],
            accepted=out["accepted"],
            weight=out["weight"],
            fragment=np.int64(p),
            sent=np.int64(step),
            due=self.due_at(p, step),
            takes_part=self.waiting(mask),
            anchor_updated=np.bool_(False),
            level=np.int64(level),
            header=self.header(state, step),
        )
        values = {k: out[k] for k in _SENT_VALUES if k in out}
        events.append(Event.of_send(step, p, key, mask, traffic, values, groups))
        state = state.replace(
            codec=with_item(state.codec, p, out["codec_state"]),
            in_flight={**state.in_flight, key: flight},
            counters=counters,
        )
        if self.by_tokens:
            counted = _restart_count(state.inner.tokens, mask, np.int32(p))
            state = with_inner(state, tokens=counted)
        return self._average(state, mask, flight) if p == 0 and self._averaged else state

    def header(self, state: TrainState, step: int) -> dict[str, Any]:
        """Numbers that travel with a payload, `[R]` or `[R, ...]` by name."""
        return {} if self.measurements is None else self.measurements.header(state, step)

    def waiting(self, mask: np.ndarray) -> np.ndarray:
        """Bool `[R]`: in which regions a payload sent by those of `mask` is to land."""
        return mask.copy()

    def due_at(self, p: int, step: int) -> np.ndarray:
        """int64 `[R]`: the step after which a payload sent at `step` lands."""
        del p
        return step + self._delay

    def _traffic(self, p: int, level: int, mask: np.ndarray, groups: Groups | None) -> Traffic:
        exchange, header = self.programs.exchange.at(level), 4 * self.schedule.header_floats()
        traffic = self.traffic(exchange, self._like[p], mask, groups, header)
        if p == 0 and self._averaged:
            return traffic.plus(two_shot(self.programs.averaged_bytes(), mask))
        return traffic

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        """Bytes of one exchange, `[R]`, as announced at its send (`MeshExchange.traffic`)."""
        return exchange.traffic(like, mask, groups, header)

    def groups(self, number: int) -> Groups | None:
        """Who exchanges in a fragment's round `number`; None = all regions with one another."""
        del number
        return None

    def _base_weights(self, state: TrainState, p: int) -> jax.Array | np.ndarray:
        return state.inner.tokens[:, p] if self.by_tokens else self.weights

    def _average(self, state: TrainState, mask: np.ndarray, flight: InFlight) -> TrainState:
        """Average leaves of role `average` over the participants, without delay."""
        chosen = {k: state.inner.buffers[k] for k in self._averaged}
        averaged = self.programs.average_program(chosen, flight.weight, mask)
        return with_inner(state, buffers={**state.inner.buffers, **averaged})

    # -- land -----------------------------------------------------------------------------------

    def land(self, state: TrainState, keys: Sequence[str], step: int, events) -> TrainState:
        """Land payloads where they are due: first all anchors move, then regions adopt them."""
        landed: dict[str, dict[str, Any]] = {}
        for key in [key for key in keys if not state.in_flight[key].anchor_updated]:
            state, flight = self.collect(state, key)
            state, landed[key] = self.update_anchor(state, flight)
            if self.measurements is not None:
                state = self.measurements.landed(state, flight, landed[key])
        for key in keys:
            state = self._adopt_flight(state, key, step, landed.get(key, {}), events)
        return state

    def collect(
        self, state: TrainState, key: str, last: bool = False, adopted: bool = True
    ) -> tuple[TrainState, InFlight]:
        """The payloads of all regions that sent `key`; on one mesh they are in the state.

        Args:
          last: whether it is the last synchronisation of a run.
          adopted: whether regions will adopt the resulting anchor.

        Returns:
          (state, the flight with everyone's payloads).
        """
        del last, adopted
        return state, state.in_flight[key]

    def land_now(self, state, keys: list[str], step: int, events: list[Event]) -> TrainState:
        """Land payloads in all regions where they have not landed, due or not."""
        return self.land(_due_now(state, keys, step), keys, step, events)

    def _adopt_flight(self, state, key: str, step: int, values, events) -> TrainState:
        flight = state.in_flight[key]
        p, due_R = int(flight.fragment), flight.takes_part & (flight.due <= step)
        lands = self.adopters(flight, due_R)
        state = self.adopt(state, p, flight, lands, step)
        values = {**values, **_measured_by(state.landing[p])}
        since = flight.sent
        if self.method.base == "received":
            since = np.maximum(state.counters.last_landed[p], 0)
        self.log_landing(state, p, key, lands, step - since, step, values, events)
        waiting = flight.takes_part & ~due_R
        if not waiting.any():
            return state.replace(in_flight=without(state.in_flight, key))
        left = {"payload": None, "brought": None, "header": {}, "kept": None, "takes_part": waiting}
        rest = dataclasses.replace(flight, **left, anchor_updated=np.bool_(True))
        return state.replace(in_flight={**state.in_flight, key: rest})

    def adopters(self, flight: InFlight, due_R: np.ndarray) -> np.ndarray:
        """Bool `[R]`: who adopts the anchor, of those for whom the payload is due."""
        del flight
        return due_R

    def replay(self, adopting: Callable[[int], np.ndarray]) -> None:
        """Repeat a run of separate jobs: these send even if nobody takes part, and not all adopt.

        Args:
          adopting: step of a send -> bool `[R]`, who adopted the resulting anchor.
        """
        self.sends_empty = True
        self.adopters = lambda flight, due_R: due_R & adopting(int(flight.sent))

    def update_anchor(self, state: TrainState, flight: InFlight, own=None, if_news: bool = False):
        """Move the anchor by a payload; returns (state, device metrics)."""
        p = int(flight.fragment)
        personal = self.method.codec is not None and self.method.codec.personal
        anchor, outer, codec, values = self.programs.outer_program(
            self.fragments.leaves(state.anchor, p),
            state.outer[p],
            flight.payload,
            flight.weight,
            self._rows[p],
            own,
            state.codec[p] if personal else None,
            flight.brought,
            self.told(state, flight),
            self.counted(flight) if personal else None,
            if_news=if_news,
            level=int(flight.level),
            rules=self._rules[p],
        )
        outer, anchor = with_item(state.outer, p, outer), {**state.anchor, **anchor}
        state = state.replace(anchor=anchor, outer=outer)
        return state.replace(codec=with_item(state.codec, p, codec)) if personal else state, values

    def counted(self, flight: InFlight) -> np.ndarray | None:
        """Bool `[R]`: whose payloads count, of the regions of this job; None = as weights say."""
        del flight
        return None

    def told(self, state: TrainState, flight: InFlight) -> dict[str, np.int32]:
        """Keywords of the outer and landing rules for a payload that lands, int32."""
        step = state.counters.step
        told = {"fragment": flight.fragment, "round": round_of(state, flight), "step": step}
        return {name: np.int32(value) for name, value in told.items()}

    def adopt(self, state, p: int, flight: InFlight, lands: np.ndarray, step: int) -> TrainState:
        """Let the regions of `lands` adopt the anchor by the landing rule."""
        anchor = self.fragments.leaves(state.anchor, p)
        outer = None if self.method.hands_out is None else state.outer[p]
        params, landing, rounding = self.programs.landing_program(
            self.fragments.leaves(state.inner.params, p),
            anchor,
            state.landing[p],
            flight.snapshot,
            flight.accepted,
            lands,
            np.full(self.count, step - int(flight.sent), np.int32),
            self._rows[p],
            self.told(state, flight),
            outer,
            self._rounding(state, p),
            rules=self._rules[p],
        )
        state = with_taken_over(state, params, rounding)
        if state.channels:
            state = self.channels.adopted(state, lands)
        if state.received:
            state = self.mark_received(state, p, lands, outer)
        return state.replace(landing=with_item(state.landing, p, landing))

    def restart(self, state: TrainState, p: int) -> TrainState:
        """Let every region take its anchor's values of fragment p."""
        taken = self.programs.restart_program(
            self.fragments.leaves(state.inner.params, p),
            self.fragments.leaves(state.anchor, p),
            self._rounding(state, p),
            self._rows[p],
        )
        return with_taken_over(state, *taken)

    def _rounding(self, state: TrainState, p: int) -> dict[str, jax.Array]:
        """`Inner.rounding` of fragment p, unsliced."""
        kept = state.inner.rounding
        return {k: kept[k] for k in self._like[p] if k in kept}

    def mark_received(self, state, p: int, lands: np.ndarray, outer=None) -> TrainState:
        """Store that the regions of `lands` hold fragment p of the current anchor.

        Args:
          outer: the fragment's outer state, where regions receive other values than the anchor;
            None = they hold the anchor itself.
        """
        received = self.fragments.leaves(state.received, p)
        anchor = self.fragments.leaves(state.anchor, p)
        now = self.programs.received_program(received, anchor, outer, self._rows[p], lands)
        return state.replace(received={**state.received, **now})

    def log_landing(self, state, p, key, lands, staleness, step, values, events) -> None:
        """Book a landing in the counters and append its event."""
        counters = state.counters
        counters.last_landed[p] = np.where(lands, step, counters.last_landed[p])
        counters.staleness[p] = np.where(lands, staleness, counters.staleness[p])
        events.append(Event.of_landing(step, p, key, lands, staleness, values))

    # -- the end --------------------------------------------------------------------------------

    def run_all(self, state: TrainState, events: list[Event]) -> TrainState:
        """Run events due up to the counters' step, before the last synchronisation."""
        return self.run_due(state, np.ones(self.count, bool), events)

    def everyone_landed(self, state: TrainState, p: int, step: int) -> bool:
        """Whether fragment p has landed in every region at this very step."""
        return bool((state.counters.last_landed[p] == step).all())

    def ended_before(self, state: TrainState) -> bool:
        """Whether the last synchronisation was before this state; nothing is then left to send."""
        return False

    def ended(self, state: TrainState) -> None:
        """Called when the last payload of the run has landed."""


def due(state: TrainState, step: int) -> list[str]:
    """Keys of the payloads that land at this step at the latest, in the order of their sends."""
    flying = in_send_order(state.in_flight)
    return [key for key, f in flying if bool((f.waiting & (f.due <= step)).any())]


def as_of(state: TrainState, step: int, behind: int) -> TrainState:
    """The state at a step, with counters of its own; `behind`: see `SyncCounters`."""
    counters = dataclasses.replace(
        state.counters.copy(), step=np.int64(step), behind=np.int64(behind)
    )
    return state.replace(counters=counters)


def _due_now(state: TrainState, keys: Sequence[str], step: int) -> TrainState:
    """The state with these payloads due at this step at the latest."""
    flights = {key: state.in_flight[key] for key in keys}
    sooner = {k: dataclasses.replace(f, due=np.minimum(f.due, step)) for k, f in flights.items()}
    return state.replace(in_flight={**state.in_flight, **sooner})


@jax.jit
def _restart_count(tokens_RxK: jax.Array, mask_R: jax.Array, p: jax.Array) -> jax.Array:
    """Zero the tokens since the last send of fragment p in the regions that sent it."""
    return tokens_RxK.at[:, p].set(jnp.where(mask_R, 0.0, tokens_RxK[:, p]))


def _measured_by(landing_state: Any) -> dict[str, jax.Array]:
    """Measurements of a landing rule: `correction_ratio` `[R]` of Taylor delay correction."""
    ratio = state_field(landing_state, "correction_ratio") if landing_state else None
    return {} if ratio is None else {"correction_ratio": jnp.copy(ratio)}
