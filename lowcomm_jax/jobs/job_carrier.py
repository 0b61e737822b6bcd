"""`JobCarrier`: the carrier of a job that is one region of several.

`post` begins an exchange of the payload at a send; `collect` waits for everyone's at the landing,
and raises `Parted` where the regions have different anchors. While a job cannot reach the other
regions, `reach` says so: the loop puts its acts off, and the job keeps training;
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
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from lowcomm_jax.exchange import MeshExchange, Traffic
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.jobs.anchor_history import AnchorHistory
from lowcomm_jax.jobs.anchors_ahead import ANCHOR, AnchorsAhead
from lowcomm_jax.jobs.given_state import given, position
from lowcomm_jax.jobs.payload_rows import (
    arrays_beside,
    arrays_that_travel,
    arrays_to_send,
    everyones,
    with_everyones_rows,
)
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.methods.base import Method
from lowcomm_jax.optimizers import at_step
from lowcomm_jax.rounds.job_traffic import JobTraffic
from lowcomm_jax.rounds.loopback_exchange import LoopbackExchange
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.rounds.request import Arrived, arrange
from lowcomm_jax.rounds.slicing import Slicing
from lowcomm_jax.rounds.state_transfer import State
from lowcomm_jax.rules.topology import Groups, member_table
from lowcomm_jax.schedule.base import Move, Send, Stage, View
from lowcomm_jax.state.train_state import (
    InFlight,
    TrainState,
    in_send_order,
    round_of,
    with_inner,
)
from lowcomm_jax.store.errors import Lost, Parted, StoreUnavailable
from lowcomm_jax.store.wire import without_region
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import SyncLoop, not_counted, with_step

PyTree = Any
T = TypeVar("T")
log = logging.getLogger(__name__)
_GIVE_UP_SECONDS, _POLL_SECONDS = 10.0, 0.02
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


@dataclasses.dataclass
class PendingExchange:
    """A payload under way.

    Attributes:
      name: the key of its exchange.
      terms: of its exchange (`RemoteExchange.start`).
      members: the regions that exchange it, ascending.
      sends: whether this region takes part; else it takes what the others exchange.
      slicing: how payloads are reduced in slices; None = everyone gets those of all.
    """

    name: str
    terms: dict[str, Any]
    members: tuple[int, ...]
    sends: bool
    slicing: Slicing | None


class Role(NamedTuple):
    """How a carrier takes part in the run.

    Attributes:
      defers: acts are put off while the store is away. Not where a region catches up with the
        others, or where the run ends: it waits for them, and sends no anchors ahead.
      sends: whether payloads are sent; else it takes what the others exchange.
      holds: what was sent does not land: its step is paused (`sync.carrier`).
    """

    defers: bool = True
    sends: bool = True
    holds: bool = False


class JobCarrier:
    """`sync.carrier.Carrier` of a job that is one region of several.

    Payloads are reduced as on the mesh. Either every region averages one slice; or every region
    gets all payloads (with gossip: its partners', with their anchors) and averages for itself. The
    arithmetic is that of the mesh, so that the anchors are the same, bit for bit.

    Attributes:
      exchange: the exchange with the other jobs.
      total: number of regions.
      region: number of this one, from 0.
      announced: the bytes of its exchanges.
      group_size: a fragment is exchanged in groups of at most so many regions, with the anchors of
        their members; None = among all.
      tells: whether the others are told how far this region is, newcomers given states that land
        here, and anchors compared at the end. Not where a state is one trainer's, nor without the
        others.
      anchor_history: digests of the anchors this region has had.
      anchors_ahead: anchors that are sent before their payloads; None without gossip.
      role: how it takes part now (`acting`).
      pacing: how long the others may take after an outage.
      witness: called with every outcome before it lands, if the outcome is known; None = nobody is
        called.
      paused: see `Carrier`; also of a state that was restored within a step.
      header: see `Carrier`.
    """

    def __init__(
        self,
        exchange: RemoteExchange | LoopbackExchange,
        method: Method,
        prefix: str = "",
        tells: bool = True,
    ):
        """`prefix`: what the names of all its exchanges begin with."""
        schedule, topology = method.schedule, method.topology
        self.exchange, self.total, self.region = exchange, exchange.count, exchange.region
        # Arrivals move the anchor one by one, also in the last synchronisation.
        self._one_by_one = schedule.by_rounds and schedule.most == 1
        self.announced = JobTraffic(self.total, self.region, self._one_by_one)
        self.group_size = None if topology is None else topology.group_size
        self.tells = tells
        self.anchor_history = AnchorHistory(method.anchors == "shared")
        self.anchors_ahead = None if topology is None else AnchorsAhead(exchange)
        self.role, self.pacing = Role(), OutagePacing()
        self.witness: Callable[[Counted], None] | None = None
        self.paused = False
        self.header: dict[str, Any] = {}
        self._method, self._prefix, self._by_rounds = method, prefix, schedule.by_rounds
        self._pending: dict[str, PendingExchange] = {}
        # By fragment and level, so that each is compiled once.
        self._slicings: dict[tuple[int, int], Slicing] = {}
        self._known = 0  # of how many sends the outcome was read ahead; 0 = nothing is kept
        self._trained = 0  # inner steps that this region has made
        self._done_until = 0  # all that is due up to this step is done
        self._patience_s = 0.0  # waits so much longer in exchanges that start from now on

    def alone(self) -> JobCarrier:
        """A carrier that gets its own payloads back, in place of those of the others.

        What it compiles is compiled for this one, too.
        """
        there = LoopbackExchange(self.region, self.total)
        alone = JobCarrier(there, self._method, tells=False)
        alone.role, alone._slicings, alone.header = Role(defers=False), self._slicings, self.header
        return alone

    def of_trainer(self, number: int) -> JobCarrier:
        """A carrier of one of several trainers of this region; it holds what it has sent."""
        made = JobCarrier(self.exchange, self._method, f"{number}.", tells=False)
        made.role, made._slicings = Role(defers=False, holds=True), self._slicings
        return made

    @contextlib.contextmanager
    def acting(self, **changes: bool) -> Iterator[None]:
        """While entered, the carrier has another `Role`."""
        before, self.role = self.role, self.role._replace(**changes)
        try:
            yield
        finally:
            self.role = before

    # -- acts, put off where the others cannot be reached ------------------------------------------

    def begins(self, loop: SyncLoop, state: TrainState) -> None:
        """Where nothing is due, tell the others how far this region is."""
        now = int(state.counters.step)
        self._trained, self._done_until = now, state.counters.done_until
        if self.tells and loop.upcoming(state, now) > now:
            over = with_step(state, now, behind=0)
            self.anchor_history.note(over, loop.fragments)
            self.tell(over, trained=now)

    def _comes_to(self, loop: SyncLoop, state: TrainState) -> None:
        """Before the first stage of a step: read ahead what the others have landed by now, where
        this region is behind them, after an outage or while it comes in.

        After an outage, wait the longer for them the more steps they have to make to come here.
        """
        step, sends = int(state.counters.step), int(state.counters.sends.sum())
        landed = sends - sum(not one.anchor_updated for one in state.in_flight.values())
        until, makes_up, done = step, self.pacing.first is not None, sends
        if makes_up:
            self._patience_s = self.pacing.patience_s(step - self._done_until)
            until = self._trained
        elif self.tells and not self.role.sends:
            # What it only listens to begins where it lands: what is in flight is read, too.
            until, done = self.exchange.frontier(), landed
        if self._known and landed >= self._known:
            self.exchange.forget_ahead()
            self._known = 0
        # Exchanges in groups have other names.
        unknown = step < until and self.group_size is None and not self._known
        if unknown and self._reachable():
            missed = _due_until(loop, state, until) if makes_up and loop.schedule.by_steps else 0
            count = sends - done + _due_until(loop, state, until + 1)
            read = self.exchange.fetch_ahead(done + 1, count, missed)
            self._known = done + read if read else 0

    def reach(self, loop: SyncLoop, state: TrainState, stage: Stage, begun: bool) -> bool:
        # One answer for a step with a send, so that it is put off as a whole: what lands and what
        # leaves is decided together. A one-period step lands behind its send, and a send cannot be
        # taken back; so it begins only where its payloads arrive. A blocking first round waits for
        # what it has sent, also while the store is away.
        if not begun:
            self._comes_to(loop, state)
        sends = not begun and bool(_due_sends(loop, state, int(state.counters.step)))
        here = (not sends or self._reachable()) and self._arrive(loop, state, _lands(stage, state))
        while begun and loop.schedule.land_after_send and not (here or self.stopped()):
            time.sleep(_POLL_SECONDS)
            here = self._arrive(loop, state, _lands(stage, state))
        if here:
            return True
        if self.stopped():
            self.paused = True
        else:
            self.pacing.deferred(self._trained)
            self.exchange.beat(trained=self._trained)
        return False

    def _reachable(self) -> bool:
        return not self.role.defers or self.exchange.reachable()

    def stopped(self) -> bool:
        """Whether waits are to stop now (`RemoteExchange.stop_when`); not at the end."""
        return self.role.holds or (self.role.defers and self.exchange.stopped())

    def _arrive(self, loop: SyncLoop, state: TrainState, keys: Sequence[str]) -> bool:
        """Wait until `collect` would not block for these payloads; False = the store is away, or
        the wait was stopped (at once where the carrier holds them).

        A newcomer that asks meanwhile is given this state. It stands within its step, before a
        stage (`SyncCounters.behind` is 1), as one that is saved in a wait does. The newcomer does
        the rest of the step as an absent region: it lands what the record names, with the others.

        Not in these waits, where a newcomer is answered once they are over:
        - with gossip: what the donor lands is not for the newcomer, whose group is another;
        - at the end of a run, and while this region itself comes in;
        - of trainers: only between rounds their state is one.
        """
        flying = [self._pending[key] for key in keys if key in self._pending]
        names = [pending.name for pending in flying if pending.sends]
        gives = self.tells and self.group_size is None and self.role.defers
        if gives:
            self.anchor_history.note(state, loop.fragments)
        if not names or self.role.holds:
            return not names
        return self._wait_for(state, names, gives) or not self.role.defers

    def _wait_for(self, state: TrainState, names: Sequence[str], gives: bool = False) -> bool:
        if all(map(self.exchange.ready, names)):
            return True
        if not self._reachable():
            return False
        # What the device has still to compute is no waiting for bytes.
        jax.block_until_ready(state.inner.params)
        answers = self.anchor_history.past if gives else None
        while (here := self.exchange.arrives(names, answers=answers)) is None:
            self.answer(state)
        return here

    def done(self, loop: SyncLoop, state: TrainState, in_time: bool) -> None:
        self._done_until = int(state.counters.step)
        over = with_step(state, self._done_until, behind=0)
        self.anchor_history.note(over, loop.fragments)
        self.tell(over, self._done_until, self._trained)
        sent = (state.counters.last_sent == state.counters.step).any()
        if self.pacing.first is not None and in_time and sent:
            # Sent in time: this region has caught up with the others.
            self.pacing, self._patience_s = OutagePacing(), 0.0

    def tell(self, state: Any, step: int | None = None, trained: int | None = None) -> None:
        """Tell how far this region is (`RemoteExchange.beat`), and `answer` newcomers."""
        if self.tells:
            self.exchange.beat(step, trained)
            self.answer(state)

    def answer(self, state: Any) -> None:
        """Give a newcomer what it asks for: digests of anchors, and the state if we owe it."""
        if self.exchange.answer(self.anchor_history.past):
            self.exchange.give_state(*self.given(state))

    def given(self, state: Any) -> State:
        """What a region that asks is given of a state (`given_state`)."""
        return given(state, self._method)

    # -- payloads to and from the other jobs ----------------------------------------------------

    def post(
        self,
        loop: SyncLoop,
        state: TrainState,
        key: str,
        flight: InFlight,
        again: bool = False,
    ) -> dict[str, np.ndarray]:
        """Begin the exchange of a payload; with gossip it comes with this region's anchor."""
        p, fragments = int(flight.fragment), loop.fragments
        groups = loop.groups(round_of(state, flight))
        exchange = loop.programs.exchange.at(int(flight.level))
        members, sends = self.own_group(groups), self.role.sends
        # Named by the send's number, the same in all regions: one that decided on another fragment
        # or step must find out.
        name = f"{self._prefix}{state.counters.sends_until(int(flight.sent))}"
        terms: dict[str, Any] = {} if self._by_rounds else {"step": int(flight.sent)}
        terms |= {"fragment": p, "level": int(flight.level)}
        if not again:  # else the anchor may have moved since, and does not tell which one it was
            terms |= self.anchor_history.sent(state.anchor, fragments, p)
        slicing = None
        if groups is None and self.announced.in_slices(exchange):
            slicing = self._slicing(flight, exchange, fragments.like(p))
        self._pending[key] = PendingExchange(name, terms, members, sends, slicing)
        if sends:
            how = {"members": members, "terms": terms, "reduction": slicing}
            how["patience_s"] = self._patience_s
            if self.anchors_ahead is not None:
                how["early"] = self.anchors_ahead.take(state, flight, fragments, members)
            takes_part = bool(flight.takes_part.any())
            self.exchange.start(name, arrays_to_send(flight), takes_part=takes_part, **how)
        return {}

    def _slicing(self, flight: InFlight, exchange: MeshExchange, like: PyTree) -> Slicing:
        kind = int(flight.fragment), int(flight.level)
        if kind not in self._slicings:
            payload = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flight.payload)
            rest = without_region(arrays_beside(flight))
            codec = None if exchange.codec is None else exchange.whole(like)
            self._slicings[kind] = Slicing(codec, like, payload, rest, self.total)
        return self._slicings[kind]

    def own_group(self, groups: Groups | None) -> tuple[int, ...]:
        """The regions that this one exchanges with, itself included; None = all."""
        if groups is None:
            return tuple(range(self.total))
        return next(tuple(group) for group in groups if self.region in group)

    @property
    def flying(self) -> list[str]:
        """Names of the exchanges under way that this region has sent to."""
        return [one.name for one in self._pending.values() if one.sends]

    def collect(
        self, loop: SyncLoop, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        """Wait for the payloads of everyone, and note who was counted.

        Where the others did not count this region, the returned state has its residual back.

        Raises:
          Parted: the regions had different anchors when they sent, or sent something else.
          ValueError: the payload comes from a checkpoint, and was not sent off again.
        """
        if key not in self._pending:
            raise ValueError(
                f"payload {key!r} is in flight in a state that was restored: call "
                "engine.reconnect(state) before the first step"
            )
        flight, pending = state.in_flight[key], self._pending.pop(key)
        # Who only listens to a group learns nothing: its members may never exchange.
        learns = pending.sends or self.group_size is None
        if pending.sends:
            self._wait_for(state, [pending.name])
            arrived = self.exchange.finish(pending.name)
        elif learns:
            arrived = self._listen(flight, pending)
        else:
            anchor = loop.fragments.like(int(flight.fragment))
            shapes = {f"{ANCHOR}/{name}": ("float32", x.shape) for name, x in anchor.items()}
            shapes |= without_region(arrays_that_travel(flight))
            arrived = arrange({}, shapes, self.total)
        if flight.takes_part.any() and not arrived.ours:
            state = uncounted(state, key)
        collected = self._collected(flight, pending, arrived)
        counted_N, p = collected.flight.takes_part, int(flight.fragment)
        state.counters.counted[p] = counted_N.all()
        if self.witness is not None and learns:
            number, step = round_of(state, flight), int(flight.sent)
            header = collected.flight.header
            self.witness(Counted(p, step, number, last, counted_N.copy(), adopts, header))
        return state, collected

    def _listen(self, flight: InFlight, pending: PendingExchange) -> Arrived:
        """Wait until the others have exchanged this payload; returns what came of it.

        Raises:
          Lost: nobody is left to exchange it.
        """
        how = {"members": pending.members, "terms": pending.terms, "reduction": pending.slicing}
        arrays, exchange = arrays_that_travel(flight), self.exchange
        exchange.start(pending.name, arrays, **how, joins=False)
        wait_for_donors(exchange, pending.name, lambda: exchange.ready(pending.name) or None)
        return exchange.finish(pending.name)

    def _collected(self, flight: InFlight, pending: PendingExchange, arrived: Arrived) -> Collected:
        """What came, as the landing program takes it: the rows of this region's group."""
        members = list(pending.members)
        rows = {name: x[members] for name, x in arrived.arrays.items()}
        anchors = {
            name.removeprefix(f"{ANCHOR}/"): x
            for name, x in rows.items()
            if name.startswith(f"{ANCHOR}/")
        }
        draw = None
        if anchors:
            table = member_table([tuple(range(len(members)))], self.group_size)[:1]
            draw = Draw(table, anchors, np.int32(members.index(self.region)))
        if pending.slicing is None:
            payload = everyones(flight.payload, rows)
        else:
            payload = pending.slicing.join(arrived.reduced)
        taken = {"travel_seconds": arrived.seconds, "waited_seconds": arrived.waited}
        times = {name: np.array([x], np.float32) for name, x in taken.items()}
        counted_N = arrived.participants[members]
        everyone = with_everyones_rows(flight, payload, rows, counted_N)
        alone = tuple(np.diag(everyone.weight)[counted_N]) if self._one_by_one else None
        return Collected(everyone, draw, times, alone)

    def passed_over(self, sends: int) -> bool:
        """Whether the others went on without this region in the exchange after so many sends.

        True also while the store is away and nothing is known. Not for groups, whose members may
        never exchange without this region.
        """
        if self.group_size is not None:
            return False
        try:
            return self.exchange.passed_over(f"{self._prefix}{sends + 1}")
        except StoreUnavailable:
            return True  # the exchange's heartbeat reports it

    def traffic(self, exchange, p: int, like, mask: np.ndarray, groups, header: int) -> Traffic:
        traffic = self.announced.of_payloads(exchange, like, mask, groups, header)
        if groups is not None and p not in self.anchors_ahead.keys:
            traffic = traffic.plus(self.announced.of_anchors(like, mask, groups))
        # Who only listens reduces no slice either.
        return traffic if self.role.sends else traffic._replace(sent=0 * traffic.sent)

    def ahead(self, loop: SyncLoop, state: TrainState, p: int, groups: Groups) -> Traffic | None:
        if not self.role.defers:
            return None
        given = state.anchor, loop.fragments, self.own_group(groups), self._trained
        self.anchors_ahead.send(p, int(state.counters.sends[p]), *given)
        return self.announced.of_anchors(loop.fragments.like(p), np.ones(1, bool), groups)

    # -- the end --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ending(self, loop: SyncLoop, state: TrainState) -> Iterator[JobCarrier]:
        with self.acting(defers=False, holds=False):
            yield self

    def everyone_landed(self, state: TrainState, p: int, step: int, here: bool) -> bool:
        if self._by_rounds:
            return False  # the others' steps are unknown
        if self.group_size is not None:
            # Other groups are not heard of: there every region that could have sent counts.
            return bool(state.counters.last_sent[p] == step)
        return here and bool(state.counters.counted[p])

    def ended_before(self, state: TrainState) -> bool:
        """Whether others compared final anchors after as many sends as this state has.

        Then the last synchronisation is over, without this region. It may have taken their state of
        after the end. Waits while the store is away.
        """
        if self.group_size is not None:
            return False
        agreed = self.exchange.agreed_terms(self._final(state))
        sends = int(state.counters.sends.sum())
        return bool(agreed) and all(one["sends"] == sends for one in agreed.values())

    def close(self, loop: SyncLoop, state: TrainState) -> None:
        """Compare anchors with the other jobs, and drop what was sent ahead: no round follows.

        Raises:
          Parted: another region's anchor is another.
        """
        if self.tells:
            self.compare_final_anchors(loop, state)
        if self.anchors_ahead is not None:
            self.anchors_ahead.drop()

    def compare_final_anchors(self, loop: SyncLoop, state: TrainState) -> None:
        """After the last landing: compare anchors by one exchange without payloads.

        With gossip nothing is compared: regions have anchors of their own, and meet in groups.

        Raises:
          Parted: another region has another anchor.
        """
        if self.group_size is not None:
            return
        self.anchor_history.note(state, loop.fragments)
        # No later send would notice. `heals` is False: no run goes on that one could join again.
        name = self._final(state)
        terms = self.anchor_history.terms(state.anchor, loop.fragments)
        terms["sends"] = int(state.counters.sends.sum())
        how = {"takes_part": False, "terms": terms, "patience_s": self._patience_s}
        self.exchange.start(name, {}, **how)
        try:
            self.exchange.finish(name)
        except Parted as error:
            raise Parted(str(error), heals=False) from error
        self._tell_of_others(name, state)

    def _tell_of_others(self, name: str, state: TrainState) -> None:
        """Warn of regions that did not end where this one does."""
        agreed = self.exchange.agreed_terms(name)
        missing = set() if agreed is None else set(range(self.total)) - agreed.keys()
        steps = self.exchange.steps() if missing else {}
        if not missing or not leader().leads:
            return
        what = "rounds" if self._by_rounds else "steps"
        others = [
            f"region {r} {f'trains on, step {steps[r]} or later' if r in steps else 'has left'}"
            for r in sorted(missing)
        ]
        log.warning(
            "this region ends after %d %s, others do not (%s): their parameters may differ from "
            "these; give all regions as many batches",
            self.position(state),
            what,
            ", ".join(others),
        )

    def position(self, state: TrainState) -> int:
        """How far a state is, in what all regions have in common: steps, or rounds."""
        return position(self._method, state)

    def _final(self, state: TrainState) -> str:
        """Key of the exchange that compares anchors at the end."""
        return f"{self._prefix}{self.position(state)}.end"

    # -- after a restart ------------------------------------------------------------------------

    def reconnect(self, loop: SyncLoop, state: TrainState) -> None:
        """Start the exchanges of what is in flight again: they ended with the job that sent it.

        Anchors of a restored state are sent with its payloads.

        Raises:
          ValueError: the state is of a checkpoint without the codec's state from before the send,
            which this region needs if it is not counted.
        """
        self.paused = int(state.counters.behind) == 1
        if self.anchors_ahead is not None:
            self.anchors_ahead.drop()
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


def _due_sends(loop: SyncLoop, state: TrainState, step: int) -> Stage:
    """The sends of a step as if nothing were in flight: what lands first frees its fragment."""
    return loop.schedule.sends(step, View(state.counters, [], loop.count))


def _due_until(loop: SyncLoop, state: TrainState, end: int) -> int:
    """How many sends are due from the state's step to before `end`; as many as there are steps
    where what lands decides what is sent."""
    steps = range(int(state.counters.step), end)
    if not loop.schedule.by_steps:
        return len(steps)
    return sum(len(_due_sends(loop, state, t)) for t in steps)


def uncounted(state: TrainState, key: str) -> TrainState:
    """The state as if this region had not sent at all: the others went on without it."""
    flight = state.in_flight[key]
    absent = dataclasses.replace(flight, takes_part=np.zeros_like(flight.takes_part))
    in_flight = {**state.in_flight, key: absent}
    return not_counted(state, flight).replace(in_flight=in_flight)


def start_from_anchor(loop: SyncLoop, state: TrainState) -> TrainState:
    """Take the anchor's values, the run's step and its learning rate; optimizer moments stay."""
    inner = state.inner
    params, rounding = loop.programs.restart_program(inner.params, state.anchor, inner.rounding, {})
    step = place(np.full(inner.step.shape, int(state.counters.step), np.int32), inner.step.sharding)
    zeros = place(np.zeros(inner.tokens.shape, inner.tokens.dtype), inner.tokens.sharding)
    opt = at_step(inner.opt, int(state.counters.step), np.ones(1, bool))
    changes = {"params": params, "rounding": rounding, "opt": opt, "step": step, "tokens": zeros}
    return with_inner(state, **changes)


def wait_for_donors(exchange: RemoteExchange, awaited: str, look: Callable[[], T | None]) -> T:
    """Call `look`, in the job's first process, until it returns something other than None.

    Regions that ask for a state themselves are no donors, since they would wait for one another
    for ever.

    Args:
      awaited: what this region waits for.

    Raises:
      Lost: no donor was seen for 10 s, which covers short outages.
    """

    def wait() -> T:
        seen_s = time.monotonic()
        while True:
            now = time.monotonic()
            if exchange.state_transfer.donors():
                seen_s = now
            elif now > seen_s + _GIVE_UP_SECONDS:
                raise Lost(f"all other regions are gone before {awaited}: join again")
            try:
                found = look()
            except StoreUnavailable:
                found = None  # the exchange's heartbeat reports it
            if found is not None:
                return found
            time.sleep(_POLL_SECONDS)

    return leader().broadcast_from_leader(awaited, wait)
