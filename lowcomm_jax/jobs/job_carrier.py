"""`JobCarrier`: the carrier of a job that is one region of several.

A send hands the payload to `JobDelivery`; a landing waits for everyone's. While a job cannot reach
the other regions, `reach` says so: the loop puts its acts off, and the job keeps training;
`SyncCounters.behind` counts the steps since. On reconnection the loop does them in order. This
region counts as absent in each, but for a send that had left before. So anchors and decisions are
those of the other regions, and its next send has all progress since. What the others have landed it
reads all at once, and what all have missed they end at once (`RemoteExchange.fetch_ahead`). Slower
regions may still be where this one was long ago: they are waited for.

What happens to a region that is alive and does not answer is decided in `agreed_round.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.jobs.job_delivery import JobDelivery
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.schedule.base import Move, Send, Stage, View
from lowcomm_jax.state.train_state import (
    InFlight,
    TrainState,
    in_send_order,
    round_of,
    with_inner,
)
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import EventLoop, SyncLoop, with_step

PyTree = Any
_SLOWER = 4  # times as long as here may a step take elsewhere


class Counted(NamedTuple):
    """Who was counted in one exchange.

    Attributes:
      fragment, step: the fragment that was sent, and after which step.
      number: of the fragment's sends, from 0.
      last: whether this was the last synchronisation of a run.
      counted_N: bool `[N]`, of all regions that exchanged it, ascending.
      adopted: whether regions of this job that were counted adopt it.
      header: numbers of all regions that came with it, float32 `[N, n]` by name.
    """

    fragment: int
    step: int
    number: int
    last: bool
    counted_N: np.ndarray
    adopted: bool
    header: Mapping[str, Any] = MappingProxyType({})


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


class JobCarrier:
    """`sync.carrier.Carrier` of a job that is one region of several.

    Attributes:
      delivery: carries payloads to the other jobs and theirs to this one.
      pacing: how long the others may take after an outage.
      paused: see `Carrier`; also of a state that was restored within a step.
      witness: called with every outcome before it lands, if the outcome is known
        (`JobDelivery.learns_outcome`); None = nobody is called. Of trainers `JobTrainers` sets it.
    """

    def __init__(self, delivery: JobDelivery):
        self.delivery, self.pacing = delivery, OutagePacing()
        self.witness: Callable[[Counted], None] | None = None
        self.paused = False
        self.header: dict[str, Any] = {}
        self._known: int | None = None  # of how many sends the outcome was read ahead
        self._done_until = 0  # all that is due up to this step is done

    def alone(self) -> JobCarrier:
        """A carrier that gets its own payloads back, in place of those of the others."""
        alone = JobCarrier(self.delivery.loopback())
        alone.header = self.header
        return alone

    # -- acts, put off where the others cannot be reached ------------------------------------------

    @contextlib.contextmanager
    def running(self, loop: EventLoop, state: TrainState) -> Iterator[None]:
        """Read ahead what the others have landed, where acts were put off and can be done now.

        Where nothing is due, tell the others how far this region is.
        """
        now = int(state.counters.step)
        self.delivery.trained, due = now, loop.upcoming(state, now)
        self._done_until = state.counters.done_until
        if due > now:
            self.delivery.pass_steps(with_step(state, now, behind=0), loop.fragments)
        late = self.pacing.first is not None and due < now
        self._known = None
        if late and self.delivery.reachable():
            self._known = int(state.counters.sends.sum())
        try:
            yield
        finally:
            if self._known is not None:
                self.delivery.exchange.forget_ahead()
                self._known = None

    def agreed(self, loop: EventLoop, state: TrainState) -> None:
        """None."""

    def _comes_to(self, loop: EventLoop, state: TrainState) -> None:
        """Before the first stage of a step: read ahead what the others have landed by now, and wait
        the longer for them the more steps they have to make to come here."""
        step, now = int(state.counters.step), self.delivery.trained
        sends = int(state.counters.sends.sum())
        if self._known is not None and step < now and sends >= self._known:
            missed = _missed(loop, state, now)
            self._known = self.delivery.fetch_ahead(sends, now - step + 1, missed)
        if self.pacing.first is not None:
            self.delivery.patience_s = self.pacing.patience_s(step - self._done_until)

    def reach(self, loop: EventLoop, state: TrainState, stage: Stage, begun: bool) -> bool:
        # One answer for a step with a send, so that it is put off as a whole: what lands and what
        # leaves is decided together. A one-period step lands behind its send, and a send cannot be
        # taken back; so it begins only where its payloads arrive. A blocking first round waits.
        if not begun:
            self._comes_to(loop, state)
        elif loop.schedule.land_after_send:
            return True
        sends = not begun and bool(_due_sends(loop, state, int(state.counters.step)))
        reached = not sends or self.delivery.reachable()
        if reached and self.delivery.arrives(state, _lands(stage, state), loop.fragments):
            return True
        if self.delivery.stopped():
            self.paused = True
        else:
            self.pacing.deferred(self.delivery.trained)
            self.delivery.exchange.beat(trained=self.delivery.trained)
        return False

    def done(self, loop: EventLoop, state: TrainState, in_time: bool) -> None:
        self._done_until = int(state.counters.step)
        over = with_step(state, self._done_until, behind=0)
        self.delivery.publish_progress(over, loop.fragments)
        sent = (state.counters.last_sent == state.counters.step).any()
        if self.pacing.first is not None and in_time and sent:
            # Sent in time: this region has caught up with the others.
            self.pacing = OutagePacing()
            self.delivery.patience_s = 0.0

    # -- payloads to and from the other jobs ----------------------------------------------------

    def post(
        self,
        loop: SyncLoop,
        state: TrainState,
        key: str,
        flight: InFlight,
        again: bool = False,
    ) -> dict[str, np.ndarray]:
        groups = loop.groups(round_of(state, flight))
        exchange = loop.programs.exchange.at(int(flight.level))
        self.delivery.start(state, key, groups, exchange, loop.fragments, again)
        return {}

    def collect(
        self, loop: EventLoop, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        """Wait for the payloads of everyone, and note who was counted."""
        learns = self.delivery.learns_outcome(key)
        state, collected = self.delivery.finish(state, key)
        flight = collected.flight
        p, step = int(flight.fragment), int(flight.sent)
        number = round_of(state, state.in_flight[key])
        state.counters.counted[p] = flight.takes_part.all()
        if self.witness is not None and learns:
            counted_N = flight.takes_part.copy()
            self.witness(Counted(p, step, number, last, counted_N, adopts, flight.header))
        return state, collected

    def traffic(self, exchange, p: int, like, mask: np.ndarray, groups, header: int) -> Traffic:
        traffic = self.delivery.traffic(exchange, like, mask, groups, header)
        if groups is None or p in self.delivery.ahead.keys:
            return traffic
        return traffic.plus(self.delivery.anchor_traffic(like, mask, groups))

    def ahead(self, loop: SyncLoop, state: TrainState, p: int, groups: Groups) -> Traffic | None:
        delivery, fragments = self.delivery, loop.fragments
        if delivery.never_defers:
            return None
        given = state.anchor, fragments, delivery.own_group(groups), delivery.trained
        delivery.ahead.send(p, int(state.counters.sends[p]), *given)
        return delivery.anchor_traffic(fragments.like(p), np.ones(1, bool), groups)

    # -- the end --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ending(self, loop: EventLoop, state: TrainState) -> Iterator[JobCarrier]:
        delivery = self.delivery
        before = delivery.never_defers, delivery.holds
        delivery.never_defers, delivery.holds = True, False
        try:
            yield self
        finally:
            delivery.never_defers, delivery.holds = before

    def everyone_landed(self, state: TrainState, p: int, step: int, here: bool) -> bool:
        if self.delivery.by_rounds:
            return False  # the others' steps are unknown
        if self.delivery.group_size is not None:
            # Other groups are not heard of: there every region that could have sent counts.
            return bool(state.counters.last_sent[p] == step)
        return here and bool(state.counters.counted[p])

    def ended_before(self, state: TrainState) -> bool:
        """The others finished without this region, and gave it their state of after the end."""
        return self.delivery.ended_before(state)

    def close(self, loop: EventLoop, state: TrainState) -> None:
        """Compare anchors with the other jobs, and drop what was sent ahead: no round follows.

        Raises:
          Parted: another region's anchor is another.
        """
        if self.delivery.tells:
            self.delivery.compare_final_anchors(state, loop.fragments)
        if self.delivery.ahead is not None:
            self.delivery.ahead.drop()

    def reconnect(self, loop: SyncLoop, state: TrainState) -> None:
        """Start the exchanges of what is in flight again: they ended with the job that sent it.

        Anchors of a restored state are sent with its payloads.

        Raises:
          ValueError: the state is of a checkpoint without the codec's state from before the send,
            which this region needs if it is not counted.
        """
        self.paused = int(state.counters.behind) == 1
        if self.delivery.ahead is not None:
            self.delivery.ahead.drop()
        for key, flight in in_send_order(state.in_flight):
            if flight.anchor_updated:
                continue
            if flight.takes_part.any() and flight.kept is None:
                raise ValueError(
                    f"payload {key!r} is in flight without the codec's state from before it: go on "
                    "with the version of this package that saved it"
                )
            self.post(loop, state, key, flight, again=True)


def _lands(stage: Stage, state: TrainState) -> list[str]:
    """Keys of the payloads that move an anchor in a stage, or behind its sends."""
    leaving = {p for act in stage if isinstance(act, Send) for p in act.fragments}
    moved = [act.key for act in stage if isinstance(act, Move) and act.key is not None]
    return moved + [k for k, f in in_send_order(state.in_flight) if f.fragment in leaving]


def _due_sends(loop: EventLoop, state: TrainState, step: int) -> Stage:
    """The sends of a step as if nothing were in flight: what lands first frees its fragment."""
    return loop.schedule.sends(step, View(state.counters, [], loop.count))


def _missed(loop: EventLoop, state: TrainState, now: int) -> int:
    """How many sends are due from the state's step to before `now`; 0 where what lands decides what
    is sent."""
    if not loop.schedule.by_steps:
        return 0
    return sum(len(_due_sends(loop, state, t)) for t in range(int(state.counters.step), now))


# -- after a restart ------------------------------------------------------------------------------


def expect(loop: SyncLoop, state: TrainState) -> None:
    """Wait, as a listener, for the payloads that others have in flight."""
    delivery = loop.carrier.delivery
    delivery.listens_only = True
    try:
        loop.carrier.reconnect(loop, state)
    finally:
        delivery.listens_only = False


def start_from_anchor(loop: EventLoop, state: TrainState) -> TrainState:
    """Take the anchor's values, the run's step and its learning rate; optimizer moments stay."""
    inner = state.inner
    params, rounding = loop.programs.restart_program(inner.params, state.anchor, inner.rounding, {})
    step = place(np.full(inner.step.shape, int(state.counters.step), np.int32), inner.step.sharding)
    zeros = place(np.zeros(inner.tokens.shape, inner.tokens.dtype), inner.tokens.sharding)
    opt = at_step(inner.opt, int(state.counters.step), np.ones(1, bool))
    changes = {"params": params, "rounding": rounding, "opt": opt, "step": step, "tokens": zeros}
    return with_inner(state, **changes)
