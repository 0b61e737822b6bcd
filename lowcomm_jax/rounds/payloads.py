"""A region's payload: on the host, as bytes (`pack`), and removed (`PayloadGC`).

A payload is bytes for everyone and, where payloads are reduced in slices, one slice for each of the
other regions.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import jax
import msgspec
import numpy as np

from lowcomm_jax.rounds.slicing import Slicing
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.records import Beat, Payload
from lowcomm_jax.store.wire import Arrays, one_slice

Published = dict[str, dict[Job, list[str]]]
"""Digests of what was published, by the name of the exchange and by job; [] = nothing."""


@dataclasses.dataclass(frozen=True)
class HostPayload:
    """One region's arrays on the host.

    Attributes:
      whole: all of them.
      rest: those that every region needs.
      slices: the others, `[parts, ...]`.
    """

    whole: Arrays
    rest: Arrays
    slices: Arrays


def begin_copies(arrays: Mapping[str, Any]) -> None:
    """Begin to copy arrays to the host, beside what the device computes."""
    for x in arrays.values():
        if isinstance(x, jax.Array):
            x.copy_to_host_async()


def on_host(arrays: dict[str, Any], reduction: Slicing | None) -> HostPayload:
    """Arrays `[1, ...]` once they are computed, without that axis; in slices if reduced so."""
    host = {name: np.asarray(x)[0, ...] for name, x in arrays.items()}
    return HostPayload(host, *((host, {}) if reduction is None else reduction.split(host)))


def pack(
    context: ExchangeContext, key: str, host_payload: HostPayload
) -> tuple[Payload, dict[str, bytes]]:
    """The payload's record, and its files by digest: the slices of other regions, then the rest.

    The files are as `FaultHooks.sent` of this key returns them.
    """

    def packed(arrays: Arrays) -> tuple[Payload, bytes]:
        data = wire.pack(context.run_id, context.heartbeat.job, next(context.serials), arrays)
        return Payload(wire.digest(data), len(data)), data

    rest, data = packed(host_payload.rest)
    parts = len(next(iter(host_payload.slices.values()), ()))
    others = [s for s in range(parts) if s != context.region]
    slices = {s: packed(one_slice(host_payload.slices, s)) for s in others}
    named = tuple(slices[s][0] if s in slices else None for s in range(parts))
    files = {payload.digest: piece for payload, piece in [*slices.values(), (rest, data)]}
    sent = context.fault_hooks.sent(key, b"".join(files.values()))
    ends = itertools.accumulate(map(len, files.values()))
    as_sent = {
        digest: sent[end - len(data) : end] for (digest, data), end in zip(files.items(), ends)
    }
    return msgspec.structs.replace(rest, slices=named), as_sent


class PayloadGC:
    """Removes payloads that no region needs, but for the newest `keep` keys.

    The count starts at the slowest living region that needs payloads. A region needs them while it
    asks for a state. So does one that the others wait for, while it is at most `keep` keys behind
    us, counted from its question if it has asked. A region that is further behind takes a state;
    one that has come back and still compiles will be given a newer state.

    Each region removes its own payloads; the lowest living region removes those of the dead. Commit
    records stay: they are small, and without one a late region could make another.
    """

    for_all = False  # keep them for all that are waited for, however far behind they are

    def __init__(self, context: ExchangeContext, keep: int | None):
        """`keep`: None = 4 where payloads are held by their jobs, 16 where others hold them."""
        self._context = context
        self.keep = (4 if context.transport.lingers else 16) if keep is None else keep
        self._positions: dict[str, int] = {}
        self._reached: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # our place when a region was last seen asking
        self._done: dict[str, _Done] = {}
        self._lock = threading.Lock()

    def adopt(self) -> None:
        """Take over the payloads that earlier jobs have announced and left."""
        for (name, job), said in self._context.commit_log.left().items():
            digests = said.payload.digests if said is not None and said.payload else []
            self._done.setdefault(name, _Done(-1, {})).digests[job] = digests

    def begin(self, key: str) -> int:
        """Note a key; returns its number, from 0, in the order of the first `begin` of each."""
        with self._lock:
            return self._positions.setdefault(key, len(self._positions))

    def done(self, key: str, published: Published, at_once: bool = True) -> None:
        """Note that we have everything of this key.

        Args:
          at_once: tell the others now, or with the next heartbeat.
        """
        region = self._context.region
        with self._lock:
            self._keep(published, self._positions[key])
            self._reach(region, key)
            if self._reached[region] == self._positions[key]:  # exchanges end in any order
                self._context.heartbeat.update(at_once=at_once, passed=key)

    def dropped(self, published: Published) -> None:
        """Note payloads that no exchange will name; they go with those of the newest key."""
        with self._lock:
            self._keep(published, self._reached.get(self._context.region, -1))

    def _keep(self, published: Published, position: int) -> None:
        """Keep payloads until this position has passed, with those of earlier jobs (`adopt`)."""
        for name, digests in published.items():
            known = self._done.get(name)
            older = {} if known is None else known.digests
            self._done[name] = _Done(position, {**older, **digests})

    def lacking(self) -> set[int]:
        """Regions seen so far that have not told that they have what we have."""
        with self._lock:
            latest = self._look()
            ours = self._reached.get(self._context.region, -1)
            return {region for region in latest if self._reached.get(region, -1) < ours}

    def sweep(self) -> None:
        """Remove what no living region needs; the next call tries again if the store is away."""
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
        latest = self._context.heartbeat.latest()
        for region, beat in latest.items():
            self._reach(region, beat.passed)
        return latest

    def _passed(self) -> list[str]:
        living = self._context.heartbeat.living(certain=False)
        # All as they told at the same time: who asks for a state after that gets one of a donor
        # that has come at least as far as it told, and needs nothing from before it.
        latest = self._look()
        place = self._reached.get(self._context.region, -1)
        self._asked |= {r: place for r in living if latest[r].wants}

        def needs(region: int) -> bool:
            since = max(seen.get(region, -1) for seen in (self._reached, self._asked))
            near = self.for_all or since >= place - self.keep
            return latest[region].wants or (latest[region].awaited and near)

        needing = filter(needs, living)
        slowest = min((self._reached.get(region, -1) for region in needing), default=-1)
        return [n for n, done in self._done.items() if done.position + self.keep <= slowest]

    def _remove(self, name: str, done: _Done) -> None:
        living = self._context.heartbeat.living(certain=False)
        for job, digests in done.digests.items():
            ours = self._context.region == (job.region if job.region in living else min(living))
            for digest in digests:
                self._context.transport.drop(digest, shared=ours)
            if ours:
                self._context.commit_log.forget(name, job)


@dataclasses.dataclass(frozen=True)
class _Done:
    """An exchange that is over: its position in our order, and the payloads published for it."""

    position: int
    digests: dict[Job, list[str]]
