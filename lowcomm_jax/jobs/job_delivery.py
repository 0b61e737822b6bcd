"""`JobDelivery`: a region's payloads on their way to the other jobs, and theirs to this one.

`JobCarrier` calls it: `start` begins an exchange at a send, `arrives` waits, `finish` returns
everyone's payload at the landing. With gossip `send_ahead` sends a moved anchor after a landing,
and the next `start` of that fragment takes the anchor along. `answer` gives the state to a region
that asks for one. `finish` raises `Parted` where the regions have different anchors.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import MeshExchange, Traffic, all_gather, in_halves, pair
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.jobs.anchor_history import AnchorHistory
from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.params.fragments import Fragments, take
from lowcomm_jax.rounds.loopback_exchange import LoopbackExchange
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.rounds.request import Arrived, nothing
from lowcomm_jax.rounds.slicing import Slicing, goes_in_slices, named, padded_nbytes
from lowcomm_jax.rounds.state_transfer import State, shared_state
from lowcomm_jax.rules.topology import Groups, member_table
from lowcomm_jax.state.train_state import InFlight, TrainState, rounds_landed
from lowcomm_jax.store.errors import Lost, Parted, StoreUnavailable
from lowcomm_jax.store.wire import without_region
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import not_counted

PyTree = Any
log = logging.getLogger(__name__)

HEADER, ANCHOR = "header", "anchor"
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
      group_size: a fragment is exchanged in groups of at most so many regions, with the anchors of
        their members; None = among all.
      listens_only: take what the others exchange, and send nothing (`rejoin.catch_up`).
      sends_ahead: send moved anchors before the payload; not while rounds are only caught up with.
      never_defers: wait for the others also while the store is away.
      trained: inner steps this region has made.
      by_rounds: regions have rounds in common, but no steps (`round_carrier`).
      prefix: what the names of all its exchanges begin with.
      slicings: how payloads are reduced in slices, by fragment and level; deliveries of the same
        fragments may share them, so that each is compiled once.
      whole: every region needs the payloads of all, and not only their mean.
      gives: what a region that asks is given of a state.
      answers: whether states that land here are given; not where one is a part of a region's.
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
        self.sends_ahead = self.answers = True
        self.gives: Callable[[TrainState], State] = shared_state
        self.participation = Participation()
        self.trained, self.prefix, self._patience_s = 0, prefix, 0.0
        self._pending: dict[str, PendingExchange] = {}
        self._ahead: dict[int, str] = {}  # by fragment: key of the anchor that was sent ahead
        self.slicings: dict[tuple[int, int], Slicing] = {}

    def loopback(self) -> JobDelivery:
        """A delivery without the other regions; what it compiles is compiled for this one, too."""
        there = LoopbackExchange(self.region, self.total)
        alone = JobDelivery(there, self.anchor_history.shared, self.group_size)
        alone.slicings, alone.whole = self.slicings, self.whole
        return alone

    def start(
        self,
        key: str,
        number: int,
        flight: InFlight,
        anchor: dict[str, Any],
        groups: Groups | None,
        exchange: MeshExchange,
        fragments: Fragments,
        again: bool = False,
        round: int = 0,
    ) -> None:
        """Begin the exchange of a flight's payload.

        With gossip it comes with this region's anchor: the one that was sent ahead, or else the
        anchor is sent now. That is so in a first round, and after a restart or an outage.

        Args:
          key: of the flight.
          number: of the send, the same in all regions.
          groups: who exchanges; None = all regions.
          again: the payload was sent before, by a job that has ended.
          round: number of the fragment's round, from 0; of use in groups.
        """
        p = int(flight.fragment)
        members, like = self.own_group(groups), fragments.like(p)
        # Named by its number: a region that decided on another fragment or step must find out.
        name, arrays = f"{self.prefix}{number}", _that_travel(flight)
        # Sent again: the anchor may have moved since, and does not tell which one it was.
        terms = decided(flight) | ({} if again else self.anchor_history.sent(anchor, fragments, p))
        if self.by_rounds:
            del terms["step"]
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in arrays.items()}
        slicing = None
        if groups is None and self._reduces(exchange):
            slicing = self._slicing(flight, shapes, exchange, like)
            shapes = {k: x for k, x in shapes.items() if k in slicing.rest}
        if self.group_size is not None:
            of_anchor = {f"{ANCHOR}/{k}": x.shape for k, x in like.items()}
            shapes |= {k: jax.ShapeDtypeStruct((1, *x), "float32") for k, x in of_anchor.items()}
        self._pending[key] = PendingExchange(
            name, terms, members, shapes, self.listens_only, slicing
        )
        if not self.listens_only:
            how = {"members": members, "terms": terms, "reduction": slicing}
            how["patience_s"] = self._patience_s
            if self.group_size is not None:
                how["early"] = self._taken_along(flight, round, anchor, members, fragments)
            arrays = self.arrays_to_send(flight)
            self.exchange.start(name, arrays, takes_part=bool(flight.takes_part.any()), **how)

    def arrays_to_send(self, flight: InFlight) -> dict[str, Any]:
        """The arrays of a payload that travel, `[1, ...]` by name, whole in this process."""
        return {name: whole(x) for name, x in _that_travel(flight).items()}

    # -- anchors, with gossip -------------------------------------------------------------------

    def send_ahead(
        self, p: int, round: int, anchor: dict[str, Any], groups: Groups, fragments: Fragments
    ) -> Traffic:
        """Send fragment p's anchor to the group of its next round, beside the inner steps.

        Args:
          round: number of that round.
          groups: of that round.

        Returns:
          the bytes.
        """
        self._send_anchor(p, round, anchor, self.own_group(groups), fragments, self.trained, True)
        return self.anchor_traffic(fragments.like(p), np.ones(1, bool), groups)

    def nothing_ahead(self, groups: Groups) -> Traffic:
        """What `send_ahead` returns of an anchor that is not sent."""
        return self._own(pair(0, np.ones(self.total, bool), groups))

    def has_sent_ahead(self, p: int) -> bool:
        """Whether fragment p's anchor is already on its way to the next round's group."""
        return p in self._ahead

    def drop_ahead(self) -> None:
        """Forget what was sent ahead: no round follows, or this state is another."""
        if self._ahead:
            self.exchange.drop_early()
        self._ahead = {}

    def anchor_traffic(self, like: PyTree, mask: np.ndarray, groups: Groups) -> Traffic:
        """Bytes of the anchors of one round; takes all other regions to send theirs."""
        nbytes = 4 * sum(x.size for x in jax.tree.leaves(like))
        return self._own(pair(nbytes, self._with_others(mask), groups))

    def _taken_along(
        self, flight: InFlight, round: int, anchor, members, fragments: Fragments
    ) -> str:
        """Key of the anchor that goes with a payload; sends it now if it was not sent ahead."""
        p, key = int(flight.fragment), _anchor_key(int(flight.fragment), round)
        if self._ahead.get(p, key) != key:
            self.drop_ahead()  # of another state
        if p not in self._ahead:
            takes_part = bool(flight.takes_part.any())
            self._send_anchor(p, round, anchor, members, fragments, int(flight.sent), takes_part)
        return self._ahead.pop(p)

    def _send_anchor(
        self,
        p: int,
        round: int,
        anchor,
        members,
        fragments: Fragments,
        step: int,
        takes_part: bool,
    ) -> None:
        cut = _copied(fragments.leaves(anchor, p), fragments.rows(p))
        arrays = {f"{ANCHOR}/{k}": whole(x) for k, x in cut.items()}
        self._ahead[p] = key = _anchor_key(p, round)
        how = {"members": members, "step": step, "takes_part": takes_part}
        self.exchange.send_early(key, arrays, **how)

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
        """Whether waits are to stop for now (`stop_when`); not at the end of a run."""
        return not self.never_defers and self.exchange.stopped()

    def be_patient(self, seconds: float) -> None:
        """Wait so much longer than usual for the others, in exchanges started from now on."""
        self._patience_s = seconds

    @property
    def flying(self) -> list[str]:
        """Names of the exchanges under way that this region has sent to."""
        return [one.name for one in self._pending.values() if not one.listens_only]

    def arrives(self, state: TrainState, keys: Sequence[str], fragments: Fragments) -> bool:
        """Wait until `finish` would not block for these payloads; False = the store is away, or the
        wait was stopped.

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
        gives = self.answers and self.group_size is None and not self.never_defers
        if gives:
            self.anchor_history.note(state, fragments)
        return not names or self._arrive(state, names, gives) or self.never_defers

    def _arrive(self, state: TrainState, names: Sequence[str], gives: bool = False) -> bool:
        if not all(map(self.exchange.ready, names)):
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
            arrived = self._listen(pending) if learns else nothing(pending.like, self.total)
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
            counted = bool(arrived.participants[self.region])
            self.participation.note(counted)
            state = state if counted else self._uncount(state, key)
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
        donors = DonorWait(self.exchange)
        how = {"members": pending.members, "terms": pending.terms, "reduction": pending.slicing}

        def look() -> Arrived | None:
            return self.exchange.skip(pending.name, pending.like, **how)

        return leader().broadcast_from_leader("listen", lambda: donors.wait(pending.name, look))

    def frontier(self, done: bool = False) -> int:
        """Inner steps of the furthest other region; 0 if nobody is there; `done`: see there."""
        return self.exchange.frontier(done)

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

    def forget_ahead(self) -> None:
        """Let go of what was read so and is not needed any more."""
        self.exchange.forget_ahead()

    def still_behind(self) -> None:
        """Tell the others how far this region has trained while it defers its events."""
        self.exchange.beat(trained=self.trained)

    def pass_steps(self, state: TrainState, fragments: Fragments) -> None:
        """Tell the others of steps after which nothing is due."""
        if self.answers:
            self.anchor_history.note(state, fragments, anew=False)
            self.exchange.beat(trained=self.trained)
            self.answer(state)

    def publish_progress(self, state: TrainState, fragments: Fragments) -> None:
        """Tell the others that all events up to the counters' step are done."""
        self.anchor_history.note(state, fragments)
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
        how = {"takes_part": False, "terms": terms, "patience_s": self._patience_s}
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


