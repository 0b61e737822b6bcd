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

A run ends with a round (`Engine.run(rounds=)`), after different numbers of steps. Every learner
lands that round; the last synchronisation is an ordinary exchange of all living learners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic, all_gather
from lowcomm_jax.history import Event
from lowcomm_jax.mesh.arrays import fetch, place
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.runtime.connect import LockstepRounds
from lowcomm_jax.runtime.job_delivery import JobDelivery, everyones, with_everyones_rows
from lowcomm_jax.runtime.job_loop import JobLoop
from lowcomm_jax.runtime.loopback_exchange import LoopbackRounds
from lowcomm_jax.runtime.request import Arrived
from lowcomm_jax.runtime.rounds import Like, RoundExchange
from lowcomm_jax.runtime.slicing import named
from lowcomm_jax.runtime.state_transfer import SHARED, State
from lowcomm_jax.state.leaves import named_leaves, saved_name
from lowcomm_jax.state.train_state import (
    InFlight,
    TrainState,
    flight_key,
    in_send_order,
    rounds_landed,
    with_item,
    without,
)
from lowcomm_jax.sync.learner_loop import LearnerLoop
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop, as_of

PyTree = Any
Rounds = RoundExchange | LockstepRounds | LoopbackRounds
COPIED = ("params", "buffers", "opt")
"""Fields of `Inner` that a learner copies from a peer."""


