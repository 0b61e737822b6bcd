"""`JobDelivery`: a region's payloads on their way to the other jobs, and theirs to this one.

`JobCarrier` calls it: `start` begins an exchange at a send, `arrives` waits, `finish` returns
everyone's payload at the landing. `answer` gives the state to a region that asks for one. `finish`
raises `Parted` where the regions have different anchors.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from lowcomm_jax.exchange import MeshExchange, Traffic, all_gather, in_halves, pair
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.jobs.anchor_history import AnchorHistory
from lowcomm_jax.jobs.anchors_ahead import ANCHOR, AnchorsAhead
from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.params.fragments import Fragments
from lowcomm_jax.rounds.loopback_exchange import LoopbackExchange
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.rounds.request import Arrived, arrange
from lowcomm_jax.rounds.slicing import Slicing, goes_in_slices, named, padded_nbytes
from lowcomm_jax.rounds.state_transfer import State, shared_state
from lowcomm_jax.rules.topology import Groups, member_table
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import InFlight, TrainState, rounds_landed
from lowcomm_jax.store.errors import Lost, Parted, StoreUnavailable
from lowcomm_jax.store.wire import without_region
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.fit import TrafficFn
from lowcomm_jax.sync.sync_loop import not_counted

PyTree = Any
log = logging.getLogger(__name__)

HEADER = "header"
RUNNING = 3
"""So many exchanges in a row without this region are no accident."""
_GIVE_UP_SECONDS, _POLL_SECONDS = 10.0, 0.02
T = TypeVar("T")


@dataclasses.dataclass
class PendingExchange:
    """A payload under way.

    Attributes:
      name: the key of its exchange.
      terms: of its exchange (`RemoteExchange.start`).
      members: the regions that exchange it, ascending.
      like: shapes and dtypes of what comes from each region, by name.
      listens_only: this region sends nothing.
      slicing: how payloads are reduced in slices; None = everyone gets those of all.
    """

    name: str
    terms: dict[str, Any]
    members: tuple[int, ...]
    like: dict[str, jax.ShapeDtypeStruct]
    listens_only: bool
    slicing: Slicing | None


class JobDelivery:
    """Delivers payloads of a job that is one region of several.

    Payloads are reduced as on the mesh. Either every region averages one slice; or every region
    gets all payloads (with gossip: its partners', with their anchors) and averages for itself. The
    arithmetic is that of the mesh, so that the anchors are the same, bit for bit.

    Attributes:
      exchange: the exchange with the other jobs.
      anchor_history: digests of the anchors this region has had.
      total: number of regions.
      region: number of this one, from 0.
      ahead: anchors that are sent before their payloads; None without gossip.
      group_size: a fragment is exchanged in groups of at most so many regions, with the anchors of
        their members; None = among all.
      listens_only: take what the others exchange, and send nothing (`rejoin.catch_up`).
      never_defers: this region catches up with the others, or the run ends: it waits for them also
        while the store is away, and sends no anchors ahead.
      trained: inner steps this region has made.
      patience_s: how much longer than usual the others are waited for, in exchanges started from
        now on.
      by_rounds: regions have rounds in common, but no steps (`round_carrier`).
      prefix: what the names of all its exchanges begin with.
      slicings: how payloads are reduced in slices, by fragment and level; deliveries of the same
        fragments may share them, so that each is compiled once.
      whole: every region needs the payloads of all, and not only their mean.
      gives: what a region that asks is given of a state.
      tells: whether the others are told how far this region is, newcomers given states that land
        here, and anchors compared at the end. Not where a state is one trainer's, nor without the
        others.
      holds: what was sent does not land: its step is paused (`sync.carrier`) until all trainers of
        the region have sent.
      participation: whether the others counted what this region sent.
    """

    def __init__(
        self,
        exchange: RemoteExchange | LoopbackExchange,
        shared: bool,
        group_size: int | None = None,
        prefix: str = "",
    ):
        """`shared`: all regions have one anchor, not one each."""
        self.group_size = group_size
        self.exchange, self.anchor_history = exchange, AnchorHistory(shared)
        self.total, self.region = exchange.count, exchange.region
        self.listens_only = self.never_defers = self.by_rounds = self.whole = False
        self.tells, self.holds = True, False
        self.gives: Callable[[TrainState], State] = shared_state
        self.participation = Participation()
        self.trained, self.prefix, self.patience_s = 0, prefix, 0.0
        self._pending: dict[str, PendingExchange] = {}
        self.ahead = None if group_size is None else AnchorsAhead(exchange)
        self.slicings: dict[tuple[int, int], Slicing] = {}

    def loopback(self) -> JobDelivery:
        """A delivery without the other regions; what it compiles is compiled for this one, too."""
        there = LoopbackExchange(self.region, self.total)
        alone = JobDelivery(there, self.anchor_history.shared, self.group_size)
        alone.slicings, alone.whole = self.slicings, self.whole
        alone.never_defers, alone.tells = True, False
        return alone

    def start(
        self,
        state: TrainState,
        key: str,
        groups: Groups | None,
        exchange: MeshExchange,
        fragments: Fragments,
        again: bool = False,
    ) -> None:
        """Begin the exchange of a payload in flight.

        With gossip it comes with this region's anchor (`AnchorsAhead.take`).

        Args:
          key: of the flight.
          groups: who exchanges; None = all regions.
          again: the payload was sent before, by a job that has ended.
        """
        flight, members = state.in_flight[key], self.own_group(groups)
        p = int(flight.fragment)
        like = fragments.like(p)
        # Named by the send's number, the same in all regions: one that decided on another fragment
        # or step must find out.
        name = f"{self.prefix}{state.counters.sends_until(int(flight.sent))}"
        arrays = _that_travel(flight)
        terms: dict[str, Any] = {} if self.by_rounds else {"step": int(flight.sent)}
        terms |= {"fragment": p, "level": int(flight.level)}
        if not again:  # else the anchor may have moved since, and does not tell which one it was
            terms |= self.anchor_history.sent(state.anchor, fragments, p)
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in arrays.items()}
        slicing = None
        if groups is None and self._reduces(exchange):
            slicing = self._slicing(flight, shapes, exchange, like)
            shapes = {k: x for k, x in shapes.items() if k in slicing.rest}
        if self.ahead is not None:
            of_anchor = {f"{ANCHOR}/{k}": x.shape for k, x in like.items()}
            shapes |= {k: jax.ShapeDtypeStruct((1, *x), "float32") for k, x in of_anchor.items()}
        self._pending[key] = PendingExchange(
            name, terms, members, shapes, self.listens_only, slicing
        )
        if not self.listens_only:
            how = {"members": members, "terms": terms, "reduction": slicing}
            how["patience_s"] = self.patience_s
            if self.ahead is not None:
                how["early"] = self.ahead.take(state, flight, fragments, members)
            arrays = self.arrays_to_send(flight)
            self.exchange.start(name, arrays, takes_part=bool(flight.takes_part.any()), **how)

    def arrays_to_send(self, flight: InFlight) -> dict[str, Any]:
        """The arrays of a payload that travel, `[1, ...]` by name, whole in this process."""
        return {name: whole(x) for name, x in _that_travel(flight).items()}

    def anchor_traffic(self, like: PyTree, mask: np.ndarray, groups: Groups) -> Traffic:
        """Bytes of the anchors of one round; takes all other regions to send theirs."""
        nbytes = 4 * sum(x.size for x in jax.tree.leaves(like))
        return self._own(pair(nbytes, self._with_others(mask), groups))

    def _reduces(self, exchange: MeshExchange) -> bool:
        return not self.whole and goes_in_slices(exchange, self.total)

    def _slicing(self, flight: InFlight, shapes: dict, exchange, like: PyTree) -> Slicing:
        """Made once for each fragment and level, so that each is compiled once."""
        kind = int(flight.fragment), int(flight.level)
        if kind not in self.slicings:
            payload = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flight.payload)
            rest = without_region({k: x for k, x in shapes.items() if k not in named(payload)})
            codec = None if exchange.codec is None else exchange.whole(like)
            self.slicings[kind] = Slicing(codec, like, payload, rest, self.total)
        return self.slicings[kind]

    def own_group(self, groups: Groups | None) -> tuple[int, ...]:
        """The regions that this one exchanges with, itself included; groups as in `start`."""
        if groups is None:
            return tuple(range(self.total))
        return next(tuple(group) for group in groups if self.region in group)

    def reachable(self) -> bool:
        """Whether the loop may send and land now; False = it defers."""
        return self.never_defers or self.exchange.reachable()

    def stopped(self) -> bool:
        """Whether waits are to stop now (`stop_when`), or trainers hold them; not at the end."""
        return self.holds or (not self.never_defers and self.exchange.stopped())

    @property
    def flying(self) -> list[str]:
        """Names of the exchanges under way that this region has sent to."""
        return [one.name for one in self._pending.values() if not one.listens_only]

    def arrives(self, state: TrainState, keys: Sequence[str], fragments: Fragments) -> bool:
        """Wait until `finish` would not block for these payloads; False = the store is away, or the
        wait was stopped (at once where a delivery `holds`).

        A newcomer that asks meanwhile is given this state. It stands within its step, before a
        stage (`SyncCounters.behind` is 1), as one that is saved in a wait does. The newcomer does
        the rest of the step as an absent region: it lands what the record names, with the others.

        Not in these waits, where a newcomer is answered once they are over:
        - with gossip: what the donor lands is not for the newcomer, whose group is another;
        - at the end of a run, and while this region itself comes in;
        - of trainers: only between rounds their state is one.
        """
        flying = [self._pending[key] for key in keys if key in self._pending]
        names = [pending.name for pending in flying if not pending.listens_only]
        gives = self.tells and self.group_size is None and not self.never_defers
        if gives:
            self.anchor_history.note(state, fragments)
        if not names or self.holds:
            return not names
        return self._arrive(state, names, gives) or self.never_defers

    def _arrive(self, state: TrainState, names: Sequence[str], gives: bool = False) -> bool:
        if all(map(self.exchange.ready, names)):
            return True
        if not self.reachable():
            return False
        # What the device has still to compute is no waiting for bytes.
        jax.block_until_ready(state.inner.params)
        answers = self.anchor_history.past if gives else None
        while (here := self.exchange.arrives(names, answers=answers)) is None:
            self.answer(state)
        return here

    def learns_outcome(self, key: str) -> bool:
        """Whether `finish` tells who was counted. Not where we only listen to a small group: its
        members may never exchange without us."""
        pending = self._pending.get(key)
        return pending is None or not pending.listens_only or len(pending.members) == self.total

    def finish(self, state: TrainState, key: str) -> tuple[TrainState, Collected]:
        """Block until everyone's payload is here; returns (state, what came).

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
        flight, learns = state.in_flight[key], self.learns_outcome(key)
        pending = self._pending.pop(key)
        if pending.listens_only:
            arrived = self._listen(pending) if learns else arrange({}, pending.like, self.total)
        else:
            self._arrive(state, [pending.name])
            arrived = self.exchange.finish(pending.name, pending.like)
        taken = {"travel_seconds": arrived.seconds, "waited_seconds": arrived.waited}
        rows = {name: x[list(pending.members)] for name, x in arrived.arrays.items()}
        counted_N = arrived.participants[list(pending.members)]
        anchors = {k: x for k, x in rows.items() if k.startswith(f"{ANCHOR}/")}
        draw = None
        if anchors:  # this region's group: its members' rows, in this order
            table = member_table([tuple(range(len(pending.members)))], self.group_size)[:1]
            named = {k.removeprefix(f"{ANCHOR}/"): x for k, x in anchors.items()}
            draw = Draw(table, named, np.int32(pending.members.index(self.region)))
        if flight.takes_part.any():
            self.participation.note(arrived.ours)
            state = state if arrived.ours else self._uncount(state, key)
        if pending.slicing is None:
            payload = everyones(flight.payload, rows)
        else:
            payload = pending.slicing.join(arrived.reduced)
        times = {name: np.array([x], np.float32) for name, x in taken.items()}
        return state, Collected(with_everyones_rows(flight, payload, rows, counted_N), draw, times)

    def _listen(self, pending: PendingExchange) -> Arrived:
        """Wait until the others have exchanged this payload; returns what came of it.

        Not for groups: they have anchors of their own, and may never exchange without us.

        Raises:
          Lost: nobody is left to exchange it.
        """
        how = {"members": pending.members, "terms": pending.terms, "reduction": pending.slicing}

        def look() -> Arrived | None:
            return self.exchange.skip(pending.name, pending.like, **how)

        return wait_for_donors(self.exchange, pending.name, look)

    def passed_over(self, sends: int) -> bool:
        """Whether the others went on without this region in the exchange after so many sends.

        True also while the store is away and nothing is known. Not for groups: see `_listen`.
        """
        if self.group_size is not None:
            return False
        try:
            return self.exchange.passed_over(f"{self.prefix}{sends + 1}")
        except StoreUnavailable:
            return True  # the exchange's heartbeat reports it

    def fetch_ahead(self, sends: int, steps: int, missed: int) -> int:
        """Read at once what the others may have landed since, after so many sends of ours.

        Args:
          steps: since then; no more sends than that are due.
          missed: sends, from the next on, in which this region has no part.

        Returns:
          Of how many sends it is known now.
        """
        if self.group_size is not None:  # there are other names
            return sends
        return sends + self.exchange.fetch_ahead(sends + 1, steps, missed)

    def pass_steps(self, state: TrainState, fragments: Fragments) -> None:
        """Tell the others of steps after which nothing is due."""
        if self.tells:
            self.anchor_history.note(state, fragments, anew=False)
            self.exchange.beat(trained=self.trained)
            self.answer(state)

    def publish_progress(self, state: TrainState, fragments: Fragments) -> None:
        """Tell the others that all events up to the counters' step are done."""
        self.anchor_history.note(state, fragments)
        if self.tells:
            self.exchange.beat(int(state.counters.step), self.trained)
            self.answer(state)

    def answer(self, state: TrainState) -> None:
        """Give a newcomer what it asks for: digests of anchors, and the state if we owe it."""
        if self.exchange.answer(self.anchor_history.past):
            self.exchange.give_state(*self.gives(state))

    def ended_before(self, state: TrainState) -> bool:
        """Whether others compared final anchors after as many sends as this state has.

        Then the last synchronisation is over, without this region. Waits while the store is away.
        """
        if self.group_size is not None:
            return False
        agreed = self.exchange.agreed_terms(self._final(state))
        sends = int(state.counters.sends.sum())
        return bool(agreed) and all(one["sends"] == sends for one in agreed.values())

    def compare_final_anchors(self, state: TrainState, fragments: Fragments) -> None:
        """After the last landing: compare anchors by one exchange without payloads.

        With gossip nothing is compared: regions have anchors of their own, and meet in groups.

        Raises:
          Parted: another region has another anchor.
        """
        if self.group_size is not None:
            return
        self.anchor_history.note(state, fragments)
        # No later send would notice. `heals` is False: no run goes on that one could join again.
        name = self._final(state)
        terms = self.anchor_history.terms(state.anchor, fragments)
        terms["sends"] = int(state.counters.sends.sum())
        how = {"takes_part": False, "terms": terms, "patience_s": self.patience_s}
        self.exchange.start(name, {}, **how)
        try:
            self.exchange.finish(name, {})
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
        what = "rounds" if self.by_rounds else "steps"
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
        return rounds_landed(state) if self.by_rounds else int(state.counters.step)

    def _final(self, state: TrainState) -> str:
        """Key of the exchange that compares anchors at the end."""
        return f"{self.prefix}{self.position(state)}.end"

    def _uncount(self, state: TrainState, key: str) -> TrainState:
        """The state as if this region had not sent at all: the others went on without it."""
        flight = state.in_flight[key]
        absent = dataclasses.replace(flight, takes_part=np.zeros_like(flight.takes_part))
        in_flight = {**state.in_flight, key: absent}
        return not_counted(state, flight).replace(in_flight=in_flight)

    def traffic(
        self,
        exchange: MeshExchange,
        like: PyTree,
        mask: np.ndarray,
        groups: Groups | None,
        header: int,
    ) -> Traffic:
        """Announced bytes of one exchange without anchors; takes all others to take part."""
        nbytes, everyone = exchange.nbytes(like) + header, self._with_others(mask)
        if groups is not None:
            return self._own(pair(nbytes, everyone, groups))
        if self._reduces(exchange):
            padded = padded_nbytes(exchange, like, self.total)
            return self._own(in_halves(padded, everyone).plus(all_gather(header, everyone)))
        return self.traffic_in_whole(nbytes, mask)

    def traffic_in_whole(self, nbytes: int, mask: np.ndarray) -> Traffic:
        """`traffic` where every region gets all payloads, of `nbytes` bytes each, whole."""
        return self._own(all_gather(nbytes, self._with_others(mask)))

    def _with_others(self, mask: np.ndarray) -> np.ndarray:
        """Bool `[R]`: this region as in `mask`, and all others."""
        everyone = np.ones(self.total, bool)
        everyone[self.region] = mask.any()
        return everyone

    def _own(self, traffic: Traffic) -> Traffic:
        own = slice(self.region, self.region + 1)
        # Who only listens reduces no slice either.
        sent = traffic.sent[own] * (not self.listens_only)
        return traffic._replace(sent=sent, received=traffic.received[own])


def traffic_of(setup: Setup) -> TrafficFn:
    """Announced bytes of an exchange with these settings, as `MeshExchange.traffic`."""
    if isinstance(setup.exchange, str):
        return MeshExchange.traffic
    there = LoopbackExchange(setup.exchange.region, setup.regions)
    return JobDelivery(there, setup.method.anchors == "shared").traffic


def _that_travel(flight: InFlight) -> dict[str, Any]:
    """The arrays of a payload that travel, `[1, ...]` by name."""
    headers = {f"{HEADER}/{name}": x for name, x in flight.header.items()}
    return named(flight.payload) | headers | {"weight": flight.weight}


def everyones(payload: PyTree, rows: dict[str, np.ndarray]) -> PyTree:
    """A payload with a row for every member, `[N, ...]`."""
    return jax.tree.structure(payload).unflatten(rows[name] for name in named(payload))


def nobodys_flight(p: int, step: int) -> InFlight:
    """A payload of fragment p in flight to which this region adds nothing, `[1, ...]`."""
    return InFlight(
        payload=None,
        snapshot=None,
        accepted=np.ones(1, bool),
        weight=np.zeros(1, np.float32),
        fragment=np.int64(p),
        sent=np.int64(step),
        due=np.full(1, step, np.int64),
        takes_part=np.zeros(1, bool),
        anchor_updated=np.bool_(False),
        level=np.int64(0),
        header={},
    )


def with_everyones_rows(
    flight: InFlight, payload: PyTree, rows: dict[str, np.ndarray], counted_N: np.ndarray
) -> InFlight:
    """The flight as all members' together; those left out have weight 0."""
    return dataclasses.replace(
        flight,
        payload=payload,
        weight=np.where(counted_N, rows["weight"], np.float32(0)),
        header={k.removeprefix(f"{HEADER}/"): x for k, x in rows.items() if k.startswith(HEADER)},
        takes_part=counted_N,
    )


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


class Participation:
    """Whether the others counted the newest payloads that this region has sent."""

    def __init__(self) -> None:
        self._counted: deque[bool] = deque(maxlen=RUNNING)
        self._told = False

    def note(self, counted: bool) -> None:
        """Note how an exchange ended; warns where so many in a row have left this region out."""
        self._counted.append(counted)
        if counted:
            self._told = False
        elif not self._told and self.none(RUNNING):
            self._told = True
            log.warning(
                "this region was not counted in %d exchanges running, and trains on: the others "
                "get nothing that it learns. See whether they reach its address, and whether its "
                "steps or its link are too slow for them",
                RUNNING,
            )

    def none(self, sends: int) -> bool:
        """Whether nothing counted of the last three payloads, or of all where there were fewer.

        Args:
          sends: of the run so far. Of fewer payloads, as after a restart, nothing follows.
        """
        return len(self._counted) == min(sends, RUNNING) > 0 and not any(self._counted)
