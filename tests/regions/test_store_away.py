"""While the folder is away the regions train on by themselves, and catch up when it is back."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from regions.away import ALONE, AWAY, PATIENT, STEPS, happened, one_process, started
from regions.faults import outage
from regions.party import until
from regions.test_same_numbers import METHODS, assert_same, own_anchors

R = 3


def regions_of(party, count, **timing):
    """region -> its exchange."""
    timing = dataclasses.replace(PATIENT, **timing)
    return lambda region: party.region(region, count, timing=timing)


def check(name, jobs, ends):
    """All anchors are those of one process; returns who was counted."""
    ends = [end.result() for end in ends]
    together, counted = one_process(name, jobs)
    assert_same(ends, together, own_anchors(name))
    return counted


class Asked:
    """What a region's exchanges ask the store for, one by one and at once; but no heartbeats."""

    def __init__(self, job):
        self.keys, self.together = [], []
        store = job.exchange._context.store
        self._read_all, store.read_all = store.read_all, self

    def __call__(self, keys, nbytes=0):
        if len({key.rpartition("/")[0] for key in keys}) > 1:  # of several exchanges
            self.together.append(keys)
        elif not threading.current_thread().name.startswith(
            ("lowcomm-heartbeat", "lowcomm-at-once")
        ):
            self.keys += keys
        return self._read_all(keys, nbytes)

    def check(self, missed):
        """Rounds that nobody has a part in cost a few round trips together."""
        of_round = lambda name: [x for x in self.keys if x.startswith(f"round/{name}/")]  # noqa: E731
        # Only those that it began before the others were back, one after the other.
        assert sum(bool(of_round(name)) for name in missed) <= 4
        assert len(self.together) <= 30
        kinds = {key.split("/")[-1].split(".")[0] for keys in self.together for key in keys}
        assert kinds <= {"commit", "announce"}, "a round of no payload has none to read"


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_as_long_as_it_takes(name, store_party):
    """And the rounds that all have missed end together, in a few round trips."""
    gone, back = threading.Event(), threading.Event()

    def holds(job):
        return {
            AWAY: lambda: gone.is_set() and job.away,
            ALONE: lambda: back.is_set() and not job.away,
        }

    with started(name, R, regions_of(store_party, R), holds) as (jobs, ends):
        until(lambda: all(job.waits_for_outage() for job in jobs), 60.0)
        with outage(store_party):
            gone.set()
            until(lambda: all(job.at == ALONE for job in jobs), 60.0)
            asked = [Asked(job) for job in jobs]
        back.set()
        counted = check(name, jobs, ends)
    alone = [step for step, who in counted.items() if not who.all()]
    assert alone == [step for step in counted if AWAY < step <= ALONE]
    assert sum(not who.any() for who in counted.values()) >= 3
    assert max(counted) > STEPS - 10
    seen = enumerate(jobs[0].seen, 1)
    missed = [f"1/{n}" for n, one in seen if not one.counted_N.any() and not one.last]
    if name == "streaming":
        assert len(missed) >= 10
        for each in asked:
            each.check(missed)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_under_way_lands_later_and_is_not_adopted(name, store_party):
    """It counts; but who has trained on meanwhile keeps its values."""
    gone, back = threading.Event(), threading.Event()
    count = 2 if name in ("noloco", "gasloc") else R  # of three, two may be a group

    def holds(job):
        ends = {ALONE: lambda: back.is_set() and not job.away}
        # The others cannot commit it without the last one, which has sent nothing.
        return ends | ({0: lambda: gone.is_set() and job.away} if job.region == count - 1 else {})

    with started(name, count, regions_of(store_party, count), holds) as (jobs, ends):
        until(lambda: all(job.announced for job in jobs[:-1]), 60.0)
        with outage(store_party):
            gone.set()
            until(lambda: all(job.at == ALONE for job in jobs), 60.0)
        back.set()
        counted = check(name, jobs, ends)
    first = min(counted)
    _, adopted = happened(jobs)
    assert counted[first].tolist() == [True] * (count - 1) + [False]
    # At DiLoCoX's boundaries it is who sends that restarts.
    assert not adopted[first].any() or name == "dilocox"
    assert all(adopted[step].all() for step in adopted if step > ALONE)


@pytest.mark.parametrize("name", ["diloco", pytest.param("streaming", marks=pytest.mark.slow)])
def test_what_is_deferred_when_training_ends_is_done_before_the_last_synchronisation(name, party):
    """It is waited for, since nobody trains on."""
    gone, count, goes = threading.Event(), 2, STEPS - 9  # two sends and more are deferred
    holds = lambda job: {goes: lambda: gone.is_set() and job.away}  # noqa: E731
    with started(name, count, regions_of(party, count), holds) as (jobs, ends):
        until(lambda: all(job.at == goes for job in jobs), 60.0)
        until(lambda: all(all(map(job.exchange.ready, job.exchange._open)) for job in jobs), 60.0)
        with outage(party):
            gone.set()
            until(lambda: all(job.at == STEPS - 1 for job in jobs), 60.0)
            time.sleep(1.0)  # they have begun to finish, if they do not wait
            assert not any(end.done() for end in ends)
        ends = [end.result(60) for end in ends]
    together, counted = one_process(name, jobs)
    # Before it they had done less than one process.
    assert_same([end[1:] for end in ends], together[1:], own_anchors=False)
    deferred = [step for step, who in counted.items() if not who.any()]
    assert len(deferred) >= 2 and min(deferred) > goes


def test_a_landing_that_cannot_be_waits_no_longer_than_the_store_is_there(store_party):
    regions, found = store_party.run(2), []
    regions[0].start("k", {"x": np.ones((1, 2))})
    until(lambda: regions[0]._open["k"].own)
    waits = threading.Thread(target=lambda: found.append(regions[0].arrives(["k"])))
    waits.start()
    waits.join(0.5)
    assert waits.is_alive() and regions[0].reachable()
    with outage(store_party):
        waits.join()
        assert found == [False] and not regions[0].reachable() and not regions[0].arrives(["k"])
        assert regions[0]._open["k"].due.since_s is None, "it trains on meanwhile"
    regions[1].start("k", {"x": np.ones((1, 2))})
    until(lambda: regions[0].reachable())
    assert regions[0].arrives(["k"])
    landed = regions[0].finish("k")
    assert landed.participants.tolist() == [True, True] and landed.waited > 0.4


def test_who_is_ahead_waits_afterwards_for_those_who_are_not_there_yet(store_party):
    """Longer than a deadline allows: else it would go on alone, and the others never be counted."""
    gone, back, behind, far = threading.Event(), threading.Event(), AWAY + 8, 35

    def holds(job):
        def hurry():
            job.step_s = 0.01  # what is looked at is over
            return True

        later = {behind: back.is_set} if job.region == 1 else {}
        return {AWAY: lambda: gone.is_set() and job.away, **later, far + 8: hurry}

    impatient = regions_of(store_party, 2, deadline_s=0.4)  # a period takes longer
    with started("diloco", 2, impatient, holds, step_s=0.15) as (jobs, ends):
        until(lambda: all(job.waits_for_outage() for job in jobs), 60.0)
        with outage(store_party):
            gone.set()
            until(lambda: jobs[0].at == far and jobs[1].at == behind, 60.0)
        back.set()
        counted = check("diloco", jobs, ends)
    # They notice within some steps that they can reach one another.
    put_off = [step for step in counted if behind + 5 < step < far]
    assert put_off and all(counted[step].tolist() == [False, True] for step in put_off)
    assert counted[far + 1].all(), "it is still almost a period ahead where it sends again"
