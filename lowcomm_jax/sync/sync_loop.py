"""The loop over a run's events: it does what the schedule says, for the regions of one program.

After every inner step the schedule names, stage by stage, the acts that are still to be done
(`schedule.base`): sends, moves of the anchor, adoptions. The loop does a stage as a whole, once its
carrier has what lands in it. Everything here runs on the host and reads the counters in the state;
every numeric part is a compiled program (`round_programs`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic, all_gather, pair, two_shot
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.history import Event
from lowcomm_jax.optimizers import state_field
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.schedule import delay_per_region
from lowcomm_jax.schedule.base import Adopt, Copy, Drop, Move, Send, Stage, View, Wait
from lowcomm_jax.state.train_state import (
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
from lowcomm_jax.sync.carrier import Carrier, Collected
from lowcomm_jax.sync.copies import copy_peer
from lowcomm_jax.sync.finish import AtTheEnd, finish
from lowcomm_jax.sync.measurements import make_measurements
from lowcomm_jax.sync.own_parts import emptied, own_parts
from lowcomm_jax.sync.round_functions import (
    Adoption,
    AnchorState,
    Contributions,
    LandingTarget,
    RegionState,
    Senders,
    Values,
)
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.train.batch_blocks import BatchBlock
from lowcomm_jax.train.inner_step import squeeze

PyTree = Any

_SENT_VALUES = ("delta_norm", "left_out", "weight", "codec_error", "sent_share")
FAR = 512  # steps that are asked for at once
_first_step = jax.jit(squeeze)


class Steps(NamedTuple):
    """A block of inner steps, as `Loop.inner_steps` is given it.

    Attributes:
      block: its leaves are on the mesh already.
      keys: uint32 `[R, W]`, the words of the regions' keys.
      active: bool `[R, S]`, which regions make a step; None = all of them, always.
      masks: bool `[R]` each, who takes part in what is sent after the last step, or after every
        one (`Loop.every_step`).
      single: the block has one step, and metrics lose their step axis.
    """

    block: BatchBlock
    keys: jax.Array
    active: np.ndarray | None
    masks: list[np.ndarray]
    single: bool

    @property
    def presence(self) -> dict[str, np.ndarray]:
        """`Ran.presence` where all that are `active` make their steps."""
        return {} if self.active is None else {"active": self.active}


class Ran(NamedTuple):
    """What came of a block of inner steps.

    Attributes:
      metrics: leaves `[R, S]`, or `[R]` of a single step.
      events: of what was exchanged inside the steps' program.
      presence: bool `[R, S]` by name, `active` or `away`; empty where every region makes each step.
    """

    state: TrainState
    metrics: dict[str, jax.Array]
    events: list[Event]
    presence: dict[str, np.ndarray]


class MeshCarrier:
    """`carrier.Carrier` of a program that holds all regions: their payloads are in its state."""

    paused = False
    header: ClassVar[dict[str, Any]] = {}

    def begins(self, loop, state):
        pass

    def ending(self, loop, state):
        return contextlib.nullcontext(self)

    def reach(self, loop, state, stage, begun):
        return True

    def post(self, loop, state, key, flight, again=False):
        return {}  # it is in the state

    def collect(self, loop, state, key, last, adopts):
        flight, groups = state.in_flight[key], loop.programs.groups
        draw = None if groups is None else Draw(groups.draw(round_of(state, flight)))
        return state, Collected(flight, draw, {})

    def done(self, loop, state, in_time):
        """Nothing."""

    def traffic(self, exchange, p, like, mask, groups, header):
        return exchange.traffic(like, mask, groups, header)

    def ahead(self, loop, state, p, groups):
        return pair(4 * loop.fragments.numel(p), np.ones(loop.total, bool), groups)

    def everyone_landed(self, state, p, step, here):
        return here

    def ended_before(self, state):
        return False

    def reconnect(self, loop, state):
        """Nothing: they are in the state."""

    def close(self, loop, state):
        """Nothing."""


class Loop(abc.ABC):
    """What an engine asks of the loop of a method: inner steps, and what is due behind them.

    Attributes:
      every_step: whether it exchanges after each inner step, and not after a block's last alone.
      programs: the compiled programs.
      carrier: takes payloads to the other regions.
      weights: float32 `[R]`, weights of the regions unless tokens decide (`by_tokens`).
      total: number of regions of the run.
      count: number of regions in this job.
      separate: whether this job is one region of several.
      by_rounds: whether records of rounds say what lands; then every step is looked at.
      owed: events of a step that was paused, which are told with the next one's.
    """

    every_step: ClassVar[bool] = False

    def __init__(
        self, programs: RoundPrograms, weights: str | np.ndarray, carrier: Carrier | None = None
    ):
        self.programs, self.method = programs, programs.method
        self.carrier: Carrier = MeshCarrier() if carrier is None else carrier
        self.schedule = self.method.schedule
        self.count, self.total = programs.regions.count, programs.setup.regions
        self.separate = programs.setup.separate
        self.by_rounds = self.separate and self.schedule.by_rounds
        self.fragments = programs.fragments
        self.by_tokens = isinstance(weights, str) and weights == "tokens"
        equal = np.ones(self.count, np.float32)
        self.weights = equal if isinstance(weights, str) else weights
        self.owed: list[Event] = []

    @abc.abstractmethod
    def next_event(self, state: TrainState, most: int = FAR) -> int:
        """Inner steps until something is due, at least 1 and at most `most`."""

    @abc.abstractmethod
    def inner_steps(self, state: TrainState, steps: Steps) -> Ran:
        """The inner steps of a block, and what is exchanged inside their program.

        The step counter stays as it was. Without a step (`BatchBlock.steps` of 0) it compiles.
        """

    @abc.abstractmethod
    def after(
        self, state: TrainState, steps: int, mask: np.ndarray
    ) -> tuple[TrainState, list[Event]]:
        """Advance the counters by `steps` steps and run the events that are due then.

        Args:
          mask: bool `[R]`: who takes part in the sends.

        Returns:
          (state, events).
        """

    @abc.abstractmethod
    def finish(
        self, state: TrainState, participants: AtTheEnd = None
    ) -> tuple[TrainState, list[Event]]:
        """End a run (`sync.finish.finish`)."""


def made_steps(programs: RoundPrograms, state: TrainState, steps: Steps) -> Ran:
    """`Loop.inner_steps` by the inner program alone: nothing is exchanged inside or beside it."""
    block, n = steps.block, np.int32(steps.block.steps)
    given = (state.inner, state.frozen, block.batches, steps.keys, steps.active, n)
    if block.stride is None:
        inner, metrics = programs.inner_program(*given, single=steps.single)
    else:
        inner, metrics = programs.inner_program(*given, np.int32(block.stride))
        metrics = _first_step(metrics) if steps.single else metrics
    return Ran(state.replace(inner=inner), metrics, [], steps.presence)


class SyncLoop(Loop):
    """The loop of a schedule's acts, between inner steps: when something is due, and to do it.

    Attributes: as of `Loop`, and
      measurements: what regions measure for their schedule; None where it reads nothing.
    """

    def __init__(
        self, programs: RoundPrograms, weights: str | np.ndarray, carrier: Carrier | None = None
    ):
        super().__init__(programs, weights, carrier)
        self.measurements = make_measurements(programs)
        self._quiet: tuple[Any, Any, Any, int] = (None, None, None, 0)  # until which step it is
        self._delay = delay_per_region(self.schedule.delay, self.count)
        self._averaged = list(programs.averaged())
        self._takes_own_parts = self.method.takes_own_parts
        self._personal = self.method.codec is not None and self.method.codec.personal
        count, apart = len(self.fragments), self.method.rules_differ
        self._like = [self.fragments.like(p) for p in range(count)]
        self._norms = [4 * programs.norms(p) for p in range(count)]  # bytes
        self._rows = [self.fragments.rows(p) for p in range(count)]
        self._lands_by_rule = [self.method.landing_of(p) is not None for p in range(count)]
        self._rules = [p if apart else 0 for p in range(count)]  # of `RoundFunctions.rules_K`

    # -- when -----------------------------------------------------------------------------------

    def acts(
        self, state: TrainState, step: int, crossed: bool = False, away: bool = False
    ) -> Stage:
        """The stage that is still to be done after a step (`Schedule.acts`)."""
        view = View(state.counters, in_send_order(state.in_flight), self.count, crossed, away)
        if not self.by_rounds:
            return self.schedule.acts(step, view)
        agreed = self.carrier.agreed(self, state)
        return self.schedule.acts_by_rounds(step, view._replace(agreed=agreed))

    def upcoming(self, state: TrainState, last: int) -> int:
        """The next step after which something is due, at most `last` + 1."""
        counters = state.counters
        # Sends, landings and decisions replace these; until then no step is asked for twice.
        now = (state.in_flight, counters.last_sent, counters.decided)
        quiet = self._quiet[-1] if all(x is y for x, y in zip(now, self._quiet)) else 0
        step = max(counters.done_until, quiet) + 1
        while step <= last and not (self.by_rounds or self.acts(state, step)):
            step += 1
        self._quiet = (*now, step - 1)
        return min(step, last + 1)

    def next_event(self, state: TrainState, most: int = FAR) -> int:
        step = int(state.counters.step)
        return max(1, min(most, self.upcoming(state, step + most) - step))

    # -- inner steps ----------------------------------------------------------------------------

    def inner_steps(self, state: TrainState, steps: Steps) -> Ran:
        """As `Loop.inner_steps`; payloads in flight are exchanged beside the steps."""
        if self.measurements is not None:
            self.measurements.starts()
        block, beside = steps.block, self.programs.concurrent
        if beside is None or steps.single or block.stride is not None:
            return made_steps(self.programs, state, steps)
        # Payloads in flight whose collectives are still to be done.
        waiting = {
            key: flight
            for key, flight in in_send_order(state.in_flight)
            if flight.brought is None and not flight.anchor_updated
        }
        if not waiting:
            return made_steps(self.programs, state, steps)
        payloads = [
            (beside.kind(self._like[int(f.fragment)], int(f.level)), f.payload, f.weight)
            for f in waiting.values()
        ]
        given = (state.inner, state.frozen, block.batches, steps.keys, steps.active)
        (inner, metrics), brought = beside(given, np.int32(block.steps), payloads)
        exchanged = {
            key: dataclasses.replace(flight, brought=buffers)
            for (key, flight), buffers in zip(waiting.items(), brought)
        }
        in_flight = {**state.in_flight, **exchanged}
        return Ran(state.replace(inner=inner, in_flight=in_flight), metrics, [], steps.presence)

    # -- what is due ----------------------------------------------------------------------------

    def after(
        self, state: TrainState, steps: int, mask: np.ndarray
    ) -> tuple[TrainState, list[Event]]:
        if self.measurements is not None:
            self.measurements.computed(state, steps)
        step, behind = int(state.counters.step) + steps, int(state.counters.behind) + steps
        state = with_step(state, step, behind)
        events, self.owed = self.owed, []
        state = self.run_due(state, mask, events)
        if self.measurements is not None:
            self.measurements.synchronised(state, sum(event.step == step for event in events))
        return state, events

    def go_on(self, state: TrainState, mask: np.ndarray) -> TrainState:
        """Do what a paused step has still to do (`Carrier.paused`); then its events are `owed`.

        Args:
          mask: as in `after`, of that step.
        """
        self.carrier.paused = False
        events: list[Event] = []
        state = self.run_due(state, mask, events)
        self.owed += events
        return state

    def run_due(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Do all that is due up to the counters' step, in order, as far as others are reached.

        What an outage has put off is done as if the regions here had been absent: what they have
        trained meanwhile is not undone, and is in their next send. They adopt nothing there. The
        counters are those of the step, so that no result depends on how late it is done.

        Args:
          mask: bool `[R]`: who takes part in what is sent after the newest step.
          events: gets those of what is done.
        """
        now = int(state.counters.step)
        self.carrier.begins(self, state)
        while (step := self.upcoming(state, now)) <= now:
            in_time, begun, crossed = step == now, False, False
            who = mask if in_time else np.zeros_like(mask)
            state = as_of(state, step, behind=1)
            while stage := self.acts(state, step, crossed, away=not who.any()):
                if not self.carrier.reach(self, state, stage, begun):
                    return with_step(state, now, behind=now - step + 1)
                state, begun = self.do(state, stage, who, in_time, events), True
                crossed |= isinstance(stage[0], Move)
            if self.schedule.remembers:
                landings = [e for e in events if e.kind == "land" and e.step == step]
                decided = self.schedule.decide(step, state.counters, landings)
                state.counters.decided = state.counters.decided if decided is None else decided
            self.carrier.done(self, state, in_time)
            state = with_step(state, now, behind=now - step)
        state.counters.behind = np.int64(0)
        return state

    def do(
        self,
        state: TrainState,
        stage: Stage,
        mask: np.ndarray,
        in_time: bool,
        events: list[Event],
    ) -> TrainState:
        """Do a stage: all moves of the anchor come before the adoptions.

        Args:
          mask: bool `[R]`: who takes part in what is sent.
          in_time: whether it is the newest step. Else regions have trained on, and adopt nothing.
        """
        step, landed = int(state.counters.step), {}
        crossings = [a for a in stage if isinstance(a, Adopt) and a.fresh is not None]
        absent = {a.key for a in crossings if not a.regions.any()}
        for act in stage:
            if isinstance(act, Send):
                state = self.send(state, act, step, mask, events)
            elif isinstance(act, Move):
                state, landed[act.key] = self.move(state, act, in_time and act.key not in absent)
            elif isinstance(act, Adopt):
                state = self.adopt_payload(
                    state, act, step, in_time, landed.get(act.key, {}), events
                )
            elif isinstance(act, Drop):
                state = self.drop(state, act)
            elif isinstance(act, Copy):
                state, event = copy_peer(self.programs, state, act, step)
                events.append(event)
            else:
                assert isinstance(act, Wait)  # the carrier has waited (`Carrier.reach`)
        return state

    def drop(self, state: TrainState, act: Drop) -> TrainState:
        """The state as if a payload had not been sent; what was booked stays booked."""
        flight = state.in_flight[act.key]
        state.counters.sends[flight.fragment] -= 1
        return not_counted(state, flight).replace(in_flight=without(state.in_flight, act.key))

    # -- send -----------------------------------------------------------------------------------

    def send(
        self, state: TrainState, act: Send, step: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Send a fragment from the regions of `mask`; of nobody, too, since others may wait for it.

        With `base="received"` each region's contribution is a payload of its own.
        """
        p = act.leaves(lambda: np.asarray(state.rate))
        mask = mask if act.admitted is None else mask & act.admitted
        if self.method.base != "received" or self.separate:
            return self.put_in_flight(state, p, step, mask, act.lands, events, flight_key(p, step))
        for region in np.flatnonzero(mask):
            only = np.arange(self.count) == region
            key = flight_key(p, step, region)
            state = self.put_in_flight(state, p, step, only, act.lands, events, key)
        return state

    def put_in_flight(
        self, state, p: int, step: int, mask, lands: int | None, events: list[Event], key: str
    ) -> TrainState:
        """Encode the pseudo-gradient of fragment p, book it, and put it in flight under `key`.

        Args:
          lands: as in `Send`.
        """
        with_snapshot = self._lands_by_rule[p] and bool((self._delay > 0).any())
        level = self.schedule.level(state.counters)
        # A copy before the send, which donates it: other jobs may leave the payload out.
        kept = jax.tree.map(jnp.copy, state.codec[p]) if self.separate else None
        out = self.programs.payload_program(
            self._values(state, p),
            self.fragments.leaves(state.received or state.anchor, p),
            state.codec[p],
            self._rows[p],
            Senders(mask, self._base_weights(state, p)),
            with_snapshot=with_snapshot,
            level=level,
        )
        groups = self.groups(int(state.counters.sends[p]))
        traffic = self._traffic(p, level, mask, groups)
        counters = state.counters.copy()
        counters.count_send(p, step)
        counters.count_bytes(traffic.sent, traffic.received)
        due = step + self._delay if lands is None else np.full(self.count, lands, np.int64)
        flight = InFlight(
            payload=out["payload"],
            snapshot=out["snapshot"],
            accepted=out["accepted"],
            weight=out["weight"],
            fragment=np.int64(p),
            sent=np.int64(step),
            due=due,
            takes_part=mask.copy() if lands is None else np.ones_like(mask),
            anchor_updated=np.bool_(False),
            level=np.int64(level),
            header=self._header(state, step) | {k: out[k] for k in ("norms",) if k in out},
            kept=kept,
        )
        state = state.replace(
            codec=with_item(state.codec, p, out["codec_state"]),
            in_flight={**state.in_flight, key: flight},
            counters=counters,
        )
        values = {k: out[k] for k in _SENT_VALUES if k in out}
        values |= self.carrier.post(self, state, key, flight)
        events.append(Event.of_send(step, p, key, mask, traffic, values, groups))
        if self.by_tokens:
            counted = self.programs.recount_program(state.inner.tokens, mask, np.int32(p))
            state = with_inner(state, tokens=counted)
        return self._average(state, mask, flight) if p == 0 and self._averaged else state

    def _values(self, state: TrainState, p: int) -> Values:
        """What regions train of fragment p, unsliced."""
        return Values(self.fragments.leaves(state.inner.params, p), self._rounding(state, p))

    def _rounding(self, state: TrainState, p: int) -> dict[str, jax.Array]:
        kept = state.inner.rounding
        return {k: kept[k] for k in self._like[p] if k in kept}

    def _header(self, state: TrainState, step: int) -> dict[str, Any]:
        """Numbers that travel with a payload, `[R]` or `[R, ...]` by name."""
        measured = {} if self.measurements is None else self.measurements.header(state, step)
        return {**self.carrier.header, **measured}

    def _traffic(self, p: int, level: int, mask: np.ndarray, groups: Groups | None) -> Traffic:
        """Bytes of one exchange, `[R]`, as announced at its send."""
        floats = sum(x.shape[1] for x in self.carrier.header.values())
        header = 4 * (self.schedule.header_floats() + floats)
        exchange, norms = self.programs.exchange.at(level), self._norms[p]
        together = header + (norms if self.separate else 0)
        traffic = self.carrier.traffic(exchange, p, self._like[p], mask, groups, together)
        if norms and not self.separate:
            traffic = traffic.plus(all_gather(norms, mask))
        if p == 0 and self._averaged:
            return traffic.plus(two_shot(self.programs.averaged_bytes(), mask))
        return traffic

    def groups(self, number: int) -> Groups | None:
        """Who exchanges in a fragment's round `number`; None = all regions with one another."""
        topology = self.method.topology
        return None if topology is None else topology.groups(number, self.total)

    def _base_weights(self, state: TrainState, p: int) -> jax.Array | np.ndarray:
        if not self.schedule.by_token_rate:
            return state.inner.tokens[:, p] if self.by_tokens else self.weights
        # w of `methods.decoupled_diloco`, counted since the fragment was received.
        landed_R = np.maximum(state.counters.last_landed[p], 0)
        pace = self.schedule.pace
        steps = pace.made(int(state.counters.step), self.count) - pace.made_at(landed_R)
        steps_R = np.float32(np.maximum(steps, 1))
        return self.programs.token_rate_program(state.inner.tokens, steps_R, np.int32(p))

    def _average(self, state: TrainState, mask: np.ndarray, flight: InFlight) -> TrainState:
        """Average leaves of role `average` over the participants, without delay."""
        chosen = {k: state.inner.buffers[k] for k in self._averaged}
        averaged = self.programs.average_program(chosen, flight.weight, mask)
        return with_inner(state, buffers={**state.inner.buffers, **averaged})

    # -- land -----------------------------------------------------------------------------------

    def move(
        self,
        state: TrainState,
        act: Move,
        adopts: bool,
        ends: bool = False,
        last: bool = False,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Move the anchor by a payload, once the carrier has those of all regions.

        Args:
          adopts: whether regions here will adopt the anchor.
          ends: whether a run ends; a mean of exactly 0 then leaves the anchor alone.
          last: whether the last synchronisation has sent the payload.

        Returns:
          (state, device metrics).
        """
        fresh = None if act.fresh is None else state.in_flight[act.fresh]
        if act.key is None:
            came = Collected(emptied(fresh), None, {})
        else:
            state, came = self.carrier.collect(self, state, act.key, last, adopts)
        arrived = came.flight
        own = own_parts(arrived, fresh, act.applied) if self._takes_own_parts else None
        told, values = self.told(state, state.in_flight[act.key or act.fresh]), {}
        p = int(arrived.fragment)
        for weight_R in (arrived.weight,) if came.weights is None else came.weights:
            held, values = self.programs.outer_program(
                self._held(state, p),
                Contributions(
                    arrived.payload,
                    weight_R,
                    arrived.brought,
                    self._counted(weight_R),
                    draw=came.draw,
                    own=own,
                    norms=arrived.header.get("norms"),
                ),
                self._rows[p],
                told,
                if_news=ends,
                level=int(arrived.level),
                rules=self._rules[p],
            )
            state = with_anchor(state, p, held)
        if self.measurements is not None and not ends:
            state = self.measurements.landed(state, arrived, values)
        return state, values | came.times

    def adopt_payload(
        self,
        state: TrainState,
        act: Adopt,
        step: int,
        in_time: bool,
        values: dict[str, Any],
        events: list[Event],
        ends: bool = False,
    ) -> TrainState:
        """Let the regions of an act adopt the anchor, and drop the payload, or wait for the rest.

        Regions that the others did not count adopt with their next payload.

        Args:
          ends: whether a run ends, and everyone gets the newest anchor.
        """
        flight, p = state.in_flight[act.key or act.fresh], act.fragment
        lands = act.regions if in_time else np.zeros_like(act.regions)
        if act.fresh is None:
            lands = lands & flight.takes_part
        if lands.any() or not self.by_rounds:  # most arrivals are of others
            state = self.adopt(state, p, flight, lands, step)
        values = values if ends else {**values, **self._measured_by(state.landing[p])}
        since = step if ends or act.key is None else flight.sent
        if self.method.base == "received" and not ends:
            since = np.maximum(state.counters.last_landed[p], 0)
        counters, staleness = state.counters, step - since
        counters.last_landed[p] = np.where(lands, step, counters.last_landed[p])
        counters.staleness[p] = np.where(lands, staleness, counters.staleness[p])
        events.append(Event.of_landing(step, p, act.key, lands, staleness, values))
        follows = in_time and not ends  # else jobs have no part in the next round
        if self.method.topology is not None and (follows or not self.separate):
            self.send_ahead(state, p, events)
        later = None if act.later is None else act.later & flight.takes_part
        if later is None or not later.any():
            return state.replace(in_flight=without(state.in_flight, act.key))
        left = {"payload": None, "brought": None, "header": {}, "kept": None}
        left |= {"takes_part": later, "anchor_updated": np.bool_(True)}
        rest = dataclasses.replace(flight, **left)
        return state.replace(in_flight={**state.in_flight, act.key: rest})

    def land_now(self, state: TrainState, events: list[Event]) -> TrainState:
        """Land all payloads in flight in all regions that wait for them, due or not."""
        step = int(state.counters.step)
        flights = [
            (key, dataclasses.replace(flight, due=np.minimum(flight.due, step)))
            for key, flight in in_send_order(state.in_flight)
        ]
        stage = self.schedule.landings(step, View(state.counters, flights, self.count))
        return self.do(state, stage, np.ones(self.count, bool), True, events)

    def _held(self, state: TrainState, p: int) -> AnchorState:
        """What an outer step of fragment p replaces."""
        codec = state.codec[p] if self._personal else None
        merge = None if self.method.merge is None else state.merge[p]
        return AnchorState(self.fragments.leaves(state.anchor, p), state.outer[p], codec, merge)

    def _counted(self, weight_R: Any) -> np.ndarray | None:
        """`Contributions.counted`: between jobs there are weights of regions elsewhere, too."""
        if not (self._personal and self.separate):
            return None
        return np.asarray(weight_R)[list(self.programs.setup.here)] > 0

    def told(self, state: TrainState, flight: InFlight) -> dict[str, np.int32]:
        """Keywords of the outer and landing rules for a payload that lands, int32.

        Args:
          flight: as it stands in the state.
        """
        p, number = int(flight.fragment), round_of(state, flight)
        step = int(state.counters.step)
        if self.by_rounds:  # steps of regions differ; the tick at which the round opens
            step = self.schedule.opens(number * len(self.fragments) + p)
        told = {"fragment": p, "round": number, "step": step}
        return {name: np.int32(value) for name, value in told.items()}

    def adopt(self, state, p: int, flight: InFlight, lands: np.ndarray, step: int) -> TrainState:
        """Let the regions of `lands` adopt the anchor by the landing rule."""
        outer = None if self.method.hands_out is None else state.outer[p]
        staleness = np.full(self.count, step - int(flight.sent), np.int32)
        new = self.programs.landing_program(
            RegionState(self._values(state, p), state.landing[p]),
            LandingTarget(self.fragments.leaves(state.anchor, p), outer, flight.snapshot),
            Adoption(flight.accepted, lands, staleness),
            self._rows[p],
            self.told(state, flight),
            rules=self._rules[p],
        )
        state = with_taken_over(state, new.values.params, new.values.rounding)
        if state.received:
            state = self.mark_received(state, p, lands, outer)
        if self.schedule.by_token_rate:
            counted = self.programs.recount_program(state.inner.tokens, lands, np.int32(p))
            state = with_inner(state, tokens=counted)
        return state.replace(landing=with_item(state.landing, p, new.landing))

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

    def _measured_by(self, landing_state: Any) -> dict[str, jax.Array]:
        """Measurements of a landing rule: `correction_ratio` `[R]` of Taylor delay correction."""
        ratio = state_field(landing_state, "correction_ratio") if landing_state else None
        return {} if ratio is None else {"correction_ratio": self.programs.copy_program(ratio)}

    def send_ahead(self, state: TrainState, p: int, events: list[Event]) -> None:
        """Send the moved anchors to the groups of the next round; booked with the landing."""
        counters = state.counters
        groups = self.groups(int(counters.sends[p]))
        if (traffic := self.carrier.ahead(self, state, p, groups)) is not None:
            counters.count_bytes(traffic.sent, traffic.received)
            events[-1] = events[-1].sending_ahead(traffic, groups)

    # -- the end --------------------------------------------------------------------------------

    def restart(self, state: TrainState, p: int) -> TrainState:
        """Let every region take its anchor's values of fragment p."""
        taken = self.programs.restart_program(
            self.fragments.leaves(state.inner.params, p),
            self.fragments.leaves(state.anchor, p),
            self._rounding(state, p),
            self._rows[p],
        )
        return with_taken_over(state, *taken)

    def finish(
        self, state: TrainState, participants: AtTheEnd = None
    ) -> tuple[TrainState, list[Event]]:
        return finish(self, state, participants)


def with_anchor(state: TrainState, p: int, held: AnchorState) -> TrainState:
    """The state with what an outer step has made of fragment p."""
    outer, anchor = with_item(state.outer, p, held.outer), {**state.anchor, **held.anchor}
    state = state.replace(anchor=anchor, outer=outer)
    if held.codec is not None:
        state = state.replace(codec=with_item(state.codec, p, held.codec))
    if held.merge is not None:
        state = state.replace(merge=with_item(state.merge, p, held.merge))
    return state


def not_counted(state: TrainState, flight: InFlight) -> TrainState:
    """The state with the residual from before this payload, which the others did not count.

    Unless a later payload was encoded since: its residual follows from this one's.
    """
    p = int(flight.fragment)
    if flight.sent != state.counters.last_sent[p]:
        return state
    return state.replace(codec=with_item(state.codec, p, flight.kept))


def as_of(state: TrainState, step: int, behind: int) -> TrainState:
    """The state at a step, with counters of its own; `behind`: see `SyncCounters`."""
    return with_step(state.replace(counters=state.counters.copy()), step, behind)


def with_step(state: TrainState, step: int, behind: int) -> TrainState:
    """The state at a step."""
    now = vars(state.counters) | {"step": np.int64(step), "behind": np.int64(behind)}
    return state.replace(counters=type(state.counters)(**now))
