"""What a region hears of one exchange: who announced, and the payloads that it fetches."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from lowcomm_jax.exchange.between import parcels, wire
from lowcomm_jax.exchange.between.commits import Payload, Said
from lowcomm_jax.exchange.between.fetch import Fetch
from lowcomm_jax.exchange.between.office import Office
from lowcomm_jax.exchange.between.request import Request


class Heard:
    """Belongs to one exchange, whose thread alone changes it.

    Attributes:
      said: what was announced, by region, ourselves included.
      fetches: what is being fetched, by region.
      shapes: of our own arrays, once they are known; None = there are none.
      news: set when something has come that we need.
    """

    def __init__(self, office: Office, request: Request, awaited: Callable[[int], bool]):
        """`awaited`: whether a region is alive and expected to announce."""
        self.said: dict[int, Said] = {}
        self.fetches: dict[int, Fetch] = {}
        self.shapes: wire.Shapes | None = None
        self.news = threading.Event()
        # Without the device's copies, which are not needed for long.
        self._request = dataclasses.replace(request, arrays={})
        self._office, self._awaited = office, awaited
        self._begun: list[Fetch] = []  # those that others have replaced, too

    @property
    def own(self) -> Payload | None:
        """What we have published, if anything."""
        said = self.said.get(self._office.region)
        return said and said.payload

    @property
    def published(self) -> dict[int, list[str]]:
        """Names of all that was published, by region, as far as known."""
        found = {r: fetch.payload.digests for r, fetch in self.fetches.items()}
        return found | {r: said.payload.digests for r, said in self.said.items() if said.payload}

    @property
    def known(self) -> tuple[int, int]:
        """Grows with all that comes: announcements and payloads."""
        return len(self.said), sum(fetch.complete for fetch in self.fetches.values())

    def look(self, ours: bool = True) -> bool:
        """Look for announcements, and fetch what they announce; returns whether there are any.

        Args:
          ours: with the slices that are ours to reduce, if there are any.
        """
        found = False
        for region in self._request.members:
            if region in self.said and not self._outdated(region):
                continue
            said = self._office.board.heard(self._request.name, region)
            if said is not None and said != self.said.get(region):
                self.said[region], found = said, True
                if said.payload is not None:
                    self._fetch(region, said.payload, said.hint, ours)
        return found

    def _outdated(self, region: int) -> bool:
        """Whether what a region announced went down with a job that another has replaced."""
        fetch = self.fetches.get(region)
        return fetch is not None and fetch.missing_s is not None and self.replaced(region)

    def replaced(self, region: int) -> bool:
        """Whether another job has taken the place of the one that announced."""
        beat = self._office.beats.latest().get(region)
        return beat is not None and beat.incarnation > self.said[region].incarnation

    def settled(self, region: int) -> bool:
        """Whether waiting longer for this region cannot change anything."""
        said = self.said.get(region)
        if said is None:
            return not self._awaited(region)
        if said.payload is None or self.has(region):
            return True
        fetch = self.fetches[region]
        dead = region not in self._office.beats.living(certain=False)
        return fetch.hopeless or (dead and fetch.missing_s is not None)

    def has(self, region: int) -> bool:
        """Whether this region's payload is here and verified."""
        if region == self._office.region:
            return self.own is not None
        fetch = self.fetches.get(region)
        return fetch is not None and fetch.complete

    def insist_on(self, region: int, payload: Payload, ours: bool) -> Fetch:
        """The fetch of just this payload, begun if need be; `ours`: see `look`."""
        fetch = self.fetches.get(region)
        if fetch is None or fetch.payload != payload:
            self._fetch(region, payload, {}, ours)
        return self.fetches[region]

    def _fetch(self, region: int, payload: Payload, hint: dict, ours: bool) -> None:
        """Begin to fetch a payload, from its region or from whoever else has it."""
        if region in self.fetches:
            self.fetches[region].cancel()
        # A job that was here before us has not sent the slice that it was to reduce itself.
        slice_of = self._office.region if ours and self._request.joins else None
        like = self._like(region)
        pieces = parcels.pieces(self._request, region, payload, like, hint, slice_of)
        self.fetches[region] = Fetch(self._office, region, pieces, self.news)
        self._begun.append(self.fetches[region])

    def _like(self, region: int) -> wire.Shapes | None:
        if self._request.like is not None:
            return self._request.like[region]
        if self._request.reduction is not None:
            return self._request.reduction.rest
        return self.shapes

    # -- threads ------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether anything is still being fetched."""
        return any(fetch.running for fetch in self._begun)

    def cancel(self) -> None:
        """Stop fetching."""
        for fetch in self._begun:
            fetch.cancel()

    def join(self) -> None:
        """Wait for all threads, which are cancelled or done."""
        for fetch in self._begun:
            fetch.join()
