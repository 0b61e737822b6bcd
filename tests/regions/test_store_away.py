"""While the folder is away the regions train on by themselves, and catch up when it is back."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from regions.away import ALONE, AWAY, STEPS, Job, happened, one_process
from regions.faults import outage
from regions.party import TIMING, until
from regions.test_same_numbers import METHODS, assert_same, own_anchors

from lowcomm_jax import exchange

R = 3
# Nobody is to be taken for dead, or late, where the machine is busy.
PATIENT = {**vars(TIMING), "deadline_s": 60.0, "dead_after_s": 3.0}


@pytest.fixture
def started(store_party):
    """`started(name, count, hold)`: (jobs, what they will end with).

    `hold(job)`: step -> what it waits for before that step.
    """
    pool = ThreadPoolExecutor(R)

    def make(name, count, hold):
        def one(region):
            own = store_party.region(region, count, timing=exchange.Timing(**PATIENT))
            own.join(60)
            return Job(name, region, count, own)

        jobs = list(pool.map(one, range(count)))
        for job in jobs:
            job.holds = hold(job)
        return jobs, [pool.submit(job.live) for job in jobs]

    yield make
    pool.shutdown()


def check(name, jobs, ends):
    """All anchors are those of one process; returns who was counted."""
    ends = [end.result() for end in ends]
    together, counted = one_process(name, jobs)
    assert_same(ends, together, own_anchors(name))
    return counted


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_as_long_as_it_takes(name, started, store_party):
    gone, back = threading.Event(), threading.Event()
    jobs, ends = started(
        name,
        R,
        lambda job: {
            AWAY: lambda: gone.is_set() and job.away,
            ALONE: lambda: back.is_set() and not job.away,
        },
    )
    until(lambda: all(job.waits_for_outage() for job in jobs), 60.0)
    with outage(store_party):
        gone.set()
        until(lambda: all(job.at == ALONE for job in jobs), 60.0)
    back.set()
    counted = check(name, jobs, ends)
    alone = [step for step, who in counted.items() if not who.all()]
    assert alone == [step for step in counted if AWAY < step <= ALONE]
    assert sum(not who.any() for who in counted.values()) >= 3
    assert max(counted) > STEPS - 10


@pytest.mark.parametrize("name", METHODS)
def test_what_is_under_way_lands_later_and_is_not_adopted(name, started, store_party):
    """It counts; but who has trained on meanwhile keeps its values."""
    gone, back = threading.Event(), threading.Event()
    count = 2 if name in ("noloco", "gasloc") else R  # of three, two may be a group

    def hold(job):
        ends = {ALONE: lambda: back.is_set() and not job.away}
        # The others cannot commit it without the last one, which has sent nothing.
        return ends | ({0: lambda: gone.is_set() and job.away} if job.region == count - 1 else {})

    jobs, ends = started(name, count, hold)
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

    def one(region):
        own = store_party.region(
            region, 2, timing=exchange.Timing(**{**PATIENT, "deadline_s": 0.4})
        )
        own.join(60)
        job = Job("diloco", region, 2, own, step_s=0.15)  # a period takes more than a deadline
        job.holds[AWAY] = lambda: gone.is_set() and job.away
        return job

    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(one, range(2)))
        jobs[1].holds[behind] = back.is_set
        ends = [pool.submit(job.live) for job in jobs]
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
