"""What a region proposes as the commit record, and when: decided without threads or a store."""

from types import SimpleNamespace

import pytest

from lowcomm_jax.runtime.commits import Announcement, Commit, PayloadRecord
from lowcomm_jax.runtime.heartbeat import Beat
from lowcomm_jax.runtime.request import ExchangeRequest
from lowcomm_jax.runtime.two_shot_exchange import TwoShotExchange
from lowcomm_jax.runtime.whole_exchange import WholeExchange

R, DEADLINE_S = 3, 10.0
REQUEST = ExchangeRequest("k", "1.k", tuple(range(R)), takes_part=True)


def payload(region):
    return PayloadRecord(f"digest {region}", 100)


def context(living):
    heartbeat = SimpleNamespace(
        clock_s=0.0, living=lambda certain: set(living), latest=dict, own=Beat(incarnation=1)
    )
    commit_log = SimpleNamespace(
        confirmed=lambda name, region: None, commit=lambda name, proposed: proposed
    )
    pace = SimpleNamespace(deadline_s=lambda nbytes: DEADLINE_S)
    return SimpleNamespace(
        region=0, heal="stop", heartbeat=heartbeat, commit_log=commit_log, pace=pace
    )


def at_proposal(living, held):
    """An exchange of region 0 that has all payloads, and has confirmed them; (it, its context)."""
    around = context(living)
    one = WholeExchange(around, REQUEST, lambda region: True, lambda _: None)
    for region in range(R):
        one.inbox.announcements[region] = Announcement(region, 1, payload(region), {})
        one.inbox.fetches[region] = SimpleNamespace(complete=True)
    one._held = {by: {r: payload(r).content for r in regions} for by, regions in held.items()}
    return one, around


def test_the_dead_are_not_present():
    """Region 2 died before region 1 had its payload: it averages nothing, and must not be asked."""
    one, _ = at_proposal(living={0, 1}, held={0: [0, 1, 2], 1: [0, 1]})
    commit = one._propose()
    assert sorted(commit.payloads) == [0, 1] and commit.present == (0, 1)


def test_who_announced_and_lives_is_present_without_a_payload():
    one, _ = at_proposal(living={0, 1, 2}, held={0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]})
    one.inbox.announcements[2] = Announcement(2, 1, None, {})
    commit = one._propose()
    assert sorted(commit.payloads) == [0, 1] and commit.present == (0, 1, 2)


def test_a_confirmation_is_waited_for_twice_as_long_as_a_payload():
    """The other region may wait a deadline itself before it confirms."""
    one, around = at_proposal(living={0, 1, 2}, held={0: [0, 1, 2], 1: [0, 1, 2]})
    around.heartbeat.clock_s = 1.9 * DEADLINE_S
    assert one._propose() is None
    around.heartbeat.clock_s = 2.0 * DEADLINE_S
    assert sorted(one._propose().payloads) == [0, 1, 2]


@pytest.mark.parametrize(
    ("beat", "owes"),
    [
        (Beat(incarnation=4), True),
        (Beat(incarnation=5), False),  # another job: what it was to average is gone
        (Beat(incarnation=4, wants=True), False),
        (None, False),
    ],
)
def test_averages_are_owed_by_the_job_that_announced(beat, owes):
    around = context(living={0, 1, 2})
    around.heartbeat.latest = lambda: {} if beat is None else {1: beat}
    reduction = SimpleNamespace(parts=R, like={}, rest={})
    request = ExchangeRequest("k", "1.k", tuple(range(R)), reduction=reduction)
    one = TwoShotExchange(around, request, lambda region: True, lambda _: None)
    one._first.inbox.announcements[1] = Announcement(1, 4, payload(1), {})
    everyone = Commit({r: payload(r) for r in range(R)}, {}, 0, tuple(range(R)))
    assert one._owes_averages(everyone)(1) is owes
    assert not one._owes_averages(Commit(everyone.payloads, {}, 0, (0, 2)))(1)
