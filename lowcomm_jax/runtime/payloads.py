"""What a region publishes for an exchange: bytes for everyone and, where payloads are reduced in
slices, a slice for each of the others."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowcomm_jax.runtime import wire
from lowcomm_jax.runtime.commits import PayloadRecord
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import StoreUnavailable
from lowcomm_jax.runtime.fetch import PayloadPiece
from lowcomm_jax.runtime.heartbeat import Beat
from lowcomm_jax.runtime.request import ExchangeRequest
from lowcomm_jax.runtime.wire import Arrays, Reduction, name_of_slice, one_slice


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One region's arrays on the host.

    Attributes:
      whole: all of them.
      rest: what everyone needs of them; slices: the others, `[parts, ...]`.
    """

    whole: Arrays
    rest: Arrays
    slices: Arrays


class PackedPayload(NamedTuple):
    """A parcel as bytes.

    Attributes:
      payload: names them.
      data: for everyone.
      slices: by the region that reduces them.
    """

    payload: PayloadRecord
    data: bytes
    slices: dict[int, bytes]


def on_host(arrays: dict[str, Any], reduction: Reduction | None) -> Parcel:
    """The arrays once they are computed, in slices if they are reduced so."""
    host = {name: np.asarray(x) for name, x in arrays.items()}
    return Parcel(host, *((host, {}) if reduction is None else reduction.split(host)))


def pack(office: ExchangeContext, name: str, parcel: Parcel) -> PackedPayload:
    """As bytes that tell the run, the name of the exchange and the region."""
    data = wire.pack(office.run_id, name, office.region, parcel.rest)
    parts = len(next(iter(parcel.slices.values()), ()))
    slices = {
        s: wire.pack(
            office.run_id, name_of_slice(name, s), office.region, one_slice(parcel.slices, s)
        )
        for s in range(parts)
        if s != office.region
    }
    named = [_named(slices[s]) if s in slices else None for s in range(parts)]
    return PackedPayload(PayloadRecord(wire.digest(data), len(data), tuple(named)), data, slices)


def publish(
    office: ExchangeContext,
    key: str,
    packed: PackedPayload,
    readers: Sequence[int],
    insist: Callable,
) -> dict:
    """Hand it all to the transport, through `insist`; returns the hint for `Said`.

    Args:
      readers: regions that will fetch it at once; others can ask for it. Nobody else: what is
        offered and never pulled stays in memory.
    """
    pieces = [*packed.slices.values(), packed.data]
    sent = office.mishaps.sent(key, b"".join(pieces))
    ends = itertools.accumulate(map(len, pieces))
    *slices, data = [sent[end - len(x) : end] for end, x in zip(ends, pieces)]

    def put(payload: PayloadRecord, data: bytes, readers: Sequence[int]) -> dict:
        return insist(lambda: office.transport.put(payload.digest, data, readers))

    payload = packed.payload
    hints = {
        str(s): put(payload.slices[s], x, [s] if s in readers else [])
        for s, x in zip(packed.slices, slices)
    }
    hint = put(payload, data, readers)
    return {**hint, "slices": hints} if hints else hint


def pieces(
    request: ExchangeRequest,
    region: int,
    payload: PayloadRecord,
    like: wire.Shapes | None,
    hint: dict,
    slice_of: int | None,
) -> list[PayloadPiece]:
    """What to fetch of a region: what all need, and the slice that region `slice_of` reduces."""
    holders = [region, *(r for r in request.members if r != region)]
    whole = PayloadPiece(request.key, request.name, payload, like, holders, hint)
    if slice_of is None or request.reduction is None or not payload.slices[slice_of]:
        return [whole]
    return [whole, slice_piece(whole, request.reduction, slice_of)]


def slice_piece(whole: PayloadPiece, reduction: Reduction, number: int) -> PayloadPiece:
    """What to fetch of a region for its slice of this number, given what to fetch of it at all."""
    return PayloadPiece(
        whole.key,
        name_of_slice(whole.name, number),
        whole.payload.slices[number],
        reduction.like,
        whole.holders[:1],  # nobody else has any use for it
        whole.hint.get("slices", {}).get(str(number), {}),
    )


