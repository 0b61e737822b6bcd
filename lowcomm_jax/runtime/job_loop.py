"""`JobLoop`: the loop over events of a job that is one region; `make_loop` picks its kind.

A send hands the payload to `JobDelivery`; a landing waits for everyone's. While a job cannot reach
the other regions, `run_due` defers events, and the job keeps training; `SyncCounters.behind` counts
the steps since. On reconnection the loop runs the deferred events in order. This region counts as
absent in each: it sends nothing, and adopts nothing that arrives, since that would undo what it
trained meanwhile. So anchors and decisions are those of the other regions, and its next send has
all progress since. What the others have landed it reads all at once, and what all have missed they
end at once (`RemoteExchange.fetch_ahead`). Slower regions may still be where this one was long ago:
they are waited for.

What happens to a region that is alive and does not answer is decided in `whole_exchange.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.history import Event
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.state.train_state import (
    InFlight,
    TrainState,
    flight_key,
    in_send_order,
    with_inner,
)
from lowcomm_jax.sync.gossip_loop import GossipLoop
from lowcomm_jax.sync.one_period_overlap import OnePeriodLoop
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop, as_of, due

_SLOWER = 4  # times as long as here may a step take elsewhere


class Counted(NamedTuple):
    """Who was counted in one exchange.

    Attributes:
      fragment, step: the fragment that was sent, and after which step.
      number: of the fragment's sends, from 0.
      last: whether this was the last synchronisation of a run.
      counted_N: bool `[N]`, of all regions that exchanged it, ascending.
      adopted: whether regions of this job that were counted adopt it.
    """

    fragment: int
    step: int
    number: int
    last: bool
    counted_N: np.ndarray
    adopted: bool


@dataclasses.dataclass
class OutagePacing:
    """How fast this job has trained since it was cut off, until it has caught up with the others.

    Attributes:
      first, last: (step, seconds) of the first and the last deferral; None = nothing is deferred.
    """

    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def deferred(self, step: int) -> None:
        """Note that something is still deferred after this step."""
        self.last = step, time.monotonic()
        self.first = self.first or self.last

    def patience_s(self, steps: int) -> float:
        """How long the others may take for so many steps."""
        if self.first is None or self.first[0] == self.last[0]:
            return 0.0
        (first, began_s), (last, ended_s) = self.first, self.last
        return _SLOWER * steps * (ended_s - began_s) / (last - first)


class JobLoop(SyncLoop):
    """`SyncLoop` of a job that is one region of several.

    A fragment is sent also where this region sits out: the others wait for its announcement.

    Attributes:
      delivery: carries payloads to the other jobs and theirs to this one.
      pacing: how long the others may take after an outage.
      witness: called with every outcome before it lands, if the outcome is known
        (`JobDelivery.learns_outcome`); None = nobody is called.

    Raises:
      ValueError: a leaf of role `average`.
    """

    sends_empty = True

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray, delivery: JobDelivery):
        super().__init__(programs, weights)
        if self._averaged:
            raise ValueError(
                f"leaves {self._averaged} of role 'average' cannot be averaged between jobs: give "
                "them the role 'local'"
            )
        self.delivery, self.pacing = delivery, OutagePacing()
        self.witness: Callable[[Counted], None] | None = None
        self._adopts = True
        self._known = 0  # of how many sends the outcome was read ahead

    def loopback(self, weights: str | np.ndarray) -> JobLoop:
        """A loop of the same programs, which gets its own payloads back."""
        return type(self)(self.programs, weights, self.delivery.loopback())

    # -- due events, deferred where the others cannot be reached -----------------------------------

    def run_due(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Do all that is due up to the counters' step, or defer it while the store is away."""
        now, nobody = int(state.counters.step), np.zeros_like(mask)
        self.delivery.trained = now
        late = self.pacing.first is not None and self.upcoming(state) < now
        if not late or not self.delivery.reachable():
            return self._run_due(state, mask, nobody, events)
        self._known = int(state.counters.sends.sum())
        try:
            return self._run_due(state, mask, nobody, events, ahead=True)
        finally:
            self.delivery.forget_ahead()

    def _run_due(
        self, state: TrainState, mask, nobody, events: list[Event], ahead: bool = False
    ) -> TrainState:
        now = int(state.counters.step)
        while (at := self.upcoming(state)) <= now:
            if ahead and at < now and (sends := int(state.counters.sends.sum())) >= self._known:
                missed = self._missed(state, now)
                self._known = self.delivery.fetch_ahead(sends, now - at + 1, missed)
            if self.pacing.first is not None:
                patience_s = self.pacing.patience_s(at - state.counters.done_until)
                self.delivery.be_patient(patience_s)
            # With the counters of that step: no result may depend on how late the event is done.
            self._adopts = at == now
            who = mask if at == now else nobody
            state, done = self._reachable_events_at(as_of(state, at, behind=1), who, events)
            state = as_of(state, now, behind=now - at + (not done))
            self._adopts = True
            if not done:
                self.pacing.deferred(now)
                self.delivery.still_behind()
                return state
            in_time = at == now and (state.counters.last_sent == at).any()
            if self.pacing.first is not None and in_time:
                # Sent in time: this region has caught up with the others.
                self.pacing = OutagePacing()
                self.delivery.be_patient(0.0)
        return as_of(state, now, behind=0)

    def _missed(self, state: TrainState, now: int) -> int:
        """How many sends were due before `now`; 0 where what lands decides what is sent."""
        schedule, counters, found = self.schedule, state.counters, 0
        if not schedule.by_steps or self.method.base == "received":  # there, absence is no send
            return 0
        step = counters.done_until
        while (step := schedule.next_send(step, counters)) < now:
            if not (counters.last_sent == step).any():
                sent = schedule.sends(step, counters, frozenset(), lambda: np.zeros(0))
                found += len(sent)
        return found

    def _reachable_events_at(
        self, state: TrainState, mask: np.ndarray, events: list[Event]
    ) -> tuple[TrainState, bool]:
        """As `events_at`, but stops where the store is away: (state, whether all is done).

        If it stops between the sends and their landing, the next call goes on with the landing.
        """
        schedule, step = self.schedule, int(state.counters.step)
        to_send = not (state.counters.last_sent == step).any()
        leaves = to_send and schedule.next_send(step - 1, state.counters) == step
        if leaves and not self.delivery.reachable():
            return state, False
        if not self.delivery.arrives(state, due(state, step)):
            return state, False
        state, sent = self.before_sends(state, events), ()
        if to_send:
            state, sent = self.send_due(state, mask, events)
        at_once = [] if schedule.land_after_send else due(state, step)
        if not self.delivery.arrives(state, at_once):
            return state, False
        state = self.decide(self.after_sends(state, sent, mask, events), events)
        self.delivery.publish_progress(state, self.fragments)
        return state, True

    # -- payloads to and from the other jobs ----------------------------------------------------

    def _send(self, state, p: int, step: int, mask, events: list[Event], key: str) -> TrainState:
        kept = jax.tree.map(jnp.copy, state.codec[p])  # from before the send, which donates it
        state = super()._send(state, p, step, mask, events, key)
        flight = dataclasses.replace(state.in_flight[key], kept=kept)
        self._start(state, key, flight, int(state.counters.sends.sum()))
        return state.replace(in_flight={**state.in_flight, key: flight})

    def _start(self, state, key: str, flight: InFlight, number: int, again: bool = False) -> None:
        p = int(flight.fragment)
        round = int(state.counters.sends[p]) - 1
        exchange = self.programs.exchange.at(int(flight.level))
        how = (self.groups(round), exchange, self.fragments)
        self.delivery.start(key, number, flight, state.anchor, *how, again=again, round=round)

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        return self.delivery.traffic(exchange, like, mask, groups, header)

    def collect(
        self, state: TrainState, key: str, last: bool = False, adopted: bool = True
    ) -> tuple[TrainState, InFlight]:
        """Wait for the payloads of everyone, and note who was counted."""
        learns = self.delivery.learns_outcome(key)
        state, flight = self.delivery.finish(state, key)
        p, step = int(flight.fragment), int(flight.sent)
        number = state.counters.number(p, step)
        state.counters.counted[p] = flight.takes_part.all()
        if self.witness is not None and learns:
            counted, adopted = flight.takes_part.copy(), adopted and self._adopts
            self.witness(Counted(p, step, number, last, counted, adopted))
        return state, flight

    def counted(self, flight: InFlight) -> np.ndarray:
        own = self.delivery.region  # all regions are members, but in groups
        return np.asarray(flight.weight[own : own + 1]) > 0

    def adopters(self, flight: InFlight, due_R: np.ndarray) -> np.ndarray:
        return super().adopters(flight, due_R) & self._adopts

    def log_landing(self, state, p, key, lands, staleness, step, values, events) -> None:
        values = {**values, **self.delivery.times(key)}
        super().log_landing(state, p, key, lands, staleness, step, values, events)

    # -- the end --------------------------------------------------------------------------------

    def run_all(self, state: TrainState, events: list[Event]) -> TrainState:
        """As `SyncLoop.run_all`; waits for the others also while they cannot be reached."""
        self.delivery.never_defers = True
        try:
            return super().run_all(state, events)
        finally:
            self.delivery.never_defers = False

    def everyone_landed(self, state: TrainState, p: int, step: int) -> bool:
        return super().everyone_landed(state, p, step) and bool(state.counters.counted[p])

    def ended_before(self, state: TrainState) -> bool:
        """The others finished without this region, and gave it their state of after the end."""
        return self.delivery.ended_before(state)

    def ended(self, state: TrainState) -> None:
        """Compare anchors with the other jobs.

        Raises:
          Parted: another region's anchor is another.
        """
        self.delivery.compare_final_anchors(state, self.fragments)

    # -- after a restart ------------------------------------------------------------------------

    def reconnect(self, state: TrainState) -> None:
        """Start the exchanges of what is in flight again: they ended with the job that sent it.

        Raises:
          ValueError: the state is of a checkpoint without the codec's state from before the send,
            which this region needs if it is not counted.
        """
        for key, flight in in_send_order(state.in_flight):
            if flight.anchor_updated:
                continue
            if flight.takes_part.any() and flight.kept is None:
                raise ValueError(
                    f"payload {key!r} is in flight without the codec's state from before it: go on "
                    "with the version of this package that saved it"
                )
            number = state.counters.sends_until(int(flight.sent))
            self._start(state, key, flight, number, again=True)

    def expect(self, state: TrainState) -> None:
        """Wait, as a listener, for the payloads that others have in flight."""
        self.delivery.listens_only = True
        try:
            self.reconnect(state)
        finally:
            self.delivery.listens_only = False


