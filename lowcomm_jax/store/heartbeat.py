"""`Heartbeat`: which regions are alive, and their progress.

Every region overwrites one record of its own with a counter that rises. Clocks of different
machines are never compared: an observer measures by its own clock how long a counter did not
change, and only while it could read the store. So an outage of the store, or a pause of the
observer, does not make other regions count as dead.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from lowcomm_jax.store.errors import Lost, StoreUnavailable, Superseded, Unreadable
from lowcomm_jax.store.kv import Store
from lowcomm_jax.store.records import Beat
from lowcomm_jax.store.slots import Slots, key_of
from lowcomm_jax.store.timing import Timing
from lowcomm_jax.store.wire import Job, Jobs

LOOKS_PER_BEAT = 4
_GAPS = 8
_QUICK = 2 * LOOKS_PER_BEAT
"""So many beats follow with every look where a region comes, asks, is there, or goes: it waits for
the others' answers, which are their next beats (`wait_for_beats`)."""
log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Seen:
    """A region's newest beat, for how long that did not change, and the job before."""

    beat: Beat
    before: int | None = None
    silent_s: float = 0.0
    changed: bool = False
    gaps_s: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_GAPS))

    def after(self, beat: Beat, silent_s: float, quick_s: float) -> _Seen:
        """With a newer beat, so long after the one before; gaps below `quick_s` say nothing."""
        if beat.incarnation != self.beat.incarnation:
            # How long a restart takes says nothing.
            return _Seen(beat, self.beat.incarnation, changed=True)
        gaps_s = deque([*self.gaps_s, *[silent_s] * (silent_s >= quick_s)], maxlen=_GAPS)
        return _Seen(beat, self.before, changed=True, gaps_s=gaps_s)


