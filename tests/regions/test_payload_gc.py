"""Payloads are removed when nobody needs them, and not before."""

import dataclasses
import re
import time

import pytest
from regions.faults import vanish
from regions.party import LIKE, TIMING, check, land, listen_to, rounds, send, until

from lowcomm_jax import exchange


def stored(region, kind):
    """Numbers of the exchanges that still have a record of this kind."""
    keys = region._context.store.list("round/")
    found = (re.fullmatch(rf"round/\d+/(\d+)(@[\d-]+)?/{kind}\..+", key) for key in keys)
    return sorted({int(match[1]) for match in found if match})


def test_only_the_newest_payloads_are_kept(party):
    regions = party.run(2, keep=3)
    rounds(regions, 0, 12)
    time.sleep(0.5)
    rounds(regions, 12, 13)
    # One more where a region has not heard yet that the other has everything of the last.
    until(lambda: stored(regions[0], "announce") in ([9, 10, 11, 12], [10, 11, 12]))
    until(lambda: stored(regions[0], "confirm")[0] >= 9)
    until(lambda: len(regions[0]._context.store.list("blob/")) <= 8)
    # The records stay, so that nobody can make others.
    assert stored(regions[0], "commit") == list(range(13))


def two_of_three(party, rounds_without):
    """Regions of which the last one beats and does nothing for some rounds after the first."""
    regions = party.run(3, keep=2, timing=dataclasses.replace(TIMING, deadline_s=1.5))
    rounds(regions, 0, 1)
    for x in regions[:2]:
        x.beat(10)
    rounds(regions[:2], 1, 1 + rounds_without)
    time.sleep(0.5)
    return regions


def test_a_living_region_that_is_late_finds_its_payloads(party):
    regions = two_of_three(party, 2)
    for number in range(1, 3):
        check(listen_to(regions[2], f"{number}", LIKE), 3, [0, 1], number)


def test_a_living_region_that_is_too_far_behind_holds_up_no_removal(party):
    """As where a thread hangs; then it must take a state."""
    regions = two_of_three(party, 7)
    rounds(regions[:2], 8, 9)
    until(lambda: len(stored(regions[0], "announce")) <= 5)
    with pytest.raises(exchange.Lost):
        listen_to(regions[2], "1", LIKE)


def test_payloads_of_the_dead_and_of_earlier_jobs_are_removed(party):
    regions = party.run(2, keep=2)
    rounds(regions, 0, 3)
    for x in regions:
        x.close(linger_s=0.0)
    again = party.region(0, 2, keep=2)
    again.join(1.5)
    for number in range(3, 8):
        send([again], f"{number}", number)
        land([again], f"{number}")
    until(lambda: stored(again, "announce") == [6, 7])
    until(lambda: len(again._context.store.list("blob/")) in (0, 2))
    assert stored(again, "announce") == [6, 7]


def test_payloads_are_kept_for_one_that_has_asked_for_a_state_not_before(party):
    """While it compiles nothing piles up."""
    regions = party.run(3, keep=2)
    vanish(regions[2])
    again = party.joined(2, 3, keep=2)
    rounds(regions[:2], 0, 7)
    time.sleep(0.5)
    rounds(regions[:2], 7, 8)
    until(lambda: stored(regions[0], "announce") in ([5, 6, 7], [6, 7]))
    again.want_state()
    until(
        lambda: (
            regions[0].state_transfer.asking().keys() and regions[1].state_transfer.asking().keys()
        )
    )
    rounds(regions[:2], 8, 14)
    time.sleep(0.5)
    assert set(stored(regions[0], "announce")) >= set(range(8, 14))


def test_payloads_stay_for_one_that_has_just_come_in_and_not_for_ever(party):
    """It may be further behind than payloads are kept for, and lands what it has missed."""
    regions = party.run(2, keep=2)
    rounds(regions, 0, 1)
    regions[1].want_state()
    until(regions[0].state_transfer.asking)
    rounds(regions[:1], 1, 8)
    regions[1].come_in()
    for number in (8, 9):  # that were under way when the others heard of it
        send(regions[:1], f"{number}", number, members=(0,))
        land(regions[:1], f"{number}")
        time.sleep(0.3)
    assert set(stored(regions[0], "announce")) >= set(range(1, 10))
    for number in range(1, 8):
        check(listen_to(regions[1], f"{number}", LIKE), 2, [0], number)
    for number in range(10, 16):  # it hangs
        send(regions[:1], f"{number}", number, members=(0,))
        land(regions[:1], f"{number}")
    until(lambda: len(stored(regions[0], "announce")) <= 4)


def test_what_goes_wrong_while_removing_is_raised_where_somebody_waits(party, monkeypatch):
    regions = party.run(2)

    def broken():
        raise OSError("the disk is gone")

    monkeypatch.setattr(regions[0]._payload_gc, "sweep", broken)
    rounds(regions, 0, 1)
    with pytest.raises(OSError, match="the disk is gone"):
        until(lambda: send(regions[:1], str(time.monotonic())))


def test_announcements_of_who_takes_no_part_go_too(party):
    regions = party.run(2, keep=2)
    for number in range(9):
        if number == 8:
            time.sleep(0.5)  # until each has heard that the other has everything so far
        send(regions[:1], f"{number}", takes_part=False)
        send(regions[1:], f"{number}")
        land(regions, f"{number}")
    until(lambda: stored(regions[0], "announce") in ([6, 7, 8], [7, 8]))
    keys = regions[0]._context.store.list("round/")
    assert {key.split("announce.")[1][0] for key in keys if "announce" in key} == {"0", "1"}
