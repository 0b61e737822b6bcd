"""How a region enters a run: with everyone at its beginning, or into one that goes on."""

from __future__ import annotations

import time

from lowcomm_jax.exchange.between.errors import Rejected
from lowcomm_jax.exchange.between.office import Office

RUN = "run"
_FORMAT = 2


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


def enter(office: Office, wait_s: float, step: int) -> dict[int, int]:
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
      TimeoutError: after `wait_s` not all regions of a new run were there.
    """
    beats = office.beats
    office.transport.start()
    beats.update(step=step)
    beats.start()
    until = time.monotonic() + wait_s
    while True:
        beats.check()
        living, latest = beats.living(), beats.latest()
        epoch, roster, free = _newest(office)
        began_it = roster.get(office.region) == beats.own.incarnation
        # One that asks for a state itself has none to come in with.
        others = [latest[r] for r in living - {office.region}]
        goes_on = any(beat.epoch == epoch > 0 and not beat.wants for beat in others)
        if began_it or goes_on:
            beats.update(epoch=epoch, awaited=began_it)
            beats.refresh()
            return roster
        # Those who have just begun it may not have said so yet.
        begun = any(latest[r].incarnation == roster[r] for r in living & roster.keys())
        late = time.monotonic() >= until and not begun
        if (len(living) == office.count and not begun) or (late and epoch):
            key = f"epoch/{free}"
            furthest = max(latest[region].step for region in living)
            body = {
                str(region): latest[region].incarnation
                for region in sorted(living)
                if latest[region].step == furthest
            }
            office.store.create(key, office.seal.close(key, body))
            continue
        if late:
            missing = sorted(set(range(office.count)) - living)
            raise TimeoutError(
                f"regions {missing} of run {office.run_id!r} were not there after {wait_s:g} s"
            )
        time.sleep(office.timing.beat_s / 4)


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