class LearnerJobLoop(JobLoop, LearnerLoop):
    """`JobLoop` for `schedule.Learners`.

    Attributes:
      rounds: the exchange of rounds; None before the first step.
      landed: rounds that have landed here.
      until: the first round that the run does not have: it is neither opened nor landed.
    """

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray, delivery: JobDelivery):
        super().__init__(programs, weights, delivery)
        delivery.by_rounds, delivery.gives = True, learner_state
        self.rounds: Rounds | None = None
        self.landed = 0
        self.until: int | None = None
        self._fragments = len(self.fragments)
        self._seen = (-1, 0)  # the newest round, and the step at which it was first seen
        self._mark: jax.Array | None = None
        self._at_the_end = False
        self._payload_K = [_payload_like(programs, p) for p in range(self._fragments)]

    # -- a step ---------------------------------------------------------------------------------

    def upcoming(self, state: TrainState) -> int:
        """The next step: a learner looks for rounds after every one."""
        return state.counters.done_until + 1

    def until_rounds(
        self, state: TrainState, rounds: int, batches: Iterable[PyTree]
    ) -> Iterator[PyTree]:
        """The batches, until so many rounds have landed here."""
        self.landed, self.until = rounds_landed(state), rounds
        if self._at_the_end:
            # The last synchronisation was a round of every fragment, without a record of its own.
            self.rounds.go_on(self.landed)
            self._seen, self._at_the_end = (self.landed - 1, int(state.counters.step)), False
        for batch in batches:
            if self.landed >= self.until:
                return
            yield batch
            if self.landed >= self.until:
                return

    def run_due(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Land rounds that have arrived, report, and open the next round where it is time."""
        now = int(state.counters.step)
        self._keep_step_with_device(state)
        rounds = self._begun(state)
        rounds.stepped()
        rounds.check()
        state = as_of(state, now, behind=0)
        state = self._land_arrived(state, now, events)
        if mask.any():
            state = self._report(state, now, mask, events)
        self.delivery.trained = now
        self.delivery.exchange.beat(self.landed)
        self.delivery.answer(state)
        return state

    def _begun(self, state: TrainState) -> Rounds:
        rounds = self.rounds
        if rounds is None:
            self.landed = rounds_landed(state)
            like_K = [self._like_of(p) for p in range(self._fragments)]
            given = (self.schedule.admission, int(self.schedule.delay), like_K, self.landed)
            rounds = self.rounds = self.delivery.exchange.rounds(*given)
            self._seen = rounds.newest, int(state.counters.step) - 1
        return rounds

    def _keep_step_with_device(self, state: TrainState) -> None:
        """Wait for the step before, so that landings and reports do not run ahead of training."""
        mark = jnp.copy(state.inner.step)  # the state itself is donated to the next step
        if self._mark is not None:
            jax.block_until_ready(self._mark)
        self._mark = mark

    # -- landings -------------------------------------------------------------------------------

    def _land_arrived(self, state: TrainState, now: int, events: list[Event]) -> TrainState:
        while self.until is None or self.landed < self.until:
            flight = self._own(state, self.landed)
            if flight is not None and not self._is_due(flight[1], now):
                return state
            arrived = self.rounds.take(self.landed)
            if arrived is None:
                return state
            self.rounds.compare(self.landed, self._terms(state, self.landed))
            p = self.landed % self._fragments
            state = self._land_round(state, p, flight, arrived, now, events)
            self.rounds.landed(self.landed)
            self.landed += 1
        return state

    def _is_due(self, flight: InFlight, now: int) -> bool:
        """Whether the report of the next round is tau ticks old: by own steps, or by rounds."""
        ticks = self.schedule.opens(self.rounds.newest) - self.schedule.opens(self.landed)
        return now >= int(flight.due[0]) or ticks >= self.schedule.delay

    def _own(self, state: TrainState, number: int) -> tuple[str, InFlight] | None:
        """This learner's report of a round: (key, flight); None = it has not reported."""
        p = number % self._fragments
        return next((i for i in state.in_flight.items() if i[1].fragment == p), None)

    def _land_round(
        self, state: TrainState, p: int, own, arrived: Arrived, now: int, events: list[Event]
    ) -> TrainState:
        """Move the anchor by the payloads of all that were admitted, and adopt it."""
        counters = state.counters.copy()
        key, flight = own or (flight_key(p, now), self._spectator(p, now))
        if own is None:
            counters.sends[p] += 1
        state = state.replace(in_flight=without(state.in_flight, key), counters=counters)
        rows = {name: x[:, 0] for name, x in arrived.arrays.items()}
        admitted = arrived.participants
        if own is not None and not admitted[self.delivery.region]:
            state = state.replace(codec=with_item(state.codec, p, flight.kept))
        payload = everyones(self._payload_K[p], rows)
        everyone = with_everyones_rows(flight, payload, rows, admitted)
        state, values = self.update_anchor(state, everyone)
        state = self.adopt(state, p, flight, np.ones(1, bool), now)
        told = {"round": np.array(self.landed), "admitted": admitted.copy()}
        told["travel_seconds"] = np.array([arrived.seconds], np.float32)
        told["waited_seconds"] = np.zeros(1, np.float32)
        staleness = now - int(flight.sent)
        SyncLoop.log_landing(
            self, state, p, key, np.ones(1, bool), staleness, now, {**values, **told}, events
        )
        return state

    def told(self, state: TrainState, flight: InFlight) -> dict[str, np.int32]:
        """As on one mesh, but `step` is the tick at which the round opens: steps differ here."""
        del state
        told = {"fragment": flight.fragment, "round": self.landed // self._fragments}
        told["step"] = self.schedule.opens(self.landed)
        return {name: np.int32(value) for name, value in told.items()}

    def _spectator(self, p: int, now: int) -> InFlight:
        """The flight of a round to which this learner has not reported."""
        return InFlight(
            payload=None,
            snapshot=None,
            accepted=np.ones(1, bool),
            weight=np.zeros(1, np.float32),
            fragment=np.int64(p),
            sent=np.int64(now),
            due=np.full(1, now, np.int64),
            takes_part=np.zeros(1, bool),
            anchor_updated=np.bool_(False),
            level=np.int64(0),
            header={},
        )

    # -- reports --------------------------------------------------------------------------------

    def _report(
        self, state: TrainState, now: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Report to all open rounds that this learner can, and open the next where it is time."""
        rounds = self.rounds
        if rounds.newest > self._seen[0]:
            self._seen = rounds.newest, now
        for number in range(max(self.landed, rounds.committed), self._seen[0] + 1):
            if self._can_report(state, number, now):
                state = self._send_report(state, number, now, mask, events)
        number, since = self._seen[0] + 1, now - self._seen[1]
        if since >= self.schedule.gap(number) and self._can_report(state, number, now):
            state = self._send_report(state, number, now, mask, events)
            self._seen = number, now
        return state

    def _send_report(self, state, number: int, now: int, mask, events) -> TrainState:
        state = self.send(state, number % self._fragments, now, mask, events)
        events[-1].values["round"] = np.array(number)
        return state

    def _can_report(self, state: TrainState, number: int, now: int) -> bool:
        p, last = number % self._fragments, self.landed + self._fragments
        within = self.until is None or number < self.until
        stepped = now > max(0, int(state.counters.last_landed[p, 0]))
        return within and number < last and stepped and self._own(state, number) is None

    def due_at(self, p: int, step: int) -> np.ndarray:
        del p
        return step + self._delay

    def waiting(self, mask: np.ndarray) -> np.ndarray:
        return mask.copy()

    def adopters(self, flight: InFlight, due_R: np.ndarray) -> np.ndarray:
        del flight
        return due_R

    def _start(self, state, key: str, flight: InFlight, number: int, again: bool = False) -> None:
        if self._at_the_end:
            super()._start(state, key, flight, number, again)
            return
        p = int(flight.fragment)
        # Its own report is counted, and the fragment's rounds before it have landed.
        number = (int(state.counters.sends[p]) - 1) * self._fragments + p
        arrays = self.delivery.arrays_to_send(flight, state.anchor, self._like[p])
        self.rounds.report(number, arrays, self._terms(state, number), int(flight.sent))

    def _terms(self, state: TrainState, number: int) -> dict[str, Any]:
        """What all that take part in a round must agree on."""
        p = number % self._fragments
        digest = self.delivery.anchor_history.sent(state.anchor, self.fragments, p)
        return {"round": number, "fragment": p, **digest}

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        """Every learner gets all payloads whole, as if all others were admitted."""
        if self._at_the_end:
            return super().traffic(exchange, like, mask, groups, header)
        everyone, region = np.ones(self.total, bool), self.delivery.region
        everyone[region] = mask.any()
        found, own = all_gather(exchange.nbytes(like) + header, everyone), slice(region, region + 1)
        return found._replace(sent=found.sent[own], received=found.received[own])

    def _like_of(self, p: int) -> Like:
        """Shapes of what a learner sends of a fragment."""
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in self._named_K(p).items()}
        return shapes | {"weight": jax.ShapeDtypeStruct((1,), np.float32)}

    def _named_K(self, p: int) -> dict[str, jax.ShapeDtypeStruct]:
        return named(self._payload_K[p])

    # -- the end, and after a restart -----------------------------------------------------------

    def run_all(self, state: TrainState, events: list[Event]) -> TrainState:
        """The state as it is: a run of learners ends when its last round has landed.

        Raises:
          ValueError: the last round has not landed.
        """
        landed = rounds_landed(state)
        if self.until is None or landed < self.until or state.in_flight:
            raise ValueError(
                f"{landed} rounds have landed here, of {self.until}: learners end with a round, "
                "the same for all; train with Engine.run(state, batches, rounds=...) first"
            )
        self._at_the_end = True
        return state

    def everyone_landed(self, state: TrainState, p: int, step: int) -> bool:
        """False: others' steps are unknown here, so the last synchronisation is always done."""
        return False

    def reconnect(self, state: TrainState) -> None:
        """Report again what a restored state has reported and not landed."""
        self._begun(state)
        for key, flight in in_send_order(state.in_flight):
            self._start(state, key, flight, 0, again=True)
        self._seen = self.rounds.newest, int(state.counters.step)


def learner_state(state: TrainState) -> State:
    """What a learner that comes back copies: (rounds landed, arrays by name, document).

    As on one mesh: parameters, buffers, optimizer and landing state; with the anchor, the outer
    state, and the counters. Only the first process of a job gets the arrays.
    """
    names: dict[str, Any] = {}
    for field in (*SHARED, "counters", "landing"):
        names |= named_leaves(saved_name(field), getattr(state, field))
    for field in COPIED:
        names |= named_leaves(f"inner/{field}", getattr(state.inner, field))
    reports = np.zeros(len(state.counters.sends), np.int64)
    for flight in state.in_flight.values():
        reports[int(flight.fragment)] += 1
    document = {"landed": (state.counters.sends - reports).tolist()}
    return rounds_landed(state), fetch(names, here=leader().leads), document


def start_from_peer(
    loop: LearnerJobLoop, state: TrainState, arrays: dict[str, np.ndarray], document: dict
) -> TrainState:
    """The state of a learner that has copied a peer (`learner_state`).

    It is at the peer's round. Its own step stays, or becomes the peer's if that is later, so that
    no sample is read twice. Counts since a fragment was received start again.

    Raises:
      ValueError: the arrays are of another model or method; lists every difference.
    """
    trees = {field: getattr(state, field) for field in (*SHARED, "landing")}
    trees |= {f"inner/{field}": getattr(state.inner, field) for field in COPIED}
    like = {
        name: x for prefix, tree in trees.items() for name, x in named_leaves(prefix, tree).items()
    }
    wrong = [
        f"{name}: {arrays[name].shape if name in arrays else 'missing'} -> {x.shape}"
        for name, x in like.items()
        if name not in arrays or arrays[name].shape != x.shape
    ]
    if wrong:
        raise ValueError("a peer's state does not fit:\n- " + "\n- ".join(wrong))

    def copied(prefix: str) -> PyTree:
        tree = trees[prefix]
        leaves = [place(arrays[n], x.sharding) for n, x in named_leaves(prefix, tree).items()]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    counters = state.counters.copy()
    step = np.int64(max(int(counters.step), int(arrays["clock/step"])))
    counters = dataclasses.replace(counters, step=step, behind=np.int64(0))
    counters.sends[:] = document["landed"]
    counters.last_landed[:] = step
    counters.last_sent[:], counters.previous_sent[:] = arrays["clock/last_sent"], -1
    tokens = place(np.zeros(state.inner.tokens.shape, np.float32), state.inner.tokens.sharding)
    own = {field: copied(f"inner/{field}") for field in COPIED}
    made = place(np.full(state.inner.step.shape, step, np.int32), state.inner.step.sharding)
    inner = dataclasses.replace(state.inner, **own, tokens=tokens, step=made)
    shared = {field: copied(field) for field in (*SHARED, "landing")}
    return state.replace(inner=inner, in_flight={}, counters=counters, **shared)


def _payload_like(programs: RoundPrograms, p: int) -> PyTree:
    """Shapes of one learner's payload of a fragment, `[1, ...]`."""
    like, codec = programs.fragments.like(p), programs.exchange.codec
    dense = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in like.items()}
    if codec is not None:
        codec = codec.at(0)
        dense = jax.eval_shape(lambda tree: codec.encode(tree, codec.init(like))[0], dense)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), dense)
