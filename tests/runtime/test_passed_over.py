"""A region that comes in while an exchange is under way, which some confirm without it."""

import threading
import time
from types import SimpleNamespace

import pytest
from runtime.party import check, land, send, until

from lowcomm_jax import exchange
from lowcomm_jax.runtime.commits import Commit
from lowcomm_jax.runtime.heartbeat import Beat, WaitList
from lowcomm_jax.runtime.request import ExchangeResult


def hold(commit_log, seen):
    """Let it commit no sooner."""
    commit = commit_log.commit

    def held(*args):
        assert seen.wait(30)
        return commit(*args)

    commit_log.commit = held


def test_who_waits_for_it_does_so_no_longer_and_it_learns_of_that(party):
    regions = party.run(3, timing=exchange.Timing(beat_s=0.2, dead_after_s=30, deadline_s=60))
    # It has not read yet that region 2 is there.
    regions[1]._wait_list.awaited = lambda region: region != 2
    seen = threading.Event()
    for region in regions[:2]:
        hold(region._context.commit_log, seen)
    assert not regions[2].passed_over("k")
    began = time.monotonic()
    send(regions[:2], "k")
    until(lambda: regions[2].passed_over("k"))
    seen.set()
    for arrived in land(regions[:2], "k"):
        check(arrived, 3, [0, 1])
    assert not regions[2].passed_over("k"), "it is over"
    assert time.monotonic() - began < 30, "region 0 has waited for what cannot count"


@pytest.mark.parametrize("vain, told", [(False, False), (True, False), (True, True)])
def test_only_who_was_waited_for_can_be_left_behind(vain, told):
    """Not one that has come to where the others are, and was first read of just now; nor one that
    the writer of the record has heard and we have not yet: it has announced its absence."""
    beats = {r: Beat(incarnation=1, step=6, awaited=True) for r in range(3)}
    heartbeat = SimpleNamespace(
        region=0, own=beats[0], latest=lambda: beats, living=lambda certain: {0, 1, 2}
    )
    waiting = WaitList(heartbeat)
    commit, heard = Commit({}, {2: {}} if told else {}, 1, (0, 1)), frozenset({0, 1})
    waiting.note({1, 2}, ExchangeResult(commit, {}, heard, frozenset({2} if vain else ()), 0.1))
    assert waiting.awaited(1) and waiting.awaited(2) == (told or not vain)


class Beats:
    """What a wait list reads of a heartbeat: beats by region, and who lives."""

    def __init__(self, step=10, region=0, **beats):
        self.region, self.own = region, Beat(1, step=step)
        self.beats = {int(name[1:]): beat for name, beat in beats.items()}
        self.alive = {region, *self.beats}

    def latest(self):
        return self.beats

    def living(self, certain=True):
        return self.alive if not certain else set()


def ended(announced, unanswered=(), present=(0, 1), terms=()):
    """The end of an exchange."""
    commit = Commit({}, {r: {} for r in terms}, 0, tuple(present))
    return ExchangeResult(commit, {}, frozenset(announced), frozenset(unanswered), 0.1)


@pytest.mark.parametrize(
    ("beat", "roster", "lives", "expected"),
    [
        (Beat(2), {1: 2}, True, True),
        (Beat(2), {1: 2}, False, False),
        (Beat(3), {1: 2}, True, False),  # another job, that has sent nothing
        (Beat(3, awaited=True), {1: 2}, True, True),
        (Beat(3, awaited=True), {}, True, True),
        (Beat(2, wants=True), {1: 2}, True, False),
        (Beat(2, wants=True, awaited=True), {1: 2}, True, False),
        (None, {1: 2}, True, False),
        (None, {}, True, False),
    ],
)
def test_who_is_waited_for(beat, roster, lives, expected):
    beats = Beats() if beat is None else Beats(r1=beat)
    beats.alive = {0, 1} if lives else {0}
    waiting = WaitList(beats)
    waiting.roster = roster
    assert waiting.awaited(1) is expected


def test_who_missed_an_exchange_is_waited_for_once_it_is_past_our_step_of_then():
    beats = Beats(step=10, r1=Beat(1, step=4, awaited=True))
    waiting = WaitList(beats)
    assert waiting.awaited(1) and not waiting.left_behind(1)
    waiting.note({1}, ended({0}, {1}))
    for step, behind in ((4, True), (10, True), (11, False)):
        beats.beats[1] = Beat(1, step=step, awaited=True)
        assert waiting.left_behind(1) is behind and waiting.awaited(1) is not behind
    assert not waiting.left_behind(2), "of which nothing is known"


def test_a_second_miss_counts_from_then_only_if_it_had_caught_up():
    beats = Beats(step=10, r1=Beat(1, step=4, awaited=True))
    waiting = WaitList(beats)
    waiting.note({1}, ended({0}, {1}))
    beats.own = Beat(1, step=20)
    beats.beats[1] = Beat(1, step=10, awaited=True)
    waiting.note({1}, ended({0}, {1}))  # it is still behind: a later step it might never reach
    beats.beats[1] = Beat(1, step=11, awaited=True)
    assert not waiting.left_behind(1)
    waiting.note({1}, ended({0}, {1}))
    assert waiting.left_behind(1)
    beats.beats[1] = Beat(1, step=21, awaited=True)
    assert not waiting.left_behind(1)


def test_who_announces_is_behind_no_more():
    beats = Beats(step=10, r1=Beat(1, step=4), r2=Beat(1, step=4))
    waiting = WaitList(beats)
    waiting.note({1, 2}, ended({0}, {1, 2}))
    assert waiting.left_behind(1) and waiting.left_behind(2)
    waiting.note({1}, ended({0, 1, 2}))  # 2 is no member of that group
    assert not waiting.left_behind(1) and waiting.left_behind(2)
    waiting.note({2}, ended({0}, terms={2}))  # only the record's writer has heard it
    assert not waiting.left_behind(2)


@pytest.mark.parametrize("region", [0, 3])
def test_it_is_known_whether_the_others_went_on_without_us(region):
    waiting = WaitList(Beats(region=region))
    assert not waiting.behind
    waiting.note(set(), ended({0, 1}))
    assert waiting.behind is (region == 3)
    waiting.note(set(), ended({0, 1}, present=(0, 1, 3)))
    assert not waiting.behind