def _that_travel(flight: InFlight) -> dict[str, Any]:
    """The arrays of a payload that travel, `[1, ...]` by name."""
    headers = {f"{HEADER}/{name}": x for name, x in flight.header.items()}
    return named(flight.payload) | headers | {"weight": flight.weight}


def _anchor_key(p: int, round: int) -> str:
    """Key of an anchor: no number, as those of exchanges are."""
    return f"{p}.{round}.anchor"


@jax.jit
def _copied(leaves: dict[str, jax.Array], rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A fragment of an anchor, copied: the landing may donate the anchor before it is read."""
    return jax.tree.map(jnp.copy, take(unstow(leaves), rows))


def decided(flight: InFlight) -> dict[str, int]:
    """What the schedule has decided on a payload: step, fragment, level."""
    what = {"step": flight.sent, "fragment": flight.fragment, "level": flight.level}
    return {name: int(x) for name, x in what.items()}


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


class DonorWait:
    """Waits for donors, and gives up when none was seen for a while.

    The while covers short outages. Regions that ask for a state themselves are no donors, since
    they would wait for one another for ever.
    """

    def __init__(self, exchange: RemoteExchange):
        self._exchange = exchange
        self._seen = time.monotonic()

    def check(self, awaited: str) -> None:
        """Look for donors once.

        Raises:
          Lost: no donor was seen for 10 s; the message names what this region waits for
            (`awaited`).
        """
        now = time.monotonic()
        if self._exchange.state_transfer.donors():
            self._seen = now
        elif now > self._seen + _GIVE_UP_SECONDS:
            raise Lost(f"all other regions are gone before {awaited}: join again")

    def wait(self, awaited: str, look: Callable[[], T | None]) -> T:
        """Calls `look` until it returns something other than None, and returns that.

        Raises:
          Lost: see `check`.
        """
        while True:
            self.check(awaited)
            try:
                found = look()
            except StoreUnavailable:
                found = None  # the exchange's heartbeat reports it
            if found is not None:
                return found
            time.sleep(_POLL_SECONDS)


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