class OnePeriodJobLoop(JobLoop, OnePeriodLoop):
    """`OnePeriodLoop` of a job that is one region of several."""


class GossipJobLoop(JobLoop, GossipLoop):
    """`GossipLoop` of a job that is one region of several.

    Once a landing has moved this region's anchor, the anchor travels to the group of the fragment's
    next round, beside the inner steps. The payload names it at the next boundary (`JobDelivery`).
    """

    _ends = False  # whether the newest landing is of the last synchronisation

    def draw(self, state: TrainState, flight: InFlight) -> Draw:
        return self.delivery.draw(self.exchange, flight_key(int(flight.fragment), int(flight.sent)))

    def _traffic(self, p: int, level: int, mask: np.ndarray, groups: Groups | None) -> Traffic:
        """With the anchor's bytes where that was not sent ahead."""
        traffic = super()._traffic(p, level, mask, groups)
        if self.delivery.has_sent_ahead(p):
            return traffic
        return traffic.plus(self.delivery.anchor_traffic(self._like[p], mask, groups))

    def collect(
        self, state: TrainState, key: str, last: bool = False, adopted: bool = True
    ) -> tuple[TrainState, InFlight]:
        self._ends = last
        return super().collect(state, key, last, adopted)

    def anchors_ahead(self, state: TrainState, p: int, groups: Groups) -> Traffic:
        """Send this region's anchor of fragment p ahead; returns the bytes.

        Not after the last synchronisation, and not while this region is behind the others: it has
        no part in the next round either, or sends the anchor with its payload.
        """
        if self._ends or not self._adopts or not self.delivery.sends_ahead:
            return self.delivery.nothing_ahead(groups)
        round = int(state.counters.sends[p])
        return self.delivery.send_ahead(p, round, state.anchor, groups, self.fragments)

    def ended(self, state: TrainState) -> None:
        """Drop what was sent ahead: no round follows."""
        super().ended(state)
        self.delivery.drop_ahead()

    def reconnect(self, state: TrainState) -> None:
        """As `JobLoop.reconnect`; the anchors of a restored state are sent with its payloads."""
        self.delivery.drop_ahead()
        super().reconnect(state)

    def everyone_landed(self, state: TrainState, p: int, step: int) -> bool:
        """A job does not learn of other groups: there every region that could have sent counts."""
        return bool(state.counters.last_sent[p] == step)


def start_from_anchor(loop: JobLoop, state: TrainState) -> TrainState:
    """Take the anchor's values, the run's step and its learning rate; optimizer moments stay."""
    inner = state.inner
    params, rounding = loop.programs.restart_program(inner.params, state.anchor, inner.rounding, {})
    step = place(np.full(inner.step.shape, int(state.counters.step), np.int32), inner.step.sharding)
    zeros = place(np.zeros(inner.tokens.shape, inner.tokens.dtype), inner.tokens.sharding)
    opt = at_step(inner.opt, int(state.counters.step), np.ones(1, bool))
    changes = {"params": params, "rounding": rounding, "opt": opt, "step": step, "tokens": zeros}
    return with_inner(state, **changes)