def _named(data: bytes) -> PayloadRecord:
    return PayloadRecord(wire.digest(data), len(data))


# -- litter ------------------------------------------------------------------------------------
#
# Removes payloads that nobody needs any longer.


@dataclasses.dataclass(frozen=True)
class _Done:
    """An exchange that is over: its place in our order, and the payloads published for it."""

    position: int
    digests: dict[int, list[str]]


class PayloadGC:
    """Keeps the payloads of the newest `keep` keys behind the slowest region that needs them.

    A region that is alive and at most `keep` keys behind us, or has asked for a state, catches up
    from them; where steps are short it is further behind when it comes in, and has as many keys
    more. One that is behind for longer is too stale for that, and takes a state, too; one that has
    come back and not asked yet, because it compiles, will be given a newer one. Each region
    removes its own payloads; those of the dead are removed by the lowest living region. Commit
    records stay: they are small, and without one a late region could make another.
    """

    def __init__(self, office: ExchangeContext, keep: int):
        self._office, self._keep = office, keep
        self._positions: dict[str, int] = {}
        self._reached: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # our place when a region was last seen asking
        self._done: dict[str, _Done] = {}
        self._lock = threading.Lock()

    def adopt(self) -> None:
        """Take over what earlier jobs have left announced."""
        for name, region in self._office.board.all_said():
            said = self._office.board.heard(name, region)
            digests = said.payload.digests if said is not None and said.payload else []
            self._done.setdefault(name, _Done(-1, {})).digests[region] = digests

    def begin(self, key: str) -> None:
        """A key's place in our order is when we first hear of it."""
        with self._lock:
            self._positions.setdefault(key, len(self._positions))

    def done(self, key: str, published: dict[str, dict[int, list[str]]]) -> None:
        """We have everything of this key; `published`: digests by name and region."""
        with self._lock:
            for name, digests in published.items():
                self._done[name] = _Done(self._positions[key], digests)
            self._reach(self._office.region, key)
        self._office.beats.update(passed=key)

    def all_have_ours(self) -> bool:
        """Whether every living region has what we have, as far as they told."""
        with self._lock:
            self._look()
            ours = self._reached.get(self._office.region, -1)
            living = self._office.beats.living()
            return all(self._reached.get(region, -1) >= ours for region in living)

    def sweep(self) -> None:
        """Remove what every living region has left behind; tried again when the store is away."""
        with self._lock:
            passed = {name: self._done.pop(name) for name in self._passed()}
        # Without the lock, which the training thread takes to begin an exchange.
        while passed:
            name, done = next(iter(passed.items()))
            try:
                self._remove(name, done)
            except StoreUnavailable:
                with self._lock:
                    self._done |= passed
                return
            del passed[name]

    def _reach(self, region: int, key: str) -> None:
        place = self._positions.get(key, -1)
        self._reached[region] = max(place, self._reached.get(region, -1))

    def _look(self) -> dict[int, Beat]:
        latest = self._office.beats.latest()
        for region, beat in latest.items():
            self._reach(region, beat.passed)
        return latest

    def _passed(self) -> list[str]:
        living = self._office.beats.living(certain=False)
        # All as they told at the same time: who asks for a state after that gets one of a donor
        # that has come at least as far as it told, and needs nothing from before it.
        latest = self._look()
        place = self._reached.get(self._office.region, -1)
        self._asked |= {r: place for r in living if latest[r].wants}

        def needs(region: int) -> bool:
            since = max(seen.get(region, -1) for seen in (self._reached, self._asked))
            return latest[region].wants or (latest[region].awaited and since >= place - self._keep)

        needing = filter(needs, living)
        slowest = min((self._reached.get(region, -1) for region in needing), default=-1)
        return [n for n, done in self._done.items() if done.position + self._keep <= slowest]

    def _remove(self, name: str, done: _Done) -> None:
        living = self._office.beats.living(certain=False)
        for region, digests in done.digests.items():
            ours = self._office.region == (region if region in living else min(living))
            for digest in digests:
                self._office.transport.drop(digest, shared=ours)
            if ours:
                self._office.board.forget(name, region)
