"""Payloads of one region's job on their way to the other jobs, and theirs to this one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import (
    GroupExchange,
    MeshExchange,
    Traffic,
    all_gather,
    in_halves,
    pair,
)
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.params.fragments import Fragments
from lowcomm_jax.runtime.anchor_history import AnchorHistory, give
from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.runtime.errors import Parted, StoreUnavailable
from lowcomm_jax.runtime.liveness_wait import LivenessWait
from lowcomm_jax.runtime.loopback_exchange import LoopbackExchange
from lowcomm_jax.runtime.request import Arrived, nothing
from lowcomm_jax.runtime.slicing import Slicing, goes_in_slices, named, padded_nbytes
from lowcomm_jax.runtime.wire import shapes_of
from lowcomm_jax.state.train_state import InFlight, TrainState, with_item
from lowcomm_jax.topology.gossip import Groups, member_table

# -- pending --------------------------------------------------------------------------------------
#
# A payload on its way between jobs, and what comes of it.


PyTree = Any
HEADER, ANCHOR = "header", "anchor"


@dataclasses.dataclass
class PendingExchange:
    """A payload under way.

    Attributes:
      name: under which the jobs exchange it; terms: on which (`exchange.start`).
      members: the regions that do, ascending.
      like: shapes and dtypes of what comes of each region, by name.
      silent: this region only listens.
      slicing: how payloads are reduced in slices; None = everyone gets those of all.
    """

    name: str
    terms: dict[str, Any]
    members: tuple[int, ...]
    like: dict[str, jax.ShapeDtypeStruct]
    silent: bool
    slicing: Slicing | None


def decided(flight: InFlight) -> dict[str, int]:
    """What the schedule has decided of a payload."""
    what = {"step": flight.sent, "fragment": flight.fragment, "level": flight.level}
    return {name: int(x) for name, x in what.items()}


def everyones(payload: PyTree, rows: dict[str, np.ndarray]) -> PyTree:
    """A payload with a row for every member, `[N, ...]`."""
    return jax.tree.structure(payload).unflatten(rows[name] for name in named(payload))


def counted(
    flight: InFlight, payload: PyTree, rows: dict[str, np.ndarray], counted_N: np.ndarray
) -> InFlight:
    """The flight as all members' together; those left out have weight 0."""
    return dataclasses.replace(
        flight,
        payload=payload,
        weight=np.where(counted_N, rows["weight"], np.float32(0)),
        header={name: rows[f"{HEADER}/{name}"] for name in flight.header},
        takes_part=counted_N,
    )


