"""One exchange of one key, from publishing our payload to having everyone's."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from lowcomm_jax.exchange.between import parcels, wire
from lowcomm_jax.exchange.between.agreement import Holdings, participants
from lowcomm_jax.exchange.between.commits import Commit, Payload, Said
from lowcomm_jax.exchange.between.errors import Lost, Missing, StoreUnavailable
from lowcomm_jax.exchange.between.fetch import Fetch, Piece
from lowcomm_jax.exchange.between.office import Office
from lowcomm_jax.exchange.between.request import Gathered, Request

T = TypeVar("T")
log = logging.getLogger(__name__)


class Gathering:
    """Runs one exchange on a thread of its own.

    Attributes:
      outcome: the result, in time.
      parcel: our own arrays, once they are on the host; own: what they were published as.
      began: when that was, and all else began.
      said: what was announced, by region; fetches: what is being fetched.
    """

    def __init__(
        self, office: Office, request: Request, awaited: Callable[[int], bool], done: Callable
    ):
        """
        Args:
          awaited: whether a region is alive and expected to announce.
          done: called with this object after the outcome is set.
        """
        self.request = request
        self.outcome: Future[Gathered] = Future()
        self._office, self._awaited, self._done = office, awaited, done
        self.parcel = parcels.Parcel({}, {}, {})
        self.said: dict[int, Said] = {}
        self.fetches: dict[int, Fetch] = {}
        self.own: Payload | None = None
        self._held: dict[int, Holdings] | None = None
        self._news = threading.Event()  # something we need has just come
        self._late_s = 0.0
        self._since_s = office.beats.clock_s
        self.began = time.monotonic()
        name = f"lowcomm-{request.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def published(self) -> dict[str, dict[int, list[str]]]:
        """Names of all that was published for this exchange by name and region, as far as known."""
        found = {r: fetch.payload.digests for r, fetch in self.fetches.items()}
        said = {r: said.payload.digests for r, said in self.said.items() if said.payload}
        return {self.request.name: found | said}

    @property
    def running(self) -> bool:
        """Whether any of its threads still is."""
        return self._thread.is_alive() or any(f.running for f in self.fetches.values())

    def join(self) -> None:
        """Wait for all threads, when the exchange is over or closing."""
        self._thread.join()
        for fetch in self.fetches.values():
            fetch.join()

    def _run(self) -> None:
        try:
            if self.request.joins:
                self._publish()
            commit = self._agree()
            arrays = self._complete(commit)
        except BaseException as error:  # it is for `finish` to raise, on the caller's thread
            self.outcome.set_exception(error)
        else:
            seconds = time.monotonic() - self.began
            self.outcome.set_result(Gathered(commit, arrays, frozenset(self.said), seconds))
        finally:
            for fetch in self.fetches.values():
                fetch.cancel()
        self._done(self)

    # -- publish ------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Hand our payload to the transport, then announce it; not when we come too late."""
        request, office = self.request, self._office
        hint = {}
        self.parcel = parcels.on_host(request.arrays, request.reduction)
        self.began = time.monotonic()  # what came before was computing
        # The device's copies are not needed any longer.
        self.request = dataclasses.replace(request, arrays={})
        if self._insist(lambda: office.board.standing(request.name)) is not None:
            return
        if request.takes_part:
            readers = [r for r in request.members if r != office.region and self._awaited(r)]
            # By its name, which has the epoch: equal payloads of two epochs are not one.
            packed = parcels.pack(office, request.name, self.parcel)
            hint = parcels.publish(office, request.key, packed, readers, self._insist)
            self.own = packed.payload
        said = Said(office.region, office.beats.own.incarnation, self.own, request.note, hint)
        self._insist(lambda: office.board.say(request.name, said))
        self.said[office.region] = said
        self._since_s = office.beats.clock_s

    def _insist(self, act: Callable[[], T]) -> T:
        """Do something, waiting for the store to come back if it is away."""
        for pause in self._office.store.pauses():
            self.check()
            try:
                return act()
            except StoreUnavailable as error:
                log.info("%s: %s", self.request.key, error)
                self._office.closing.wait(pause)
        raise AssertionError("pauses never end")

    def check(self) -> None:
        self._office.beats.check()
        if self._office.closing.is_set() or self._office.halted.is_set():
            raise RuntimeError(f"exchange {self.request.key!r} was not finished when it was closed")

    # -- agree --------------------------------------------------------------------------------

    def _agree(self) -> Commit:
        """Wait for a commit record; write it as soon as nobody else needs to be waited for."""
        office, pauses, known = self._office, self._office.store.pauses(), None
        while True:
            self.check()
            try:
                stands = office.board.standing(self.request.name)
                if stands is None and self.request.joins:
                    stands = self._propose()
                if stands is not None:
                    return stands
            except StoreUnavailable:
                pass  # The heartbeat reports it; deadlines stand still meanwhile.
            if self._known != known:
                # The others are about as far as we are: what we wait for next is not far.
                known, pauses = self._known, office.store.pauses()
            self._news.wait(next(pauses))
            self._news.clear()

    @property
    def _known(self) -> tuple[int, int, int]:
        """Grows with all that we hear: announcements, payloads, and what others hold."""
        here = sum(fetch.complete for fetch in self.fetches.values())
        return len(self.said), here, len(self._held or ())

    def _propose(self) -> Commit | None:
        """One look; confirms what we hold once that is final, and commits once others have."""
        office, name = self._office, self.request.name
        if self._held is None:
            self._hear()
            waiting = [r for r in self.request.members if not self._settled(r)]
            if not self._over(waiting):
                return None
            held = {r: self.said[r].payload.content for r in sorted(self.said) if self._has(r)}
            if self.own is not None:
                office.board.confirm(name, office.region, held)
            if not self.request.follows:
                office.pace.announced(self._waited_s if waiting else self._late_s)
            self._held = {office.region: held}
            self._since_s = office.beats.clock_s
        published = {r: said.payload for r, said in self.said.items() if said.payload}
        for region in published.keys() - self._held.keys():
            confirmed = office.board.confirmed(name, region)
            if confirmed is not None:
                self._held[region] = confirmed
        living = office.beats.living(certain=False)
        # A region may wait as long for payloads before it confirms: later than we began to wait.
        unsure = published.keys() - self._held.keys()
        unsure = [r for r in unsure if r in living and not self._replaced(r)]
        if not self._over(unsure, deadlines=2):
            return None
        digests = {r: p.content for r, p in published.items()}
        chosen = participants(digests, self._held)
        if not all(self._has(r) for r in chosen):
            # We are the odd one out, and the record is theirs to write as long as they live.
            if not self._over([r for r in chosen if r in living], deadlines=2):
                return None
            chosen = participants({r: d for r, d in digests.items() if self._has(r)}, self._held)
        notes = {r: said.note for r, said in self.said.items() if said.note is not None}
        present = tuple(sorted({*chosen, *(r for r in self.said if r in living)}))
        commit = Commit({r: published[r] for r in chosen}, notes, office.region, present)
        return office.board.commit(name, commit)

    @property
    def _waited_s(self) -> float:
        return self._office.beats.clock_s - self._since_s

    def _over(self, waiting: list[int], deadlines: int = 1) -> bool:
        """Whether waiting is over: for nobody any more, or for too long."""
        me = self._office.region
        nbytes = sum(s.payload.nbytes_for(me) for s in self.said.values() if s.payload)
        return not waiting or self._waited_s >= deadlines * self._office.pace.deadline_s(nbytes)

    def _hear(self) -> None:
        """Look for announcements, and fetch what they announce."""
        for region in self.request.members:
            if region in self.said and not self._outdated(region):
                continue
            said = self._office.board.heard(self.request.name, region)
            if said is not None and said != self.said.get(region):
                self.said[region] = said
                self._late_s = self._waited_s
                if said.payload is not None:
                    self._fetch(region, said.payload, said.hint)

    def _outdated(self, region: int) -> bool:
        """Whether what a region announced went down with a job that another has replaced."""
        fetch = self.fetches.get(region)
        return fetch is not None and fetch.missing_s is not None and self._replaced(region)

    def _replaced(self, region: int) -> bool:
        """Whether another job has taken the place of the one that announced."""
        beat = self._office.beats.latest().get(region)
        return beat is not None and beat.incarnation > self.said[region].incarnation

    def _settled(self, region: int) -> bool:
        """Whether waiting longer for this region cannot change anything."""
        said = self.said.get(region)
        if said is None:
            return not self._awaited(region)
        if said.payload is None or self._has(region):
            return True
        fetch = self.fetches[region]
        dead = region not in self._office.beats.living(certain=False)
        return fetch.hopeless or (dead and fetch.missing_s is not None)

    def _has(self, region: int) -> bool:
        """Whether this region's payload is here and verified."""
        if region == self._office.region:
            return self.own is not None
        fetch = self.fetches.get(region)
        return fetch is not None and fetch.complete

    def _fetch(self, region: int, payload: Payload, hint: dict, ours: bool = True) -> None:
        """Begin to fetch a payload, from its region or from whoever else has it.

        `ours`: with the slice that is ours to reduce, if there are any.
        """
        if region in self.fetches:
            self.fetches[region].cancel()
        holders = [region] + [r for r in self.request.members if r != region]
        key, name = self.request.key, self.request.name
        whole = Piece(key, name, payload, self._like(region), holders, hint)
        pieces = [whole]
        slices, reduction = payload.slices, self.request.reduction
        # A job that was here before us has not sent the slice that it was to reduce itself.
        if ours and self.request.joins and reduction is not None and slices[self._office.region]:
            pieces.append(parcels.slice_piece(whole, reduction, self._office.region))
        self.fetches[region] = Fetch(self._office, region, pieces, self._news)

    def _like(self, region: int) -> wire.Shapes | None:
        if self.request.like is not None:
            return self.request.like[region]
        if self.request.reduction is not None:
            return self.request.reduction.rest
        return wire.shapes_of(self.parcel.rest) if self.parcel.rest else None

    # -- complete -----------------------------------------------------------------------------

    def _complete(self, commit: Commit) -> dict[int, dict[str, np.ndarray]]:
        """Everything the commit record names, fetched until it is here."""
        arrays = {}
        for region, payload in commit.payloads.items():
            if self.own == payload:
                arrays[region] = self.parcel.rest
                continue
            fetch = self.fetches.get(region)
            if fetch is None or fetch.payload != payload:
                self._fetch(region, payload, {}, ours=self._office.region in commit.present)
        for region in commit.payloads.keys() - arrays.keys():
            arrays[region] = self._wait(self.fetches[region])
        return arrays

    def _wait(self, fetch: Fetch) -> dict[str, np.ndarray]:
        try:
            return fetch.first(self.check)
        except Missing:
            raise Lost(
                f"the payload of region {fetch.region} for {self.request.key!r} is agreed on, "
                "but gone with all who had it: continue from a state (`newest_state`)"
            ) from None
