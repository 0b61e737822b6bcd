"""A region's place in a run: coming in, being known to the others, pausing and leaving."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lowcomm_jax.runtime.anchor_check import AnchorCheck
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Rejected, StoreUnavailable
from lowcomm_jax.runtime.heartbeat import Beat, Waiting
from lowcomm_jax.runtime.payloads import PayloadGC
from lowcomm_jax.runtime.state_transfer import StateTransfer
from lowcomm_jax.runtime.two_shot_exchange import TwoShotExchange
from lowcomm_jax.runtime.whole_exchange import WholeExchange

# -- joining -----------------------------------------------------------------------------------
#
# How a region enters a run: with everyone at its beginning, or into one that goes on.


RUN = "run"
_FORMAT = 3
T = TypeVar("T")
log = logging.getLogger(__name__)


def insist(office: ExchangeContext, until: float, act: Callable[[], T]) -> T:
    """Do something that needs the store, again until that answers: a job may come back meanwhile.

    Raises:
      StoreUnavailable: it did not until then, by `time.monotonic`.
      RuntimeError: the exchange was closed meanwhile.
    """
    told = False
    while True:
        try:
            return act()
        except StoreUnavailable as error:
            left = until - time.monotonic()
            if left <= 0:
                raise
            if not told:
                log.warning("%s; it is tried for another %.0f s", error, left)
            told = True
            _pause(office, min(left, office.timing.beat_s / 2))


def register(office: ExchangeContext, kind: str) -> None:
    """Write the run's record, or check that we are of the run that stands there.

    Raises:
      ValueError: the record was signed with another secret, or describes another run.
      StoreUnavailable: the store does not answer.
    """
    ours = {
        "format": _FORMAT,
        "run": office.run_id,
        "count": office.count,
        "exchange": kind,
        "heal": office.heal,
    }
    office.store.create(RUN, office.seal.close(RUN, ours))
    data = office.store.read(RUN)
    try:
        stands = office.seal.open(RUN, data or b"")
    except Rejected:
        raise ValueError(
            f"run {office.run_id!r} at {office.store.root} was begun with another secret: use that "
            "one, or another run id"
        ) from None
    wrong = [f"{k} is {v!r} there, {ours[k]!r} here" for k, v in stands.items() if ours[k] != v]
    if wrong:
        raise ValueError(f"run {office.run_id!r} at {office.store.root}: " + "; ".join(wrong))
    office.store.anchor(RUN)


def enter(office: ExchangeContext, until: float, step: int) -> dict[int, int]:
    """Beat, and wait for the others.

    Regions that begin together agree on a roster by a create-only record: an epoch of the run. A
    region that is not in it comes into a run that goes on, and the others do not wait for its
    payloads before it has sent its first. When nobody is left, those who come back begin a new
    epoch: they may have gone back to a checkpoint, and must not land what was agreed on since. Its
    roster are the furthest of them: what is gone with the jobs before cannot bring the others up
    to there.

    Returns:
      the roster: incarnation of the regions that began the epoch.

    Raises:
      TimeoutError: until then, by `time.monotonic`, not all regions of a new run were there; or of
        an old one only some that have nothing of it.
      StoreUnavailable: the store did not answer.
      RuntimeError: the exchange was closed meanwhile.
    """
    beats = office.beats
    office.transport.start()
    beats.update(step=step)
    _, roster, _ = insist(office, until, lambda: _newest(office))
    insist(office, until, lambda: beats.start(above=roster.get(office.region, 0)))
    while True:
        beats.check()
        living, latest = beats.living(), beats.latest()
        epoch, roster, free = insist(office, until, lambda: _newest(office))
        began_it = roster.get(office.region) == beats.own.incarnation
        others = [latest[region] for region in living - {office.region}]
        if began_it or _goes_on(others, epoch):
            beats.update(epoch=epoch, awaited=began_it)
            beats.refresh()
            return roster
        # Those who have just begun it may not have said so yet.
        begun = any(latest[r].incarnation == roster[r] for r in living & roster.keys())
        late = time.monotonic() >= until and not begun
        # Not those of a run that has ended under them: they will see that, and come in anew.
        coming = {region for region in living if not latest[region].epoch}
        if (len(coming) == office.count and not begun) or (late and epoch):
            _check_not_fresh(office, coming)
            _begin(office, until, f"epoch/{free}", _furthest(latest, coming))
            continue
        if late:
            raise TimeoutError(_hindrance(office, living, epoch))
        _pause(office, office.timing.beat_s / 4)


def _goes_on(others: Iterable[Beat], epoch: int) -> bool:
    """Whether one of them trains: one that is coming in itself has no state to come in with."""
    return any(b.epoch == epoch > 0 and b.awaited and not b.wants and not b.paused for b in others)


def _furthest(latest: Mapping[int, Beat], coming: set[int]) -> dict[str, int]:
    """A roster: incarnations of those who have come furthest."""
    step = max(latest[region].step for region in coming)
    return {str(r): latest[r].incarnation for r in sorted(coming) if latest[r].step == step}


def _hindrance(office: ExchangeContext, living: set[int], epoch: int) -> str:
    """Why a region that waited long enough cannot come in."""
    latest = office.beats.latest()
    ahead = sorted(region for region in living if latest[region].epoch > epoch)
    if ahead:
        return (
            f"regions {ahead} of run {office.run_id!r} train, but there is no record of when it "
            "began (epoch/): it was removed; stop them, and begin again from the checkpoints in "
            "another rendezvous"
        )
    missing = sorted(set(range(office.count)) - living)
    return f"regions {missing} of run {office.run_id!r} were not there in time"


def _pause(office: ExchangeContext, seconds: float) -> None:
    """Wait, as long as nobody closes the exchange meanwhile."""
    if office.closing.wait(seconds):
        raise RuntimeError("the exchange was closed while this region was joining")


def _begin(office: ExchangeContext, until: float, key: str, roster: dict[str, int]) -> None:
    """Begin an epoch, unless another region has."""
    record = office.seal.close(key, roster)
    insist(office, until, lambda: office.store.create(key, record))


def _check_not_fresh(office: ExchangeContext, coming: set[int]) -> None:
    """Regions that have nothing of a run must not begin it anew while others may have.

    Raises:
      TimeoutError: they would.
    """
    latest = office.beats.latest()
    further = {r: beat.step for r, beat in latest.items() if r not in coming and beat.step}
    if further and not any(latest[region].step for region in coming):
        raise TimeoutError(
            f"regions {sorted(coming)} have no checkpoint of run {office.run_id!r}, and those that "
            f"may have one, last seen at steps {further}, were not there in time: start one of "
            "them, or begin again in another rendezvous"
        )


def _newest(office: ExchangeContext) -> tuple[int, dict[int, int], int]:
    """(the newest epoch, its roster, the number for the next one); 0 = there is none."""
    numbers = sorted(int(key.removeprefix("epoch/")) for key in office.store.list("epoch/"))
    free = numbers[-1] + 1 if numbers else 1
    for number in reversed(numbers):
        key = f"epoch/{number}"
        try:
            body = office.seal.open(key, office.store.read(key) or b"")
        except Rejected:
            office.tally.add("rejected_record")
            continue
        return number, {int(region): n for region, n in body.items()}, free
    return 0, {}, free


class Membership:
    """The part of a `RemoteExchange` that is about regions, not about what they exchange.

    Attributes:
      region: which one we are; count: how many there are.
    """

    def __init__(self, office: ExchangeContext, kind: str, keep: int):
        self.region, self.count = office.region, office.count
        self._office, self._kind = office, kind
        self._litter = PayloadGC(office, keep)
        self._waiting = Waiting(office.beats)
        self._states = StateTransfer(office, self._waiting)
        self._vouching = AnchorCheck(office, self._states)
        self._running: list[WholeExchange | TwoShotExchange] = []

    def join(self, wait_s: float, step: int = 0) -> None:
        """Register, begin to beat, and wait until all regions of a new run are there.

        Into a run that goes on a region comes at once. One that was begun and has nobody left
        begins anew, with all regions or after `wait_s` with those who are there: keys can then be
        used again. Who is behind the furthest of them comes into their run as a latecomer.

        Args:
          step: up to which all is done that was due in the state that this region brings with it.

        Raises:
          ValueError: the run stands there under another secret or with other settings.
          TimeoutError: not all regions of a new run came in time, or only fresh ones came back.
          StoreUnavailable: the store does not answer all that time.
        """
        atexit.register(self._end)
        office, until = self._office, time.monotonic() + wait_s
        insist(office, until, lambda: register(office, self._kind))
        insist(office, until, self._litter.adopt)
        self._waiting.roster = enter(office, until, step)

    @property
    def awaited(self) -> bool:
        """Whether the others wait for this region's payloads; not when it comes into their run."""
        return self._office.beats.own.awaited

    def come_in(self) -> None:
        """Let the others wait for our payloads, before the first one; returns when they know."""
        self._office.beats.update(awaited=True, wants=False)
        self.hear(times=2)

    def hear(self, times: int = 1) -> None:
        """See `Beats.hear`: then the others have told anew where they are."""
        self._office.beats.hear(times)

    def living(self) -> set[int]:
        """Regions whose heartbeat was seen lately, this one included."""
        return self._office.beats.living()

    def steps(self) -> dict[int, int]:
        """Inner steps that the living regions have made, as they told."""
        latest = self._office.beats.latest()
        return {r: max(latest[r].step, latest[r].trained) for r in sorted(self.living())}

    def beat(self, step: int, trained: int = 0) -> None:
        """Tell the others, with the next heartbeat, after which step we have sent or landed
        something, and how many we have made, if more."""
        self._office.beats.update(step=step, trained=trained, at_once=False)

    def trains(self, step: int) -> None:
        """Tell the others how many inner steps we have made, with the next heartbeat."""
        self._office.beats.update(trained=step, at_once=False)

    def agree(self, name: str, proposal: dict) -> dict:
        """What the first region proposed, small JSON, since all have begun together.

        Raises:
          StoreUnavailable: try again later.
        """
        return self._office.board.agree(f"{self._office.beats.own.epoch}/{name}", proposal)

    def counts(self) -> dict[str, int]:
        """Since the start: "sent", "received" (payload bytes), "store_written", "store_read" (all
        bytes through the store), "rejected_record", "rejected_damaged", "rejected_content",
        "rejected_state", "outage"; what never happened is absent.
        """
        return self._office.tally.read()

    def pause(self, linger_s: float = 30.0) -> None:
        """End the exchanges under way without an outcome, before all regions stop for a while.

        Nothing is committed without a region that only stops: what is under way is started again
        when the run continues. Payloads can be had until all living regions pause, `linger_s` at
        most.
        """
        beats = self._office.beats
        self._office.halted.set()
        for gathering in self._running:
            gathering.join()
        beats.update(paused=True)
        self._linger(linger_s, lambda: all(beats.latest()[r].paused for r in self.living()))

    def fail(self, error: Exception) -> None:
        """Let this be raised by whatever waits here, and by what is called from now on."""
        self._office.halted.set()  # nothing can be awaited of us any more
        self._office.beats.fail(error)

    def close(self, linger_s: float = 30.0) -> None:
        """Leave the run and end all exchanges under way.

        Where others can only get payloads while this region is there, it stays until all living
        ones have them, `linger_s` at most.
        """
        if self._office.transport.lingers and not self._office.halted.is_set():
            self._linger(linger_s, self._litter.all_have_ours)
        self._end()

    def _linger(self, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not done():
            time.sleep(self._office.timing.beat_s / 4)

    def _end(self) -> None:
        """Stop all threads: one inside a library when the process ends would bring it down."""
        atexit.unregister(self._end)
        office = self._office
        office.closing.set()
        for gathering in self._running:
            gathering.join()
        self._states.join()
        self._vouching.join()
        office.beats.stop()
        office.transport.close()
        self._running = []
