"""One exchange of one key, from publishing our payload to having everyone's."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from lowcomm_jax.runtime import payloads, terms, wire
from lowcomm_jax.runtime.commits import Announcement, Commit, PayloadRecord
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Lost, Missing, StoreUnavailable
from lowcomm_jax.runtime.fetch import Fetch
from lowcomm_jax.runtime.request import ExchangeRequest, Gathered

# -- agreement ---------------------------------------------------------------------------------
#
# Which payloads an exchange may count, from what each region says that it holds.


Holdings = Mapping[int, str]
"""What one region holds and has verified: the digest by region."""


def participants(published: Holdings, held: Mapping[int, Holdings]) -> list[int]:
    """The regions whose payloads every one of them holds, ascending.

    Then a region that dies, or whose payload was damaged on its way, takes nothing with it that
    the others need. While somebody lacks a payload, the one that the fewest hold is left out; of
    several, that of the highest region.

    Args:
      published: digests of the payloads.
      held: what each region holds that has said so; others are taken to hold everything, since
        they have no part in this decision and fetch later.
    """
    within = set(published)

    def holders(region: int) -> list[int]:
        return [by for by in within if by not in held or held[by].get(region) == published[region]]

    while lacking := [region for region in within if len(holders(region)) < len(within)]:
        within.remove(min(lacking, key=lambda region: (len(holders(region)), -region)))
    return sorted(within)


# -- heard -------------------------------------------------------------------------------------
#
# What a region hears of one exchange: who announced, and the payloads that it fetches.


class Inbox:
    """Belongs to one exchange, whose thread alone changes it.

    Attributes:
      said: what was announced, by region, ourselves included.
      fetches: what is being fetched, by region.
      shapes: of our own arrays, once they are known; None = there are none.
      news: set when something has come that we need.
    """

    def __init__(
        self, office: ExchangeContext, request: ExchangeRequest, awaited: Callable[[int], bool]
    ):
        """`awaited`: whether a region is alive and expected to announce."""
        self.said: dict[int, Announcement] = {}
        self.fetches: dict[int, Fetch] = {}
        self.shapes: wire.Shapes | None = None
        self.news = threading.Event()
        # Without the device's copies, which are not needed for long.
        self._request = dataclasses.replace(request, arrays={})
        self._office, self._awaited = office, awaited
        self._begun: list[Fetch] = []  # those that others have replaced, too

    @property
    def own(self) -> PayloadRecord | None:
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

    def insist_on(self, region: int, payload: PayloadRecord, ours: bool) -> Fetch:
        """The fetch of just this payload, begun if need be; `ours`: see `look`."""
        fetch = self.fetches.get(region)
        if fetch is None or fetch.payload != payload:
            self._fetch(region, payload, {}, ours)
        return self.fetches[region]

    def _fetch(self, region: int, payload: PayloadRecord, hint: dict, ours: bool) -> None:
        """Begin to fetch a payload, from its region or from whoever else has it."""
        if region in self.fetches:
            self.fetches[region].cancel()
        # A job that was here before us has not sent the slice that it was to reduce itself.
        slice_of = self._office.region if ours and self._request.joins else None
        like = self._like(region)
        pieces = payloads.pieces(self._request, region, payload, like, hint, slice_of)
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


T = TypeVar("T")
log = logging.getLogger(__name__)


class WholeExchange:
    """Runs one exchange on a thread of its own.

    Attributes:
      outcome: the result, in time.
      parcel: our own arrays, once they are on the host.
      began: when that was, and all else began.
      heard: what the others announced, and what is fetched of it.
    """

    def __init__(
        self,
        office: ExchangeContext,
        request: ExchangeRequest,
        awaited: Callable[[int], bool],
        done: Callable,
    ):
        """
        Args:
          awaited: whether a region is alive and expected to announce.
          done: called with this object after the outcome is set.
        """
        self.request = request
        self.outcome: Future[Gathered] = Future()
        self.heard = Inbox(office, request, awaited)
        self.parcel = payloads.Parcel({}, {}, {})
        self._office, self._awaited, self._done = office, awaited, done
        self._held: dict[int, Holdings] | None = None
        self._waits_for: list[int] = []
        self._asked_s = office.beats.clock_s
        self._terms: terms.Terms = {}
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
        return {self.request.name: self.heard.published}

    @property
    def running(self) -> bool:
        """Whether any of its threads still is."""
        return self._thread.is_alive() or self.heard.running

    def join(self) -> None:
        """Wait for all threads, when the exchange is over or closing."""
        self.heard.news.set()  # or it would see that only with its next look
        self._thread.join()
        self.heard.join()

    def _run(self) -> None:
        try:
            self._terms = terms.as_record(self.request.terms)
            if self.request.joins:
                self._publish()
            commit = self._agree()
            label, office = f"exchange {self.request.key}", self._office
            terms.check(label, commit.terms, office.region, self._terms, office.heal)
            arrays = self._complete(commit)
        except BaseException as error:  # it is for `finish` to raise, on the caller's thread
            self.outcome.set_exception(error)
        else:
            seconds = time.monotonic() - self.began
            heard, vain = frozenset(self.heard.said), frozenset(self._waits_for)
            self.outcome.set_result(Gathered(commit, arrays, heard, vain - heard, seconds))
        finally:
            self.heard.cancel()
        self._done(self)

    # -- publish ------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Hand our payload to the transport, then announce it; not when we come too late."""
        request, office = self.request, self._office
        payload, hint = None, {}
        office.mishaps.begins(request.key, self._terms)
        self.parcel = payloads.on_host(request.arrays, request.reduction)
        self.heard.shapes = wire.shapes_of(self.parcel.rest) or None
        self.began = time.monotonic()  # what came before was computing
        # The device's copies are not needed any longer.
        self.request = dataclasses.replace(request, arrays={})
        if self._insist(lambda: office.board.standing(request.name)) is not None:
            return
        if request.takes_part:
            readers = [r for r in request.members if r != office.region and self._awaited(r)]
            # By its name, which has the epoch: equal payloads of two epochs are not one.
            packed = payloads.pack(office, request.name, self.parcel)
            hint = payloads.publish(office, request.key, packed, readers, self._insist)
            payload = packed.payload
        said = Announcement(office.region, office.beats.own.incarnation, payload, self._terms, hint)
        self._insist(lambda: office.board.say(request.name, said))
        self.heard.said[office.region] = said
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
            self.heard.news.wait(next(pauses))
            self.heard.news.clear()

    @property
    def _known(self) -> tuple[int, int, int]:
        """Grows with all that we hear: announcements, payloads, and what others hold."""
        return *self.heard.known, len(self._held or ())

    def _propose(self) -> Commit | None:
        """One look; confirms what we hold once that is final, and commits once others have."""
        office, name, heard = self._office, self.request.name, self.heard
        if self._held is None:
            if heard.look():
                self._late_s = self._waited_s
                if self.request.patience_s:
                    # What was just announced has still to come: for that the usual time is enough.
                    self._since_s = office.beats.clock_s
            waiting = self._waits_for = [r for r in self.request.members if not heard.settled(r)]
            computing = any(region not in heard.said for region in waiting)
            patience_s = self.request.patience_s if computing else 0.0
            if not self._over(waiting, patience_s=patience_s) and not self._passed_over(waiting):
                return None
            held = {r: heard.said[r].payload.content for r in sorted(heard.said) if heard.has(r)}
            if heard.own is not None:
                office.board.confirm(name, office.region, held)
            if not (self.request.follows or self.request.patience_s):
                office.pace.announced(self._waited_s if waiting else self._late_s)
            self._held = {office.region: held}
            self._since_s = office.beats.clock_s
        living = office.beats.living(certain=False)
        known = {r: s.terms for r, s in heard.said.items() if r in living or heard.has(r)}
        counting = terms.counting(known, office.heal)
        published = {r: heard.said[r].payload for r in counting if heard.said[r].payload}
        for region in published.keys() - self._held.keys():
            confirmed = office.board.confirmed(name, region)
            if confirmed is not None:
                self._held[region] = confirmed
        # A region may wait as long for payloads before it confirms: later than we began to wait.
        unsure = published.keys() - self._held.keys()
        unsure = [r for r in unsure if r in living and not heard.replaced(r)]
        if not self._over(unsure, deadlines=2):
            return None
        digests = {r: p.content for r, p in published.items()}
        chosen = participants(digests, self._held)
        if not all(heard.has(r) for r in chosen):
            # We are the odd one out, and the record is theirs to write as long as they live.
            if not self._over([r for r in chosen if r in living], deadlines=2):
                return None
            chosen = participants({r: d for r, d in digests.items() if heard.has(r)}, self._held)
        present = tuple(sorted({*chosen, *(counting & living)}))
        commit = Commit({r: published[r] for r in chosen}, known, office.region, present)
        return office.board.commit(name, commit)

    def _passed_over(self, waiting: list[int]) -> bool:
        """Whether others have not waited for any of these: then nothing of theirs can count.

        A region that comes in is awaited by those who have read so, perhaps not by all at once.
        """
        office, now = self._office, self._office.beats.clock_s
        if now < self._asked_s + office.timing.beat_s or self.heard.said.keys() & set(waiting):
            return False
        self._asked_s = now
        others = self.heard.said.keys() - {office.region}
        held = [office.board.confirmed(self.request.name, region) for region in others]
        return all(any(one is not None and r not in one for one in held) for r in waiting)

    @property
    def _waited_s(self) -> float:
        return self._office.beats.clock_s - self._since_s

    def _over(self, waiting: list[int], deadlines: int = 1, patience_s: float = 0.0) -> bool:
        """Whether waiting is over: for nobody any more, or for too long."""
        me = self._office.region
        nbytes = sum(s.payload.nbytes_for(me) for s in self.heard.said.values() if s.payload)
        deadline_s = deadlines * self._office.pace.deadline_s(nbytes) + patience_s
        return not waiting or self._waited_s >= deadline_s

    # -- complete -----------------------------------------------------------------------------

    def _complete(self, commit: Commit) -> dict[int, dict[str, np.ndarray]]:
        """Everything the commit record names, fetched until it is here."""
        ours = self._office.region in commit.present
        if self.request.joins and not self.heard.said:
            # We came too late to hear; but what was offered to us, and is not pulled, stays in the
            # memory of those who offer it.
            self._insist(lambda: self.heard.look(ours))
        arrays, fetches = {}, {}
        for region, payload in commit.payloads.items():
            if self.heard.own == payload:
                arrays[region] = self.parcel.rest
            else:
                fetches[region] = self.heard.insist_on(region, payload, ours)
        return arrays | {region: self._wait(fetch) for region, fetch in fetches.items()}

    def _wait(self, fetch: Fetch) -> dict[str, np.ndarray]:
        try:
            return fetch.first(self.check)
        except Missing:
            raise Lost(
                f"the payload of region {fetch.region} for {self.request.key!r} is agreed on, "
                "but gone with all who had it: continue from a state (`newest_state`)"
            ) from None
