"""How a region enters a run: with everyone at its beginning, or into one that goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lowcomm_jax.exchange.between.beats import Beat
from lowcomm_jax.exchange.between.errors import Rejected, StoreUnavailable
from lowcomm_jax.exchange.between.office import Office

RUN = "run"
_FORMAT = 3
T = TypeVar("T")
log = logging.getLogger(__name__)


def insist(office: Office, until: float, act: Callable[[], T]) -> T:
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


def register(office: Office, kind: str) -> None:
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


def enter(office: Office, until: float, step: int) -> dict[int, int]:
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


def _hindrance(office: Office, living: set[int], epoch: int) -> str:
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


def _pause(office: Office, seconds: float) -> None:
    """Wait, as long as nobody closes the exchange meanwhile."""
    if office.closing.wait(seconds):
        raise RuntimeError("the exchange was closed while this region was joining")


def _begin(office: Office, until: float, key: str, roster: dict[str, int]) -> None:
    """Begin an epoch, unless another region has."""
    record = office.seal.close(key, roster)
    insist(office, until, lambda: office.store.create(key, record))


def _check_not_fresh(office: Office, coming: set[int]) -> None:
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


def _newest(office: Office) -> tuple[int, dict[int, int], int]:
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
