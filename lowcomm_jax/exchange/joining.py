"""How a region enters a run: with everyone at its beginning, or into one that goes on."""

from __future__ import annotations

import time

from lowcomm_jax.exchange.errors import Rejected
from lowcomm_jax.exchange.office import Office

RUN = "run"
_BEGUN = "begun"
_FORMAT = 1


def register(office: Office, kind: str) -> None:
    """Write the run's record, or check that we are of the run that stands there.

    Raises:
      ValueError: the record was signed with another secret, or describes another run.
      StoreUnavailable: the store does not answer.
    """
    ours = {"format": _FORMAT, "run": office.run_id, "count": office.count, "exchange": kind}
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


def enter(office: Office, wait_s: float) -> None:
    """Beat, and wait for the others.

    A region that is in nobody's roster comes into a run that goes on: the others do not wait for
    its payloads before it has sent its first. Everyone in a roster has begun together.

    Raises:
      TimeoutError: after `wait_s` not all regions of a new run were there.
    """
    beats = office.beats
    office.transport.start()
    beats.start()
    until = time.monotonic() + wait_s
    while True:
        beats.check()
        living = beats.living()
        latest = beats.latest()
        roster = {region: latest[region].incarnation for region in living}
        going = [r for r in living - {office.region} if latest[r].roster]
        if going:
            own = beats.own.incarnation
            with_us = [r for r in going if latest[r].roster.get(office.region) == own]
            # Theirs where we are in it: we may not have seen everyone's heart beat yet.
            roster = latest[with_us[0]].roster if with_us else roster
            beats.update(roster=roster, awaited=bool(with_us))
            return
        late = time.monotonic() >= until
        if len(living) == office.count or (late and office.store.read(_BEGUN) is not None):
            office.store.create(_BEGUN, office.seal.close(_BEGUN, {}))
            beats.update(roster=roster, awaited=True)
            return
        if late:
            missing = sorted(set(range(office.count)) - living)
            raise TimeoutError(
                f"regions {missing} of run {office.run_id!r} were not there after {wait_s:g} s"
            )
        time.sleep(office.timing.beat_s / 4)
