"""`EarlyPayload`: arrays that travel to a group before the exchange that they belong to begins.

NoLoCo's regions send their moved anchors so (`jobs.anchors_ahead`), beside the inner steps.
Nothing is agreed on here. The exchange announces this region's early bytes by their digest
(`Payload.early`), with its payload. A region that has one of the two and not the other holds
nothing. So the one commit record of the exchange names both, and who has sent nothing early, or
something else since, is no special case: what is not here by then is fetched then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from lowcomm_jax.rounds import payloads
from lowcomm_jax.rounds.fetch import Fetch, PayloadPiece
from lowcomm_jax.rounds.payloads import Published
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.kv import pauses
from lowcomm_jax.store.records import Announcement, Payload

log = logging.getLogger(__name__)


class EarlyPayload:
    """Publishes this region's early arrays, and fetches those of its group, in the background.

    It waits for no region, counts none as late, and teaches `Pace` no lateness.

    Attributes:
      name: in the store.
      takes_part: whether this region's arrays are published.
      arrays: this region's, on the host, once they are published.
      news: set when a partner's bytes have arrived.
    """

    def __init__(
        self,
        context: ExchangeContext,
        key: str,
        name: str,
        members: tuple[int, ...],
        arrays: Mapping[str, Any],
        step: int,
        takes_part: bool,
    ):
        """
        Args:
          key: as the caller and `FaultHooks` know it.
          members: the group, this region included.
          step: the inner step at which they are sent, for `FaultHooks`.
        """
        self.name, self.takes_part = name, takes_part
        self.arrays: wire.Arrays = {}
        self.news = threading.Event()
        self._context, self._key, self._step = context, key, step
        self._others = [region for region in members if region != context.region]
        self._shapes = wire.without_region(arrays)
        self._given = arrays if takes_part else {}
        self._own: Future[Payload] = Future()
        self._fetches: dict[int, Fetch] = {}
        self._begun: list[Fetch] = []  # with those that were replaced
        self._digests: dict[Job, list[str]] = {}
        self._lock = threading.Lock()
        self._taken, self._over = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Start to publish and to look."""
        self._context.background.begin(self.name, self._run, self.cancel)

    # -- for the exchange that they belong to ---------------------------------------------------

    def take(self) -> None:
        """The exchange has begun: from now on that looks for what the others have sent."""
        self._taken.set()

    def own(self, check: Callable[[], None]) -> Payload:
        """What this region has published; waits for it.

        Args:
          check: called at intervals; may raise.
        """
        while not self._own.done():
            check()
            wait([self._own], timeout=self._context.store.poll_s[1])
        return self._own.result()

    def fetch(self, job: Job, payload: Payload) -> Fetch:
        """The fetch of exactly these bytes, begun if need be."""
        region = job.region
        with self._lock:
            found = self._fetches.get(region)
            if found is None or (found.job, found.payload) != (job, payload):
                if found is not None:
                    found.cancel()  # of a job that was here before, or of an anchor before this one
                holders = [region, *(r for r in self._others if r != region)]
                piece = PayloadPiece(self._key, payload, self._shapes, holders)
                found = self._fetches[region] = Fetch(self._context, job, [piece], self.news)
                self._begun.append(found)
                self._digests.setdefault(job, []).extend(payload.digests)
            return found

    @property
    def published(self) -> Published:
        """Known digests of what was published, by name and job."""
        with self._lock:
            return {self.name: {job: list(own) for job, own in self._digests.items()}}

    def cancel(self) -> None:
        """Stop publishing, looking and fetching."""
        self._over.set()
        self._taken.set()
        with self._lock:
            for fetch in self._begun:
                fetch.cancel()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self.takes_part:
                self._own.set_result(self._publish())
        except BaseException as error:  # for the exchange to raise
            self._own.set_exception(error)
        else:
            self._look()

    def _publish(self) -> Payload:
        context = self._context
        context.fault_hooks.begins(self._key, {"step": self._step})
        host = payloads.on_host(self._given, None)
        self._given = {}  # the device's copies
        packed = payloads.pack(context, host)
        with self._lock:
            self._digests[context.heartbeat.job] = packed.payload.digests
        payloads.publish(context, self._key, packed, self._retry)
        self.arrays = host.rest
        # Before the exchange gets this record: its keys may be removed once it is over.
        self._retry(lambda: self._announce(Announcement(packed.payload)))
        return packed.payload

    def _announce(self, made: Announcement) -> None:
        """Announce it; where this job has announced another one here before, that one stands."""
        if not self._taken.is_set():
            self._context.commit_log.announce(self.name, self._context.heartbeat.job, made)

    def _retry(self, act: Callable[[], Any]) -> Any:
        """Call `act` until the store answers."""
        return self._context.store.until_answered(self._key, act, self._check, self._over.wait)

    def _check(self) -> None:
        self._context.heartbeat.check()
        if self._ends:
            raise RuntimeError(f"{self._key!r} was not sent when the exchange was closed")

    @property
    def _ends(self) -> bool:
        context = self._context
        return self._over.is_set() or context.closing.is_set() or context.halted.is_set()

    def _look(self) -> None:
        """Fetch what the others have announced, until all is known or the exchange begins.

        With longer and longer pauses: there is a period of inner steps to do it in.
        """
        context = self._context
        first_s = context.store.poll_s[1]
        waits = pauses(first_s, max(first_s, context.timing.beat_s))
        while not self._ends and not self._taken.is_set():
            try:
                if self._found_all():
                    return
            except StoreUnavailable as error:  # the heartbeat reports it
                log.info("%s: %s", self._key, error)
            self._taken.wait(next(waits))

    def _found_all(self) -> bool:
        """Look for what living partners have announced; whether all have."""
        with self._lock:
            unknown = set(self._others) - {job.region for job in self._digests}
        heartbeat = self._context.heartbeat
        jobs = heartbeat.jobs(unknown & heartbeat.living(certain=False))
        for region, found in self._context.commit_log.announced(self.name, jobs).items():
            if found.payload is not None and not self._taken.is_set():
                self.fetch(Job(region, found.incarnation), found.payload)
                unknown.remove(region)
        return not unknown
