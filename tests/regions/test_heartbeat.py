"""When a region counts as dead: soon where beats come fast, later where they come slowly.

And what a region makes of the beats that it reads, looked at one by one.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from regions.faults import vanish
from regions.party import KINDS, at_once, rounds, until

from lowcomm_jax.exchange import StoreUnavailable, Timing
from lowcomm_jax.store.errors import Lost, Superseded
from lowcomm_jax.store.heartbeat import Heartbeat
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.records import Beat
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots

LOOK_S = 0.25


class Watched:
    """Region 0 of three, which looks when it is told to; others beat as the test says."""

    def __init__(self, folder, timing):
        self.store = Store(f"file://{folder}", "run", MetricsCounter())
        self.slots = Slots(self.store, Seal("run", b""))
        self.ours = Heartbeat(self.store, self.slots, 0, 3, timing)
        self.ours.update(incarnation=3, epoch=2)

    def beats(self, region, incarnation=1, counter=1, **more):
        self.slots.write(f"beat/{region}", Beat(incarnation, counter, **more))

    def look(self, passed_s=LOOK_S):
        self.ours._look(passed_s)

    @property
    def living(self):
        return self.ours.living(), self.ours.living(certain=False)


@pytest.fixture
def watch(tmp_path):
    """`watch(timing, pauses)`: region 1 beats after each of these pauses, in looks, and then no
    more; seconds from its last beat until region 0 takes it for dead."""

    def act(timing, pauses):
        watched = Watched(tmp_path, timing)
        for counter, pause in enumerate((1, *pauses), 1):
            for _ in range(pause - 1):
                watched.look()
            watched.beats(1, counter=counter)
            watched.look()
        silent = 0
        while 1 in watched.ours.living():
            watched.look()
            silent += 1
        return silent * LOOK_S

    return act


@pytest.mark.parametrize(
    "pauses, dead_after_s",
    [
        ([4] * 6, 4.0),  # a beat a second: as set
        ([8] * 6, 6.0),  # every two seconds: three times that
        ([4, 4, 9, 4, 4], 6.75),  # one was late
        ([9] + [4] * 8, 4.0),  # one was late, long ago
        ([15, 40, 100, 200], 64.0),  # never longer than 16 times
        ([8] * 3 + [1] * 8, 6.0),  # a burst of quick beats says nothing of usual ones
    ],
)
def test_patience_follows_the_gaps_between_beats(watch, pauses, dead_after_s):
    assert watch(Timing(beat_s=1.0, dead_after_s=4.0), pauses) == dead_after_s


def test_near_and_far():
    near, far = Timing.between("file:///x", deadline_s=7.0), Timing.between("s3://x")
    assert near.dead_after_s < 2 <= far.dead_after_s == Timing().dead_after_s
    assert near.deadline_s == 7.0 and not near.violations() and not far.violations()


@pytest.mark.parametrize("kind", KINDS)
def test_who_gives_no_times_has_those_of_its_url(kind, tmp_path):
    made = KINDS[kind](tmp_path.as_uri(), 0, 1, "run")
    try:
        assert made._context.timing == Timing.between("file:///x")
    finally:
        made.close()


def test_a_death_in_a_shared_folder_is_seen_within_two_seconds(watch):
    """Where beats come as they should: every second look of 0.25 s."""
    assert watch(Timing.between("file:///x"), [2] * 6) < 2.0


def test_a_death_in_a_shared_folder_is_seen_by_the_job_itself(store_party):
    """Later where the machine is so busy that beats come late."""
    regions = store_party.run(2, timing=Timing.between("file:///x"))
    until(lambda: all(x.steps().keys() == {0, 1} for x in regions))
    time.sleep(2.0)  # beats come quickly at first
    vanish(regions[1])
    until(lambda: regions[0].steps().keys() == {0})
    seen = regions[0]._context.heartbeat._seen[1]
    assert seen.silent_s >= 1.6, "and no sooner"
    assert np.median(seen.gaps_s) < 1.5, "beats come every 0.4 s, of which some may be late"


def test_eight_regions_exchange_and_two_die(store_party):
    regions = store_party.run(8, timing=Timing(beat_s=0.2, dead_after_s=2.0, answer_s=2.0))
    rounds(regions, 0, 2)
    at_once(vanish, regions[6:])
    rounds(regions[:6], 2, 4)


# -- beats, read one by one -------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path, Timing(beat_s=1.0, dead_after_s=4.0))


def test_a_beat_that_changes_is_life_and_one_that_stands_may_be(watched):
    watched.look()
    assert watched.living == ({0}, {0})
    watched.beats(1)
    watched.look(), watched.look()
    assert watched.living == ({0}, {0, 1}), "it may be of yesterday"
    watched.beats(1, counter=2)
    watched.look()
    assert watched.living == ({0, 1}, {0, 1})
    watched.look(3.75)
    assert watched.living == ({0, 1}, {0, 1})
    watched.look(0.25)
    assert watched.living == ({0}, {0}), "silent for four seconds"
    assert watched.ours.clock_s == 4 * LOOK_S + 4.0
    watched.beats(1, counter=3, leaving=True)
    watched.look()
    assert watched.living == ({0}, {0}) and watched.ours.latest()[1].leaving


def test_who_comes_or_asks_is_answered_with_every_look(store_party):
    """It waits for two beats of all others, which then beat as often as they look."""
    regions = store_party.run(3, timing=Timing(beat_s=1.2, dead_after_s=60.0))
    other = regions[0]._context.heartbeat
    regions[2].want_state()
    time.sleep(4.0)  # what that has hastened is over
    looks, beats = other._looks, other.own.counter
    regions[2].come_in()
    looks, beats = other._looks - looks, other.own.counter - beats
    assert beats >= max(2, looks - 2), (beats, looks)


def test_an_older_record_proves_nothing(watched):
    watched.beats(1, 2, 5)
    watched.look()
    for incarnation, counter in ((2, 5), (2, 4), (1, 9)):
        watched.beats(1, incarnation, counter)
        watched.look(1.0)
        assert watched.living == ({0}, {0, 1})
    watched.look(1.0)
    assert watched.living == ({0}, {0}) and watched.ours.latest()[1].counter == 5


@pytest.mark.parametrize("version", ["8,2", "8.", "", "-1.2", "8.2\n", "1" * 20])
def test_a_beat_with_an_odd_version_is_counted_and_passed_over(watched, version):
    """Also where it is signed: a region in another language may write such a one."""
    watched.beats(1, counter=1, anchors={"8.2": {"anchor": "5"}, "18": {}})
    watched.look()
    watched.beats(1, counter=2, anchors={version: {}})
    watched.look()
    assert watched.ours.latest()[1].counter == 1
    assert watched.store.counter.read()["rejected_record"] == 1


def test_how_long_a_restart_takes_says_nothing(watched):
    for counter in range(1, 5):
        watched.beats(1, 1, counter)
        watched.look(3.0)
    assert list(watched.ours._seen[1].gaps_s) == [3.0] * 3
    watched.look(8.0)
    watched.beats(1, 2, 1)
    watched.look(3.0)
    seen = watched.ours._seen[1]
    assert (seen.changed, seen.silent_s, list(seen.gaps_s)) == (True, 0.0, [])
    watched.beats(1, 2, 2)
    watched.look(1.5)
    assert list(watched.ours._seen[1].gaps_s) == [1.5]


def test_the_jobs_that_may_have_announced_are_the_newest_two_of_a_region(watched):
    """The one before may have done so just before it died; of ourselves only this job counts."""
    assert watched.ours.jobs(range(3)) == {0: [3]} and watched.ours.job == (0, 3)
    for incarnation in (1, 2, 5):
        watched.beats(1, incarnation)
        watched.look()
    watched.beats(2, 4)
    watched.look()
    assert watched.ours.jobs(range(3)) == {0: [3], 1: [5, 2], 2: [4]}
    assert watched.ours.jobs([2]) == {2: [4]}


def test_the_newest_gaps_count(watched):
    for counter in range(1, 14):
        watched.beats(1, 1, counter)
        watched.look(float(counter))
    assert list(watched.ours._seen[1].gaps_s) == [float(n) for n in range(6, 14)]


def test_the_latest_beats_are_those_of_all_that_were_seen_and_our_own(watched):
    watched.beats(2, 4, 7, step=9)
    watched.look()
    latest = watched.ours.latest()
    assert latest.keys() == {0, 2} and latest[2].step == 9
    assert latest[0] == watched.ours.own and latest[0].incarnation == 3


@pytest.mark.parametrize(
    ("own_epoch", "region", "incarnation", "epoch", "error"),
    [
        (2, 0, 4, 2, Superseded),
        (2, 0, 3, 2, None),
        (2, 0, 2, 9, None),  # an earlier job's
        (2, 1, 1, 3, Lost),
        (2, 1, 1, 2, None),
        (2, 1, 1, 1, None),
        (0, 1, 1, 7, None),  # it has not joined yet, and may find any epoch
    ],
)
def test_whose_place_is_taken_or_whose_run_began_anew_ends(
    watched, own_epoch, region, incarnation, epoch, error
):
    watched.ours.update(epoch=own_epoch)
    watched.beats(region, incarnation, epoch=epoch)
    watched.look()
    if error is None:
        watched.ours.check()
    else:
        with pytest.raises(error):
            watched.ours.check()


def test_the_first_error_stays(watched):
    watched.ours.check()
    watched.ours.fail(OSError("the disk is gone"))
    watched.ours.fail(ValueError("that follows from it"))
    with pytest.raises(OSError, match="the disk is gone"):
        watched.ours.check()
    counter = watched.ours.own.counter
    watched.ours._beat()
    assert watched.ours.own.counter == counter, "it beats no more"


@pytest.mark.parametrize(
    ("above", "beaten", "born", "expected"),
    [
        (0, None, (), 1),
        (4, None, (), 5),
        (0, 6, (), 7),
        (2, 3, (4, 5), 6),
        (0, None, (1, 2, 3), 4),
        (0, 3, (10**15 - 1,), 4),  # no job has made that key: none between them is there
        (0, None, (1, 2**63 - 1), 2),
    ],
)
def test_a_job_is_the_next_incarnation_of_all_that_are_known(
    watched, above, beaten, born, expected
):
    """Of the newest record, of the keys that are taken, and of what the caller knows."""
    if beaten:
        watched.beats(0, beaten)
    for number in born:
        watched.store.write(f"born/0/{number}.0", b"")
    watched.ours.start(watched.ours.check, above)
    watched.ours.stop(leaving=False)
    assert watched.ours.own.incarnation == expected
    assert watched.store.read(f"born/0/{expected}.0")


def test_a_search_for_a_free_number_ends_where_the_exchange_does(watched, monkeypatch):
    """Whoever can write to the store can take as many numbers as they like."""
    tried, ours = [], watched.ours
    monkeypatch.setattr(watched.store, "create", lambda key, value: tried.append(key))

    def check():
        if len(tried) == 3:
            raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        ours.start(check)
    assert tried == [f"born/0/{number}.0" for number in (1, 2, 3)]
    assert ours.own.incarnation == 3 and ours._thread.ident is None, "it has taken no place"


@pytest.mark.parametrize("leaving", [True, False])
def test_who_stops_says_so_or_is_gone(watched, leaving):
    watched.ours._timing = Timing(beat_s=0.05)
    watched.ours.update(awaited=True)
    watched.ours.stop()  # before its start there is nothing to stop
    watched.ours.start(watched.ours.check)
    watched.ours.refresh()
    watched.ours.stop(leaving)
    told = watched.ours._read(0)
    assert (told.leaving, told.awaited) == (leaving, not leaving)


def test_a_store_that_has_just_gone_away_is_given_time(watched, monkeypatch):
    ours, waits = watched.ours, []
    assert ours.store_answers(lambda: False)
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def asleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", asleep)
    ours._note_outage(StoreUnavailable("away"))
    now[0] += 1.0
    ours._note_outage(StoreUnavailable("still away"))
    assert not ours.store_answers(lambda: False)
    assert now[0] == 50.0 + 4.0 and set(waits) == {0.25}, "since the first, and no longer"
    assert watched.store.counter.read()["outage"] == 1
    assert not ours.store_answers(lambda: False) and now[0] == 54.0
    ours.outage = None
    assert ours.store_answers(lambda: False)
    ours._note_outage(StoreUnavailable("away again"))
    ours.fail(ValueError("over"))
    with pytest.raises(ValueError, match="over"):
        ours.store_answers(lambda: False)


def test_a_store_that_is_away_is_asked_with_pauses_though_a_beat_is_due(watched):
    ours, looks, waits = watched.ours, [], []

    def away(region):
        looks.append(region)
        if len(looks) == 3:
            ours.fail(ValueError("over"))
        raise StoreUnavailable("away")

    ours._read = away
    ours._stop = SimpleNamespace(is_set=lambda: False, wait=waits.append)
    ours.update(step=7)  # is to be told at once
    ours._beat_and_look()
    assert waits == [0.25] * 3 and ours.own.counter == 0


@pytest.fixture
def script(watched, monkeypatch):
    """What happens while region 0 sleeps, act by act; after each it looks."""
    acts = []

    def asleep(seconds):
        acts.pop(0)()
        watched.look(0.0)

    monkeypatch.setattr(time, "sleep", asleep)
    return acts


def test_the_others_have_beaten_since_when_all_living_ones_have(watched, script):
    """So often since our next beat; one that comes later, once; the dead are not waited for."""
    ours = watched.ours
    for counter in (1, 2):
        watched.beats(1, 1, counter)
        watched.beats(2, 1, counter)
        watched.look()
    script += [
        ours._beat,
        lambda: watched.beats(1, 1, 3),
        lambda: watched.beats(2, 1, 4),
        lambda: watched.beats(1, 1, 4),
    ]
    ours.wait_for_beats(times=2)
    assert not script
    script += [ours._beat, lambda: watched.beats(1, 2, 1)]
    watched.look(4.0)  # long silent: 2 counts as dead, and 1 comes as another job
    watched.beats(1, 1, 5)
    watched.look(0.0)
    ours.wait_for_beats(times=2)
    assert not script


def test_who_was_not_known_before_has_beaten_since(watched, script):
    ours = watched.ours
    for counter in (1, 2):
        watched.beats(1, 1, counter)
        watched.look()
    script += [
        ours._beat,
        lambda: watched.beats(2, 1, 1),
        lambda: watched.beats(2, 1, 2),
        lambda: watched.beats(1, 1, 3),
    ]
    ours.wait_for_beats()
    assert not script and ours.living() == {0, 1, 2}


def test_what_is_waited_for_is_looked_at_several_times_a_beat(watched, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    watched.ours._wait(lambda: len(slept) == 3)
    assert slept == [1.0 / 8] * 3
    watched.ours.fail(Lost("it is over"))
    with pytest.raises(Lost, match="over"):
        watched.ours._wait(lambda: False)
