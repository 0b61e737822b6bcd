"""`RoundJobLoop`: the loop of regions that are jobs, have no steps in common, and meet in rounds.

A round moves everyone's anchor by the payloads that its record names. Rounds land in their order
(`rounds.RoundExchange`), so that all regions have the same anchor after the same rounds.
`LearnerJobLoop` (Decoupled DiLoCo) and `ArrivalJobLoop` (asynchronous methods) decide who reports
when, and what a region does with a round that lands.

A run ends with a round (`Engine.run(rounds=)`), after different numbers of steps. Every region
lands that round; the last synchronisation is an ordinary exchange of all living regions.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.mesh.arrays import fetch, place
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.runtime.job_carrier import JobCarrier
from lowcomm_jax.runtime.job_delivery import everyones, with_everyones_rows
from lowcomm_jax.runtime.loopback_exchange import LoopbackRounds
from lowcomm_jax.runtime.request import Arrived
from lowcomm_jax.runtime.rounds import Like, RoundExchange
from lowcomm_jax.runtime.slicing import named
from lowcomm_jax.runtime.state_transfer import SHARED, State, placed_like
from lowcomm_jax.schedule import Admission
from lowcomm_jax.state.leaves import named_leaves
from lowcomm_jax.state.train_state import InFlight, TrainState, rounds_landed
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop, as_of

PyTree = Any
Rounds = RoundExchange | LoopbackRounds


class RoundJobLoop(SyncLoop, abc.ABC):
    """The loop of regions at a pace of their own.

    Attributes:
      copied, copied_inner: fields of the state and of its `Inner` that a region which comes back
        copies from a peer, besides those that all have in common (`SHARED`).
      rounds: the exchange of rounds; None before the first step.
      landed: rounds that have landed here.
      committed, newest: of `rounds` (`RoundExchange.seen`), after the last step or report.
      until: the first round that the run does not have: it is neither opened nor landed.
    """

    copied: tuple[str, ...] = ()
    copied_inner: tuple[str, ...] = ()

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray, carrier: JobCarrier):
        super().__init__(programs, weights, carrier)
        self.delivery = delivery = carrier.delivery
        delivery.by_rounds, delivery.gives = True, self.given_to_peers
        self.rounds: Rounds | None = None
        self.landed = self.committed = 0
        self.newest = -1
        self.until: int | None = None
        self._fragments = len(self.fragments)
        self._mark: jax.Array | None = None
        self._at_the_end = False
        self._payload_K = [_payload_like(programs, p) for p in range(self._fragments)]

    # -- a step ---------------------------------------------------------------------------------

    def is_due(self, state: TrainState, step: int) -> bool:
        """True: a region looks for rounds after every step."""
        return True

    def until_rounds(
        self, state: TrainState, rounds: int, batches: Iterable[PyTree]
    ) -> Iterator[PyTree]:
        """The batches, until so many rounds have landed here."""
        self.landed, self.until = rounds_landed(state), rounds
        if self._at_the_end:
            # The last synchronisation was a round of every fragment, without a record of its own.
            self.rounds.go_on(self.landed)
            self.committed, self.newest = self.rounds.seen()
            self._at_the_end = False
            self.goes_on(state)
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
        self.committed, self.newest = self._begun(state).stepped()
        state = as_of(state, now, behind=0)
        state = self.land_arrived(state, now, events)
        if mask.any():
            state = self.report(state, now, mask, events)
        self.tell(state)
        return state

    @abc.abstractmethod
    def report(
        self, state: TrainState, now: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Report to rounds where it is time."""

    def goes_on(self, state: TrainState) -> None:
        """Called where a run goes on after its last synchronisation."""

    def tell(self, state: TrainState) -> None:
        """Tell the others of this region's progress, and give a newcomer what it asks for."""
        self.delivery.exchange.beat(self.landed)
        self.delivery.answer(state)

    def _begun(self, state: TrainState) -> Rounds:
        if self.rounds is None:
            self.landed = rounds_landed(state)
            like_K = [self._like_of(p) for p in range(self._fragments)]
            given = (*self.admission(), int(self.schedule.delay), like_K, self.landed)
            self.rounds = self.delivery.exchange.rounds(*given)
            self.committed, self.newest = self.rounds.seen()
            self.begins(state)
        return self.rounds

    @abc.abstractmethod
    def admission(self) -> tuple[Admission, int]:
        """(for whom a round waits, most regions that it admits)."""

    def begins(self, state: TrainState) -> None:
        """Called before the first step, once there is an exchange of rounds."""

    def _keep_step_with_device(self, state: TrainState) -> None:
        """Wait for the step before, so that landings and reports do not run ahead of training."""
        mark = jnp.copy(state.inner.step)  # the state itself is donated to the next step
        if self._mark is not None:
            jax.block_until_ready(self._mark)
        self._mark = mark

    # -- landings -------------------------------------------------------------------------------

    def own(self, state: TrainState, number: int) -> tuple[str, InFlight] | None:
        """This region's report of a round: (key, flight); None = it has not reported."""
        p = number % self._fragments
        return next((i for i in state.in_flight.items() if i[1].fragment == p), None)

    def land_arrived(self, state: TrainState, now: int, events: list[Event]) -> TrainState:
        """Land, in their order, the rounds that have arrived and are due."""
        while self.until is None or self.landed < self.until:
            number = self.landed
            reported = self.own(state, number)
            if reported is not None and not self.may_land(reported[1], now):
                return state
            arrived = self.rounds.take(number)
            if arrived is None:
                return state
            self.rounds.compare(number, self._terms(state, number))
            state = self.land_round(state, reported, arrived, now, events)
            self.rounds.landed(number)
            self.landed += 1
        return state

    def may_land(self, flight: InFlight, now: int) -> bool:
        """Whether the round of this region's report may land."""
        del flight, now
        return True

    @abc.abstractmethod
    def land_round(
        self,
        state: TrainState,
        reported: tuple[str, InFlight] | None,
        arrived: Arrived,
        now: int,
        events: list[Event],
    ) -> TrainState:
        """Land the next round, `landed`; `reported`: this region's report of it (`own`)."""

    def all_payloads(self, flight: InFlight, arrived: Arrived) -> InFlight:
        """The flight as those of all regions together."""
        rows = arrived.arrays
        payload = everyones(self._payload_K[int(flight.fragment)], rows)
        return with_everyones_rows(flight, payload, rows, arrived.participants)

    def measured(self, arrived: Arrived, waited_s: float = 0.0) -> dict[str, np.ndarray]:
        """Values of the event of a round that lands, besides those of the anchor's move."""
        return {
            "round": np.array(self.landed),
            "admitted": arrived.participants.copy(),
            "travel_seconds": np.array([arrived.seconds], np.float32),
            "waited_seconds": np.array([waited_s], np.float32),
        }

    def told(self, state: TrainState, flight: InFlight) -> dict[str, np.int32]:
        """As on one mesh, but `step` is the tick at which the round opens: steps differ here."""
        del state
        told = {"fragment": flight.fragment, "round": self.landed // self._fragments}
        told["step"] = self.schedule.opens(self.landed)
        return {name: np.int32(value) for name, value in told.items()}

    def spectator(self, p: int, now: int) -> InFlight:
        """The flight of a round to which this region has not reported."""
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

    def report_to(self, state: TrainState, number: int, flight: InFlight) -> None:
        """Send the payload of a flight to a round, which it opens if nobody has."""
        arrays = self.delivery.arrays_to_send(flight)
        self.rounds.report(number, arrays, self._terms(state, number), int(flight.sent))
        self.newest = max(self.newest, number)

    def _terms(self, state: TrainState, number: int) -> dict[str, Any]:
        """What all that take part in a round must agree on."""
        p = number % self._fragments
        digest = self.delivery.anchor_history.sent(state.anchor, self.fragments, p)
        return {"round": number, "fragment": p, **digest}

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        """Every region gets all payloads whole, as if all others were admitted."""
        if self._at_the_end:
            return super().traffic(exchange, like, mask, groups, header)
        return self.delivery.traffic_in_whole(exchange.nbytes(like) + header, mask)

    def _like_of(self, p: int) -> Like:
        """Shapes of what a region sends of a fragment."""
        like = named(self._payload_K[p])
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in like.items()}
        return shapes | {"weight": jax.ShapeDtypeStruct((1,), np.float32)}

    # -- the end, and after a restart -----------------------------------------------------------

    def run_all(self, state: TrainState, events: list[Event]) -> TrainState:
        """The state as it is: a run ends when its last round has landed.

        Raises:
          ValueError: the last round has not landed.
        """
        landed = rounds_landed(state)
        short = self.until is None or landed < self.until or bool(state.in_flight)
        if short and not self.carrier.ended_before(state):  # the others may have ended without us
            raise ValueError(
                f"{landed} rounds have landed here, of {self.until}: a run ends with a round, the "
                "same for all; train with engine.run(state, batches, rounds=...) first"
            )
        self._at_the_end = True
        return state

    def everyone_landed(self, state: TrainState, p: int, step: int) -> bool:
        """False: others' steps are unknown here, so the last synchronisation is always done."""
        return False

    # -- copies of a peer -----------------------------------------------------------------------

    def given_to_peers(self, state: TrainState) -> State:
        """What a region that comes back copies: (rounds landed, arrays by name, document).

        The anchor, the outer state, the counters, and what `copied` and `copied_inner` name. Only
        the first process of a job gets the arrays.
        """
        names: dict[str, Any] = {}
        for field in (*SHARED, "counters", *self.copied):
            names |= named_leaves(field, getattr(state, field))
        for field in self.copied_inner:
            names |= named_leaves(f"inner/{field}", getattr(state.inner, field))
        reports = np.zeros(len(state.counters.sends), np.int64)
        for flight in state.in_flight.values():
            reports[int(flight.fragment)] += 1
        document = {"landed": (state.counters.sends - reports).tolist()}
        return rounds_landed(state), fetch(names, here=leader().leads), document

    def start_from_peer(
        self, state: TrainState, arrays: dict[str, np.ndarray], document: dict
    ) -> TrainState:
        """The state of a region that has copied a peer (`given_to_peers`).

        It is at the peer's round. Its own step stays, or becomes the peer's if that is later, so
        that no sample is read twice. Counts since a fragment was received start again.

        Raises:
          ValueError: the arrays are of another model or method; lists every difference.
        """
        fields = (*SHARED, *self.copied)
        trees = {field: getattr(state, field) for field in fields}
        trees |= {f"inner/{field}": getattr(state.inner, field) for field in self.copied_inner}
        copied = placed_like(trees, arrays, "a peer's")
        counters = state.counters.copy()
        step = np.int64(max(int(counters.step), int(arrays["counters/step"])))
        counters = dataclasses.replace(counters, step=step, behind=np.int64(0))
        counters.sends[:] = document["landed"]
        counters.last_landed[:] = step
        counters.last_sent[:], counters.previous_sent[:] = arrays["counters/last_sent"], -1
        zeros = np.zeros(state.inner.tokens.shape, np.float32)
        own = {field: copied[f"inner/{field}"] for field in self.copied_inner}
        own["tokens"] = place(zeros, state.inner.tokens.sharding)
        made = np.full(state.inner.step.shape, step, np.int32)
        own["step"] = place(made, state.inner.step.sharding)
        inner = dataclasses.replace(state.inner, **own)
        shared = {field: copied[field] for field in fields}
        return state.replace(inner=inner, in_flight={}, counters=counters, **shared)


def _payload_like(programs: RoundPrograms, p: int) -> PyTree:
    """Shapes of one region's payload of a fragment, `[1, ...]`."""
    like, codec = programs.fragments.like(p), programs.exchange.codec
    dense = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in like.items()}
    if codec is not None:
        codec = codec.at(0)
        dense = jax.eval_shape(lambda tree: codec.encode(tree, codec.init(like))[0], dense)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), dense)