class JobDelivery:
    """The `carrying.Carrier` of a job that is one region of several.

    Payloads are reduced as on the mesh: in slices, of which every region averages one, or by every
    region for itself, where each gets those of all others (with gossip: its partners', with their
    anchors). The arithmetic is that of the mesh, so that the anchors are the same, bit for bit.

    Attributes:
      moments: the anchors that there were.
      silent: listen to what the others exchange, and say nothing (`rejoin.catch_up`).
    """

    def __init__(self, exchange: JobExchange | LoopbackExchange, shared: bool):
        """`shared`: all regions have one anchor, not each its own."""
        self.exchange, self.moments = exchange, AnchorHistory(shared)
        self.total, self.region = exchange.count, exchange.region
        self.silent = self.insists = False
        self.trained = 0
        self._pending: dict[str, PendingExchange] = {}
        self._anchors: dict[str, PyTree] = {}
        self._times: dict[str, dict[str, np.ndarray]] = {}
        self._slicings: dict[tuple[int, int], Slicing] = {}

    def rehearsing(self) -> JobDelivery:
        """A delivery without the others; what it compiles is compiled for this one, too."""
        alone = JobDelivery(LoopbackExchange(self.region, self.total), self.moments.shared)
        alone._slicings = self._slicings
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
    ) -> None:
        p = int(flight.fragment)
        members, like = self.own_group(groups), fragments.like(p)
        # By its number: who has decided on another fragment or step for it must find out.
        name, parcel = str(number), self._parcel(flight, anchor, like)
        # Of what was sent before the anchor may have moved since: it does not tell which it was.
        terms = decided(flight) | ({} if again else self.moments.sent(anchor, fragments, p))
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in parcel.items()}
        slicing = None
        if groups is None and goes_in_slices(exchange, self.total):
            slicing = self._slicing(flight, shapes, exchange, like)
            shapes = {k: x for k, x in shapes.items() if k in slicing.rest}
        self._pending[key] = PendingExchange(name, terms, members, shapes, self.silent, slicing)
        if not self.silent:
            how = {"members": members, "terms": terms, "reduction": slicing}
            self.exchange.start(name, parcel, takes_part=bool(flight.takes_part.any()), **how)

    def _parcel(self, flight: InFlight, anchor: dict[str, Any], like: PyTree) -> dict[str, Any]:
        """What travels, leaves `[1, ...]` by name."""
        parcel = named(flight.payload) | {
            f"{HEADER}/{name}": x for name, x in flight.header.items()
        }
        parcel["weight"] = flight.weight
        if self.moments.shared:
            return parcel
        # Copies: the landing donates the anchor, perhaps before it has been read.
        return parcel | {f"{ANCHOR}/{k}": jnp.copy(anchor[k]) for k in like}

    def _slicing(self, flight: InFlight, shapes: dict, exchange, like: PyTree) -> Slicing:
        """Made once for each fragment and level, so that each is compiled once."""
        kind = int(flight.fragment), int(flight.level)
        if kind not in self._slicings:
            payload = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flight.payload)
            rest = shapes_of({k: x for k, x in shapes.items() if k not in named(payload)})
            self._slicings[kind] = Slicing(exchange.slices, like, payload, rest, self.total)
        return self._slicings[kind]

    def own_group(self, groups: Groups | None) -> tuple[int, ...]:
        """The regions that this one exchanges with, itself included; groups as in `start`."""
        if groups is None:
            return tuple(range(self.total))
        return next(tuple(group) for group in groups if self.region in group)

    def reachable(self) -> bool:
        """See `carrying.Carrier`."""
        return self.insists or self.exchange.reachable()

    def be_patient(self, seconds: float) -> None:
        """See `carrying.Carrier`."""
        self.exchange.be_patient(seconds)

    def arrives(self, state: TrainState, keys: Sequence[str]) -> bool:
        """See `carrying.Carrier`."""
        loop = [self._pending[key] for key in keys if key in self._pending]
        return self.insists or all(
            pending.silent or self._arrives(state, pending) for pending in loop
        )

    def _arrives(self, state: TrainState, pending: PendingExchange) -> bool:
        if not self.exchange.ready(pending.name):
            if not self.reachable():
                return False
            # What the device has still to compute is no waiting for bytes.
            jax.block_until_ready(state.inner.params)
        return self.exchange.arrives(pending.name)

    def hears(self, key: str) -> bool:
        """See `carrying.Carrier`; a group of which one may never exchange without us."""
        pending = self._pending.get(key)
        return pending is None or not pending.silent or len(pending.members) == self.total

    def finish(self, state: TrainState, key: str) -> tuple[TrainState, InFlight]:
        """See `carrying.Carrier`; blocks until everyone's payload is here.

        Raises:
          Parted: the regions had different anchors when they sent, or sent something else.
          ValueError: the payload comes from a checkpoint, and was not sent off again.
        """
        if key not in self._pending:
            raise ValueError(
                f"payload {key!r} is in flight in a state that was restored: call "
                "Engine.reconnect(state) before the first step"
            )
        flight, heard, pending = state.in_flight[key], self.hears(key), self._pending.pop(key)
        if pending.silent:
            arrived = self._heard(pending) if heard else nothing(pending.like, self.total)
        else:
            self._arrives(state, pending)
            arrived = self.exchange.finish(pending.name, pending.like)
        taken = {"travel_seconds": arrived.seconds, "waited_seconds": arrived.waited}
        self._times[key] = {name: np.array([x], np.float32) for name, x in taken.items()}
        rows = {name: x[list(pending.members), 0] for name, x in arrived.arrays.items()}
        counted_N = arrived.participants[list(pending.members)]
        anchors = {k: x for k, x in rows.items() if k.startswith(f"{ANCHOR}/")}
        if anchors:
            self._anchors[key] = {k.removeprefix(f"{ANCHOR}/"): x for k, x in anchors.items()}
        if flight.takes_part.any() and not arrived.participants[self.region]:
            state = self._left_out(state, key)
        if pending.slicing is None:
            payload = everyones(flight.payload, rows)
        else:
            payload = pending.slicing.join(arrived.reduced)
        return state, counted(flight, payload, rows, counted_N)

    def _heard(self, pending: PendingExchange) -> Arrived:
        """What the others have exchanged, as soon as they have.

        Not of groups: they have anchors of their own, and one may never exchange without us.

        Raises:
          Lost: there is nobody left to do so.
        """
        company, how = (
            LivenessWait(self.exchange),
            {"members": pending.members, "terms": pending.terms},
        )
        how["reduction"] = pending.slicing

        def heard() -> Arrived | None:
            return self.exchange.skip(pending.name, pending.like, **how)

        return leader().broadcast_from_leader("heard", lambda: company.wait(pending.name, heard))

    def frontier(self) -> int:
        """Inner steps of the region that is furthest, this one left out; 0 if nobody is there."""
        steps = self.exchange.steps()
        return max((steps.get(region, 0) for region in self.exchange.donors()), default=0)

    def passed_over(self, sends: int) -> bool:
        """Whether others go on without this region in what leaves after so many sends.

        Also while that cannot be known, for the store is away. Not of groups: see `_heard`.
        """
        if not self.moments.shared:
            return False
        try:
            return self.exchange.passed_over(str(sends + 1))
        except StoreUnavailable:
            return True  # the exchange's heartbeat reports it

    def still_behind(self) -> None:
        """See `carrying.Carrier`; the others learn it as soon as they can be reached."""
        self.exchange.trains(self.trained)

    def times(self, key: str | None) -> dict[str, np.ndarray]:
        return self._times.pop(key, {})

    def settled(self, state: TrainState, fragments: Fragments) -> None:
        self.moments.note(state, fragments)
        self.exchange.beat(int(state.counters.step), self.trained)
        self.answer(state)

    def answer(self, state: TrainState) -> None:
        """Give a newcomer what it asks for."""
        self.exchange.vouch(self.moments.past)
        give(self.exchange, state)

    def ended(self, state: TrainState, fragments: Fragments) -> None:
        if not self.moments.shared:
            return
        self.moments.note(state, fragments)
        # Nobody sends from what the last landings have left; nor does a run go on to come back to.
        name, terms = f"{state.counters.step}.end", self.moments.terms(state.anchor, fragments)
        terms["sends"] = int(state.counters.sends.sum())
        self.exchange.start(name, {}, takes_part=False, terms=terms)
        try:
            self.exchange.finish(name, {})
        except Parted as error:
            raise Parted(str(error), heals=False) from error

    def _left_out(self, state: TrainState, key: str) -> TrainState:
        """The others went on without this region: as if it had not sent at all."""
        flight = state.in_flight[key]
        p, codec = int(flight.fragment), state.codec
        if flight.takes_part.any() and flight.sent == state.counters.last_sent[p]:
            # Not where a later payload was encoded since: its residual follows from this one's.
            codec = with_item(codec, p, flight.kept)
        flight = dataclasses.replace(flight, takes_part=np.zeros_like(flight.takes_part))
        return state.replace(codec=codec, in_flight={**state.in_flight, key: flight})

    def draw(self, groups: GroupExchange, key: str) -> Draw:
        """Of the one group there is: its members' rows, as `finish` has put them side by side."""
        anchors = self._anchors.pop(key)
        count = len(next(iter(anchors.values())))
        return Draw(member_table([tuple(range(count))], groups.topology.group_size)[:1], anchors)

    def anchors_ahead(self, nbytes: int, groups: Groups) -> Traffic:
        """None: they travel with the payloads (`traffic`)."""
        return self._own(pair(0, np.ones(self.total, bool), groups))

    def traffic(
        self,
        exchange: MeshExchange,
        like: PyTree,
        mask: np.ndarray,
        groups: Groups | None,
        header: int,
    ) -> Traffic:
        """As announced: that all other regions take part is not known before the landing."""
        nbytes = exchange.nbytes(like) + header
        everyone = np.ones(self.total, bool)
        everyone[self.region] = mask.any()
        if groups is not None:
            anchor = 4 * sum(x.size for x in jax.tree.leaves(like))
            return self._own(pair(nbytes + anchor, everyone, groups))
        if goes_in_slices(exchange, self.total):
            padded = padded_nbytes(exchange, like, self.total)
            return self._own(in_halves(padded, everyone).plus(all_gather(header, everyone)))
        return self._own(all_gather(nbytes, everyone))

    def _own(self, traffic: Traffic) -> Traffic:
        own = slice(self.region, self.region + 1)
        sent = traffic.sent[own] * (not self.silent)  # who only listens reduces no slice either
        return traffic._replace(sent=sent, received=traffic.received[own])