class Heartbeat:
    """The heartbeat of one region, and its view of the others.

    Attributes:
      region: which one we are.
      own: this region's beat; `update` changes it.
      clock_s: seconds for which the others could be observed; does not rise while the store is
        away.
      outage: why the store could not be used at the last look, or None.

    Counts "outage", and a beat that cannot be read as "rejected_record".
    """

    def __init__(self, store: Store, slots: Slots, region: int, count: int, timing: Timing):
        self.region = region
        self.outage: StoreUnavailable | None = None
        self._store, self._slots, self._count, self._timing = store, slots, count, timing
        self.own = Beat(incarnation=0)
        self._seen: dict[int, _Seen] = {}
        self.clock_s = 0.0
        self._looks = 0
        self._quick = 0  # beats that still come with every look
        self._away_since = 0.0
        self._over: Exception | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lowcomm-heartbeat", daemon=True)

    # -- our own beat -------------------------------------------------------------------------

    def start(self, check: Callable[[], object], above: int = 0) -> None:
        """Take the region's place as its next incarnation and begin to beat.

        That is the first number whose key is free, above those in signed records. A key by itself
        takes its own number and lifts no other: whoever can write to the store can make one. Each
        key that is taken costs one request.

        Args:
          check: is called before each request; raises where the search is to end.
          above: an incarnation that there has been, as another record says.
        """
        last = self._read(self.region)
        known = max(above, last.incarnation if last else 0)
        for number in itertools.count(known + 1):
            check()
            if self._store.create(key_of(f"born/{self.region}/{number}"), b"taken\n"):
                break
        self.update(incarnation=number)
        self._thread.start()

    def update(self, at_once: bool = True, **changes) -> None:
        """Change fields of this region's beat, and publish them now, or with the next beat."""
        with self._lock:
            before, self.own = self.own, msgspec.structs.replace(self.own, **changes)
            if _standing(before) != _standing(self.own):
                self._quick = _QUICK
        if at_once:
            self._wake.set()

    @property
    def job(self) -> Job:
        """This job."""
        return Job(self.region, self.own.incarnation)

    def stop(self, leaving: bool = True) -> bool:
        """Stop beating; `leaving` says so, and the others need not find out.

        Returns:
          False: the store has not answered for `2 answer_s`. The thread ends once that is closed.
        """
        if self._thread.ident is None:
            return True
        if leaving:
            self.update(leaving=True, awaited=False)
        self._stop.set()
        self._thread.join(2 * self._timing.answer_s)
        return not self._thread.is_alive()

    # -- the others ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `Superseded` when the place is taken, `Lost` when the run has begun anew."""
        if self._over is not None:
            raise self._over

    def refresh(self) -> None:
        """Wait until everyone's beat was read anew."""
        seen = self._looks
        self._wait(lambda: self._looks >= seen + 2)  # The first one may be under way already.

    def wait_for_beats(self, times: int = 1) -> None:
        """Wait until all other living regions have beaten so often since our next beat.

        A region's second beat was made after it had read that beat of ours.
        """
        own = self.own.counter
        self._wait(lambda: self.own.counter > own)
        before = self.latest()

        def has_beaten(region: int) -> bool:
            old, new = before.get(region), self.latest()[region]
            return old is None or _order(new) >= (old.incarnation, old.counter + times)

        self._wait(lambda: all(map(has_beaten, self.living() - {self.region})))

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            time.sleep(self._timing.beat_s / LOOKS_PER_BEAT / 2)

    def living(self, certain: bool = True) -> set[int]:
        """Regions whose beat changed lately, this one included.

        Args:
          certain: False = also those not observed for long enough to know.
        """
        with self._lock:
            alive = {
                region
                for region, seen in self._seen.items()
                if (seen.changed or not certain)
                and not seen.beat.leaving
                and seen.silent_s < self._timing.patience_s(seen.gaps_s)
            }
        return alive | {self.region}

    def latest(self) -> dict[int, Beat]:
        """The newest beat of every region observed so far, this one included."""
        with self._lock:
            return {r: seen.beat for r, seen in self._seen.items()} | {self.region: self.own}

    def jobs(self, regions: Iterable[int]) -> Jobs:
        """The jobs of regions that may have announced something, as far as observed: `Jobs`.

        Of this region this job alone; of others the newest one and the one before it, which may
        have announced just before it died.
        """
        with self._lock:
            seen = dict(self._seen)
        found = {r: [x.beat.incarnation, x.before] for r, x in seen.items()}
        found[self.region] = [self.own.incarnation]
        return {r: [i for i in found[r] if i is not None] for r in regions if r in found}

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._beat_and_look()
        except Exception as error:  # for `check` to raise
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let `check` raise this error from now on."""
        self._over = self._over or error

    def _beat_and_look(self) -> None:
        next_beat = last_look = time.monotonic()
        pause = self._timing.beat_s / LOOKS_PER_BEAT
        while self._over is None:
            stopping = self._stop.is_set()
            now = time.monotonic()
            try:
                # Looked at first: a job whose place was taken must not beat over its successor.
                self._look(min(now - last_look, self._timing.beat_s))
                if now >= next_beat or self._wake.is_set() or self._quick:
                    self._wake.clear()
                    self._beat()
                    next_beat = now + self._timing.beat_s
                self.outage = None
            except StoreUnavailable as error:
                self._note_outage(error)
            last_look = now
            if stopping:
                return
            # A beat that could not be written stays due; it must not be tried without a pause.
            (self._stop if self.outage else self._wake).wait(pause)

    def _note_outage(self, error: StoreUnavailable) -> None:
        if self.outage is None:
            log.warning("region %d cannot reach the others: %s", self.region, error)
            self._store.counter.add("outage")
            self._away_since = time.monotonic()
        self.outage = error

    def store_answers(self, stops: Callable[[], bool]) -> bool:
        """Whether the store can be used; one that has just gone away is given `dead_after_s`.

        Args:
          stops: whether to wait no longer.

        Raises what `check` raises.
        """
        while self.outage is not None:
            self.check()
            if stops() or time.monotonic() - self._away_since >= self._timing.dead_after_s:
                return False
            time.sleep(self._timing.beat_s / LOOKS_PER_BEAT)
        self.check()
        return True

    def _beat(self) -> None:
        if self._over is not None:
            return
        with self._lock:
            own = msgspec.structs.replace(self.own, counter=self.own.counter + 1)
            self.own, self._quick = own, max(0, self._quick - 1)
        self._slots.write(_key(self.region), own)

    def _look(self, passed_s: float) -> None:
        """Read every region's beat; `passed_s` have passed since the last read.

        Time in which the store was away, or this process paused, counts for one beat at most. No
        region was observed then, and none is taken for dead because of it.
        """
        found = {region: self._read(region) for region in range(self._count)}
        own = found.pop(self.region)
        if own is not None and own.incarnation > self.own.incarnation:
            self._over = Superseded(
                f"region {self.region}: another job has taken its place; end this one, or give the "
                "two different regions"
            )
        elif any(beat and beat.epoch > self.own.epoch > 0 for beat in found.values()):
            self._over = Lost(f"region {self.region}: the run was begun anew without it")
        with self._lock:
            self._looks += 1
            self.clock_s += passed_s
            for region, beat in found.items():
                seen = self._seen.get(region)
                if seen is None:
                    if beat is not None:
                        self._seen[region], self._quick = _Seen(beat), _QUICK
                elif beat is not None and _order(beat) > _order(seen.beat):
                    # Newer ones only: an old record that was copied back proves nothing.
                    if _standing(beat) != _standing(seen.beat):
                        self._quick = _QUICK
                    quick_s = self._timing.beat_s / 2
                    self._seen[region] = seen.after(beat, seen.silent_s + passed_s, quick_s)
                else:
                    seen.silent_s += passed_s

    def _read(self, region: int) -> Beat | None:
        data = self._store.read(key := _key(region))
        try:
            return None if data is None else self._slots.opened(key, data, Beat)
        except Unreadable as error:  # the region's next beat takes its place
            log.info("%s", error)
            self._store.counter.add("rejected_record")
            return None


def _key(region: int) -> str:
    return f"beat/{region}"


def _standing(beat: Beat) -> tuple:
    """What others answer at once when it changes."""
    return beat.incarnation, beat.epoch, beat.awaited, beat.wants, beat.paused, beat.leaving


def _order(beat: Beat) -> tuple[int, int]:
    return beat.incarnation, beat.counter
