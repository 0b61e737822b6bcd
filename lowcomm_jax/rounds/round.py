"""`Round`: one round as one region takes part in it: publish, announce, fetch.

When the record of a round is written, and what it names, says `agreed_round`. All else is here.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from lowcomm_jax.rounds import payloads
from lowcomm_jax.rounds.fetch import Fetch, pieces
from lowcomm_jax.rounds.payloads import Published
from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import Announced, Job
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.records import Announcement, Commit, Payload
from lowcomm_jax.store.terms import Terms


class Round:
    """The announcements of a round, the payloads of others that are fetched, and the own one.

    Attributes:
      announcements: by region, in the order in which they were seen; this one included.
      fetches: the payloads that are fetched, by region.
      host_payload: this region's arrays, once they are on the host.
      news: set when a payload has arrived, what travels early was sent, or exchanges end.
      write_s: seconds that writing this region's payload and announcement took; 0 = not yet.
      reduces: whether this region gets its slices of others' payloads, where there are any.
      sent: of an `EarlyPayload` alone: what this job has published, once it is announced.
    """

    def __init__(
        self,
        context: ExchangeContext,
        request: ExchangeRequest,
        early: Round | None = None,
        news: threading.Event | None = None,
    ):
        """
        Args:
          early: what belongs to the payloads, and is sent before them (`EarlyPayload`); None =
            nothing.
          news: to set; None = an event of its own.
        """
        self.announcements: dict[int, Announced] = {}
        self.fetches: dict[int, Fetch] = {}
        self.host_payload = payloads.HostPayload({}, {}, {})
        self.write_s = 0.0
        self.reduces = request.joins
        self.sent: Payload | None = None
        self.news = news or (threading.Event() if early is None else early.news)
        # Without the device's copies, which are not needed for long.
        self.request = dataclasses.replace(request, arrays={})
        self._context, self._early = context, early
        self._begun: list[Fetch] = []  # with those that were replaced
        self._own: Payload | None = None  # what this job has published
        self._packed: tuple[Payload, dict[str, bytes]] | None = None  # with what is not sent yet
        self._ended = False
        self._lock = threading.Lock()  # with which fetch is that of a region, and the end

    # -- this region's payload ------------------------------------------------------------------

    def to_host(self, arrays: Mapping[str, Any]) -> None:
        """Wait until this region's arrays are computed, and bring them to the host."""
        self.host_payload = payloads.on_host(dict(arrays), self.request.reduction)

    def publish(self, terms: Terms) -> bool:
        """Publish the payload, if this region takes part, and announce it, or the absence.

        Call it until it returns True: what should have been sent early may be on its way. The
        payload is packed once, and each of its files is handed over once.

        Raises:
          StoreUnavailable: call it again.
        """
        context, request, payload = self._context, self.request, None
        began = time.monotonic()
        if request.takes_part:
            if self._packed is None:
                self._packed = payloads.pack(context, request.key, self.host_payload)
            self._own, files = self._packed  # first: it may be dropped meanwhile
            while files:
                digest = next(iter(files))
                context.transport.put(digest, files[digest])
                del files[digest]
            payload = self._own
            if self._early is not None:
                if self._early.sent is None:
                    return False
                self._own = payload = msgspec.structs.replace(payload, early=self._early.sent)
        made, job = Announcement(payload, terms), context.heartbeat.job
        stands = context.commit_log.announce(request.name, job, made)
        self.announcements[context.region], self._packed = stands, None
        self.write_s = time.monotonic() - began
        return True

    @property
    def own(self) -> Payload | None:
        """The payload that this job has announced; None where it has announced none.

        That of an earlier job in this region's place does not count, since its arrays may differ.
        """
        announcement = self.announcements.get(self._context.region)
        ours = announcement and announcement.incarnation == self._context.heartbeat.own.incarnation
        return announcement.payload if ours else None

    @property
    def published(self) -> Published:
        """Digests of all that was published, by name and job, as far as known; [] = an absence."""
        known: list[tuple[Job, Payload | None]] = [(x.job, x.payload) for x in list(self._begun)]
        said = list(self.announcements.items())
        known += [(Job(region, one.incarnation), one.payload) for region, one in said]
        known += [(self._context.heartbeat.job, self._own)] if self._own else []
        digests: dict[Job, dict[str, None]] = {}
        for job, payload in known:
            digests.setdefault(job, {}).update(dict.fromkeys(payload.digests if payload else ()))
        early = {} if self._early is None else self._early.published
        return {self.request.name: {job: list(one) for job, one in digests.items()}} | early

    # -- those of the others --------------------------------------------------------------------

    def look(self) -> bool:
        """Look for others' announcements, and fetch their payloads; returns whether any is new.

        What an earlier job in this region's place has announced is for the others to admit.
        """
        others = [r for r in self.request.members if r != self._context.region]
        open_ = [r for r in others if r not in self.announcements or self._outdated(r)]
        found, jobs = False, self._context.heartbeat.jobs(open_)
        for region, one in self._context.commit_log.announced(self.request.name, jobs).items():
            known = self.announcements.get(region)
            if known is None or known.incarnation != one.incarnation:
                payload = one.payload
                if self._early is not None and payload is not None and payload.early is None:
                    # A payload without what it should have sent early is an absence.
                    one = one._replace(payload=None)
                self.announcements[region], found = one, True
                if one.payload is not None:
                    self.fetch_of(Job(region, one.incarnation), one.payload)
        return found

    def _outdated(self, region: int) -> bool:
        """Whether a region's announcement is of a job that another job has replaced."""
        missing = any(fetch.missing_s is not None for fetch in self._parts(region))
        return missing and self.replaced(region)

    def replaced(self, region: int) -> bool:
        """Whether another job has taken the place of the job that announced."""
        beat = self._context.heartbeat.latest().get(region)
        return beat is not None and beat.incarnation > self.announcements[region].incarnation

    def is_final(self, region: int) -> bool:
        """Whether waiting longer for this region cannot change anything."""
        announcement = self.announcements.get(region)
        if announcement is None:
            return not self.request.awaited(region)
        if announcement.payload is None or self.has(region):
            return True
        parts = self._parts(region)
        dead = region not in self._context.heartbeat.living(certain=False)
        missing = any(fetch.missing_s is not None for fetch in parts)
        return any(fetch.hopeless for fetch in parts) or (dead and missing)

    def has(self, region: int) -> bool:
        """Whether this region's payload is here and verified."""
        if region == self._context.region and self.own is not None:
            return True
        return region in self.fetches and all(fetch.complete for fetch in self._parts(region))

    # -- the record -----------------------------------------------------------------------------

    @property
    def shapes(self) -> wire.Shapes:
        """Of the arrays that come of each region: of its payload, and of what is early."""
        region, early = self._context.region, self._early
        return self.request.like[region] | ({} if early is None else early.request.like[region])

    def arrays_of(self, commit: Commit) -> dict[int, wire.Arrays] | None:
        """The arrays of all payloads that the record names, by region; None = not yet all.

        Raises:
          Lost: a payload is gone with all who had it.
          Rejected: one does not fit this round.
        """
        found: dict[int, wire.Arrays] = {}
        for region, admitted in commit.admitted.items():
            job, fetch = Job(region, admitted.incarnation), self.fetches.get(region)
            if job == self._context.heartbeat.job and self.own is not None:
                early = {} if self._early is None else self._early.host_payload.rest
                found[region] = self.host_payload.rest | early
            elif fetch is not None and (fetch.job, fetch.payload) == (job, admitted.payload):
                parts = self._parts(region)
                if all([part.arrived() for part in parts]):
                    found[region] = {k: x for part in parts for k, x in part.got[0].items()}
        return found if found.keys() == commit.admitted.keys() else None

    # -- fetches --------------------------------------------------------------------------------

    def _parts(self, region: int) -> list[Fetch]:
        """The fetches of a region's payload: of its own bytes, and of what was sent early."""
        if region not in self.fetches:
            return []
        fetch = self.fetches[region]
        if self._early is None or fetch.payload.early is None:
            return [fetch]
        return [fetch, self._early.fetch_of(fetch.job, fetch.payload.early)]

    def fetch_of(self, job: Job, payload: Payload) -> Fetch:
        """The fetch of exactly this payload, begun if need be."""
        with self._lock:
            fetch = self.fetches.get(job.region)
            if fetch is None or (fetch.job, fetch.payload) != (job, payload):
                self._fetch(job, payload)
            return self.fetches[job.region]

    def _fetch(self, job: Job, payload: Payload) -> None:
        """Begin to fetch a payload, from its region or from another one that has it."""
        region = job.region
        if region in self.fetches:
            self.fetches[region].cancel()  # of a job that was here before
        # A job that was here before us has not sent the slice that it was to reduce itself.
        slice_of = self._context.region if self.reduces else None
        needed = pieces(self.request, region, payload, slice_of)
        self.fetches[region] = Fetch(self._context, job, needed, self.news)
        self._begun.append(self.fetches[region])
        if self._ended:  # a look that has begun before may find announcements after it
            self.fetches[region].cancel()
        self._parts(region)  # begins what is early, too

    def cancel(self) -> None:
        """Stop fetching, and what was sent early."""
        with self._lock:
            self._ended, begun = True, list(self._begun)
        for fetch in begun:
            fetch.cancel()
        if self._early is not None:
            self._early.cancel()
