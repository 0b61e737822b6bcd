"""A region that comes in while an exchange is under way, which some confirm without it."""

import threading
import time

import pytest
from regions.made_records import commit_of
from regions.party import check, land, send, until

from lowcomm_jax import exchange
from lowcomm_jax.store.commits import CommitLog
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.records import Beat, Late
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.wait_list import WaitList


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
    regions[1]._context.wait_list.awaited = lambda region: region != 2
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


def members(*regions, number=1, joins=True):
    """An exchange of a group, as `WaitList.note` is told of it."""
    return number, regions, joins


def ended(late=(), present=(0, 1)):
    """The record of an exchange."""
    return commit_of({}, {}, 0, tuple(present), dict(late))


def test_who_missed_an_exchange_is_waited_for_once_it_is_past_the_writers_step_of_then():
    beats = Beats(step=10, r1=Beat(1, step=4, awaited=True))
    waiting = WaitList(beats)
    assert waiting.awaited(1) and not waiting.left_behind(1)
    late = waiting.late_in([1], [1])
    assert late == {1: Late(10, 1)} and waiting.awaited(1), "until there is a record"
    waiting.note(*members(0, 1), ended(late))
    for step, behind in ((4, True), (10, True), (11, False)):
        beats.beats[1] = Beat(1, step=step, awaited=True)
        assert waiting.left_behind(1) is behind and waiting.awaited(1) is not behind
    assert not waiting.left_behind(2), "of which nothing is known"


def test_a_second_miss_counts_from_then_only_if_it_had_caught_up():
    beats = Beats(step=20, r1=Beat(1, step=10, awaited=True))
    waiting = WaitList(beats)
    waiting.note(*members(0, 1), ended({1: Late(10, 1)}))
    # It is still behind: a later step it might never reach.
    assert waiting.late_in([1], [1]) == {1: Late(10, 1)}
    beats.beats[1] = Beat(1, step=11, awaited=True)
    assert waiting.late_in([1], [1]) == {1: Late(20, 2)}
    assert waiting.late_in([1], []) == {1: Late(10, 1)}, "nobody has waited for it"
    assert waiting.late_in([], []) == {}, "it has announced"
    assert waiting.late_in([1, 2], [2]) == {1: Late(10, 1), 2: Late(20, 1)}


def test_regions_agree_on_who_is_late_as_the_last_record_says():
    waiting = WaitList(Beats(step=10, r1=Beat(1, step=4), r2=Beat(1, step=4)))
    waiting.note(*members(0, 1, 2), ended({1: Late(8, 1), 2: Late(9, 4)}))
    assert waiting.late == {1: Late(8, 1), 2: Late(9, 4)}
    assert [waiting.missed(x) for x in ([], [1], [1, 2], [1, 3])] == [0, 1, 4, 1]
    waiting.note(*members(0, 1), ended())  # 2 is no member of that group
    assert waiting.late == {2: Late(9, 4)}
    assert not waiting.left_behind(1) and waiting.left_behind(2)
    waiting.note(*members(0, 1, 2, joins=False), ended({1: Late(9, 1)}))
    assert waiting.late == {1: Late(9, 1)}, "also what is only read"


def test_exchanges_that_end_in_another_order_say_what_the_last_one_says():
    for order in ((1, 2), (2, 1)):
        waiting = WaitList(Beats(step=10, r1=Beat(1, step=4)))
        for number in order:
            late = {1: Late(8, 1)} if number == 1 else {}
            waiting.note(*members(0, 1, number=number), ended(late))
        assert not waiting.late and waiting._noted == {0: 2, 1: 2}


def test_who_is_left_behind_keeps_the_step_that_it_is_to_come_to():
    """A region that has just come in knows of no earlier miss, and writes its own step."""
    beats = Beats(step=50, r1=Beat(1, step=30))
    waiting = WaitList(beats)
    waiting.note(*members(0, 1), ended({1: Late(30, 3)}))
    waiting.note(*members(0, 1), ended({1: Late(50, 1)}))
    assert waiting.late == {1: Late(30, 3)}
    beats.beats[1] = Beat(1, step=31)
    waiting.note(*members(0, 1), ended({1: Late(50, 1)}))
    assert waiting.late == {1: Late(50, 3)}, "what it has missed stays known"
    waiting.note(*members(0, 1), ended())
    waiting.note(*members(0, 1), ended({1: Late(50, 1)}))
    assert waiting.late == {1: Late(50, 1)}, "it has announced in between"


def test_who_is_late_itself_holds_nothing_against_others_that_stood_still_with_it():
    waiting = WaitList(Beats(step=10, r1=Beat(1, step=10), r2=Beat(1, step=15)))
    waiting.note(*members(0, 1, 2), ended({0: Late(15, 1), 1: Late(15, 4)}))
    assert not waiting.left_behind(1) and waiting.missed([1]) == 4 and not waiting.missed([0, 2])


@pytest.mark.parametrize("region", [0, 3])
def test_it_is_known_whether_the_others_went_on_without_us(region):
    waiting = WaitList(Beats(region=region))
    assert not waiting.behind
    waiting.note(*members(0, 1, 3, joins=False), ended())
    assert not waiting.behind, "we have not tried"
    waiting.note(*members(0, 1, 3), ended())
    assert waiting.behind is (region == 3)
    waiting.note(*members(0, 1, 3, number=7), ended(present=(0, 1, 3)))
    waiting.note(*members(0, 1, 3, number=6), ended())
    assert not waiting.behind, "an earlier exchange that ends later"
    waiting.note(*members(0, 1, 3, number=8), ended())
    waiting.note(*members(0, 1, 3, number=9), ended(present=(0, 1, 3)))
    assert not waiting.behind


def test_who_is_late_from_now_on_is_so_in_a_record_that_is_written_read_and_obeyed(tmp_path):
    """A step of -1: whoever it is about is past it, wherever it is, and has missed what it has."""

    def log():
        store = Store(tmp_path.as_uri(), "run", MetricsCounter())
        return CommitLog(store, Slots(store, Seal("run", b"x" * 16)))

    writer = WaitList(Beats(step=10, r1=Beat(1, step=3, awaited=True)))
    writer.note(*members(0, 1), ended({0: Late(15, 1), 1: Late(15, 4)}))
    late = writer.late_in([1])  # it says nothing in the next exchange either
    assert late == {1: Late(-1, 4)}
    log().commit("1/k", ended(late, present=(0, 2)))
    read = log().committed("1/k")
    assert read.late == late
    reader = WaitList(Beats(step=40, region=2, r1=Beat(1, step=0, awaited=True)))
    reader.note(*members(0, 1, 2), read)
    assert reader.late == late and reader.missed([1]) == 4
    assert reader.awaited(1) and not reader.left_behind(1)
    reader.note(*members(0, 1, 2), ended({1: Late(0, 4)}, present=(0, 2)))
    assert not reader.awaited(1), "it is not past step 0"
