"""`RoundCarrier`: the carrier of a job that is one region of several, each at a pace of its own.

A round moves everyone's anchor by the payloads that its record names. Rounds land in their order
(`paced_rounds.RoundExchange`), so that all regions have the same anchor after the same rounds. The
schedule says when a region reports and what it does with a round that lands (`schedule.learners`,
`schedule.arrivals`); `agreed` tells it what the records say.

A run ends with a round (`Engine.run(rounds=)`), after different numbers of steps. Every region
lands that round; the last synchronisation is an ordinary exchange of all living regions.

Differs from one mesh: a report has the values of its own moment, not of that when the round closes.
Real arrivals take the place of ticks, and no two are at once; declared speeds only say after how
many steps a region arrives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.jobs.job_carrier import JobCarrier
from lowcomm_jax.jobs.payload_rows import (
    HEADER,
    arrays_to_send,
    everyones,
    nobodys_flight,
    with_everyones_rows,
)
from lowcomm_jax.rounds.loopback_exchange import LoopbackRounds
from lowcomm_jax.rounds.paced_rounds import Like, RoundExchange
from lowcomm_jax.rounds.slicing import named
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.schedule.base import RoundsAgreed, Stage, Wait
from lowcomm_jax.state.train_state import InFlight, TrainState, in_send_order, rounds_landed
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop, not_counted

PyTree = Any


class RoundCarrier:
    """`sync.carrier.Carrier` of a region at a pace of its own.

    Attributes:
      exchanges: the carrier of the last synchronisation.
      rounds: the exchange of rounds; None before the first step.
      landed: rounds that have landed here.
      last: the first round that the run does not have; None = it has no end.
      newest: the newest round that was seen open.
    """

    def __init__(self, programs: RoundPrograms, exchanges: JobCarrier):
        method = programs.method
        self.paused, self.header = False, {}
        self.exchanges = exchanges
        self.rounds: RoundExchange | LoopbackRounds | None = None
        self.landed, self.last = 0, None
        self._programs, self._schedule = programs, method.schedule
        self._ended = False
        self._stands_still = method.schedule.most == 1  # from its arrival until that lands
        self._count = len(programs.fragments)
        self._payload_K = [_payload_like(programs, p) for p in range(self._count)]
        like = programs.fragments.like(0)
        self._nbytes = programs.exchange.at(0).nbytes(like) + 4 * programs.norms(0)
        self._committed, self.newest, self._since = 0, -1, 0
        self._reported = np.array(-1)  # the round that was reported to last; told with the send
        self._reported_s = 0.0
        self._mark: jax.Array | None = None

    def alone(self) -> RoundCarrier:
        """A carrier that gets its own payloads back, in place of those of the others."""
        return RoundCarrier(self._programs, self.exchanges.alone())

    def until_rounds(
        self, state: TrainState, rounds: int, batches: Iterable[PyTree]
    ) -> Iterator[PyTree]:
        """The batches, until so many rounds have landed here."""
        # Now: a paused step may land a round before the first batch is asked for.
        self.landed, self.last = rounds_landed(state), rounds

        def until() -> Iterator[PyTree]:
            for batch in batches:
                if self.landed >= self.last:
                    return
                yield batch
                if self.landed >= self.last:
                    return

        return until()

    # -- what is due ----------------------------------------------------------------------------

    def begins(self, loop: SyncLoop, state: TrainState) -> None:
        if state.counters.behind:  # a step was made
            self._keep_step_with_device(state)
            self._begin(loop, state)
            self._see(*self.rounds.stepped(), int(state.counters.step))

    def _begin(self, loop: SyncLoop, state: TrainState) -> None:
        """Take part in rounds, from the first one that has not landed here."""
        if self.rounds is not None and not self._ended:
            return
        self.landed = rounds_landed(state)
        if self._ended and self.last is not None and self.landed >= self.last:
            self.last = None  # of the run that has ended
        if self.rounds is None:
            schedule, like_K = self._schedule, [self._like(p) for p in range(self._count)]
            most = schedule.most or loop.total
            given = (schedule.admission, most, int(schedule.delay), like_K, self.landed)
            self.rounds = self.exchanges.exchange.rounds(*given)
        else:
            # The last synchronisation was a round of every fragment, without a record of its own.
            self.rounds.go_on(self.landed)
        self._ended = False
        self._committed, self.newest = self.rounds.seen()
        self._since = int(state.counters.step) - 1

    def _see(self, committed: int, newest: int, step: int) -> None:
        """Note what the records say, and at which step this region has seen the newest round."""
        if newest > self.newest:
            self.newest, self._since = newest, step
        self._committed = committed

    def _keep_step_with_device(self, state: TrainState) -> None:
        """Wait for the step before, so that landings and reports do not run ahead of training."""
        mark = jnp.copy(state.inner.step)  # the state itself is donated to the next step
        if self._mark is not None:
            jax.block_until_ready(self._mark)
        self._mark = mark

    def agreed(self, loop: SyncLoop, state: TrainState) -> RoundsAgreed:
        """What the records of rounds say by now (`View.agreed`)."""
        if self._over and self._stands_still and state.in_flight:
            self._reported[...] = -1  # it is taken back
        seen = self._committed, self.newest, self._since
        ours = self._names_ours()
        arrived = ours is not None, bool(ours)
        return RoundsAgreed(self.exchanges.region, self.landed, *seen, self.last, *arrived)

    @property
    def _over(self) -> bool:
        return self.last is not None and self.landed >= self.last

    def _names_ours(self) -> bool | None:
        """Of the next round, see `RoundExchange.names_ours`; None where the run has no more."""
        return None if self._over else self.rounds.names_ours(self.landed)

    def reach(self, loop: SyncLoop, state: TrainState, stage: Stage, begun: bool) -> bool:
        """Where the region stands still, wait for the next round.

        A report that came second goes to that round, too.
        """
        while isinstance(stage[0], Wait) and self._names_ours() is None:
            if self.exchanges.stopped():
                self.paused = True
                return False
            if self._reported != self.landed:
                [flight] = state.in_flight.values()
                self._report(loop, state, self.landed, flight)
            self.rounds.wait()
            self.exchanges.tell(state, self.landed)
        return True

    def done(self, loop: SyncLoop, state: TrainState, in_time: bool) -> None:
        self.exchanges.tell(state, self.landed)

    # -- payloads -------------------------------------------------------------------------------

    def post(
        self, loop: SyncLoop, state: TrainState, key: str, flight: InFlight, again: bool = False
    ) -> dict[str, np.ndarray]:
        p = int(flight.fragment)
        # Its own report is counted, and the fragment's rounds before it have landed.
        number = (int(state.counters.sends[p]) - 1) * self._count + p
        self._reported, self._reported_s = np.array(number), time.monotonic()
        self._report(loop, state, number, flight)
        return {"round": self._reported}

    def _report(self, loop: SyncLoop, state: TrainState, number: int, flight: InFlight) -> None:
        """Send the payload of a flight to a round, which it opens if nobody has."""
        arrays, sent = arrays_to_send(flight), int(flight.sent)
        self.rounds.report(number, arrays, self._terms(loop, state, number), sent)
        self._reported[...] = number
        self._see(self._committed, max(self.newest, number), int(state.counters.step))

    def _terms(self, loop: SyncLoop, state: TrainState, number: int) -> dict[str, Any]:
        """What all that take part in a round must agree on."""
        p = number % self._count
        digest = self.exchanges.anchor_history.sent(state.anchor, loop.fragments, p)
        return {"round": number, "fragment": p, **digest}

    def collect(
        self, loop: SyncLoop, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        """The payloads that the next round's record names.

        A region that was not admitted gets its residual back. One that has not reported has a
        payload of nobody in flight, as long as it lands.
        """
        number, counters = self.landed, state.counters
        p = number % self._count
        arrived = self.rounds.take(number, self._terms(loop, state, number))
        flight, waited_s = state.in_flight.get(key), 0.0
        if flight is None:
            flight = nobodys_flight(p, int(counters.step))
            counters.sends[p] += 1
            counters.bytes_received += self._nbytes * self._stands_still
        elif arrived.ours and self._stands_still:
            waited_s = time.monotonic() - self._reported_s
        elif not arrived.ours:
            state = not_counted(state, flight)
        flight = dataclasses.replace(flight, takes_part=np.ones(1, bool))  # it may adopt
        state = state.replace(in_flight={**state.in_flight, key: flight})
        self.landed += 1
        payload = everyones(self._payload_K[p], arrived.arrays)
        values = {
            "round": np.array(number),
            "admitted": arrived.participants.copy(),
            "travel_seconds": np.array([arrived.seconds], np.float32),
            "waited_seconds": np.array([waited_s], np.float32),
        }
        everyone = with_everyones_rows(flight, payload, arrived.arrays, arrived.participants)
        return state, Collected(everyone, None, values)

    def traffic(self, exchange, p: int, like, mask: np.ndarray, groups, header: int) -> Traffic:
        """Every region gets all payloads whole, as if all others were admitted.

        Of arrivals the others' are received as they land, not at an own send.
        """
        found = self.exchanges.announced.of_all(exchange.nbytes(like) + header, mask)
        return found._replace(received=0 * found.received) if self._stands_still else found

    def ahead(self, loop: SyncLoop, state: TrainState, p: int, groups: Groups) -> Traffic | None:
        """None: there are no groups."""

    def _like(self, p: int) -> Like:
        """Shapes of what a region sends of a fragment."""
        like = named(self._payload_K[p])
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in like.items()}
        if count := self._programs.norms(p):
            shapes[f"{HEADER}/norms"] = jax.ShapeDtypeStruct((1, count), np.float32)
        return shapes | {"weight": jax.ShapeDtypeStruct((1,), np.float32)}

    # -- the end, and after a restart -------------------------------------------------------------

    @contextlib.contextmanager
    def ending(self, loop: SyncLoop, state: TrainState) -> Iterator[JobCarrier]:
        """The last synchronisation is an ordinary exchange."""
        landed = rounds_landed(state)
        short = self.last is None or landed < self.last or bool(state.in_flight)
        # The others may have ended without us.
        if short and not self.exchanges.ended_before(state):
            raise ValueError(
                f"{landed} rounds have landed here, of {self.last}: a run ends with a round, the "
                "same for all; train with engine.run(state, batches, rounds=...) first"
            )
        yield self.exchanges  # once what a paused step has still to do, of rounds, is done
        self._ended = True

    def reconnect(self, loop: SyncLoop, state: TrainState) -> None:
        """Report again what a restored state has reported and not landed."""
        self.paused = int(state.counters.behind) == 1
        self._begin(loop, state)
        for key, flight in in_send_order(state.in_flight):
            self.post(loop, state, key, flight, again=True)
        self._since = int(state.counters.step)


def carrier_of(programs: RoundPrograms, exchanges: JobCarrier) -> JobCarrier | RoundCarrier:
    """The carrier of a job that is one region of several."""
    by_rounds = programs.method.schedule.by_rounds
    return RoundCarrier(programs, exchanges) if by_rounds else exchanges


def _payload_like(programs: RoundPrograms, p: int) -> PyTree:
    """Shapes of one region's payload of a fragment, `[1, ...]`."""
    payload = programs.exchange.at(0).payload_like(programs.fragments.like(p))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), payload)
