"""Removes payloads that nobody needs any longer."""

from __future__ import annotations

import dataclasses
import threading

from lowcomm_jax.exchange.between.beats import Beat
from lowcomm_jax.exchange.between.errors import StoreUnavailable
from lowcomm_jax.exchange.between.office import Office


@dataclasses.dataclass(frozen=True)
class _Done:
    """An exchange that is over: its place in our order, and the payloads published for it."""

    position: int
    digests: dict[int, list[str]]


class Litter:
    """Keeps the payloads of the newest `keep` keys behind the slowest region that needs them.

    A region that is alive and at most `keep` keys behind us, or has asked for a state, catches up
    from them; where steps are short it is further behind when it comes in, and has as many keys
    more. One that is behind for longer is too stale for that, and takes a state, too; one that has
    come back and not asked yet, because it compiles, will be given a newer one. Each region
    removes its own payloads; those of the dead are removed by the lowest living region. Commit
    records stay: they are small, and without one a late region could make another.
    """

    def __init__(self, office: Office, keep: int):
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
