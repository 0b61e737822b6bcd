"""Some regions cannot reach the others for a while, or not as long: what has landed in one of them
and not in another must not pass for anchors that have parted."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from runtime.away import ALONE, AWAY, Job, one_process
from runtime.faults import folder, outage
from runtime.party import TIMING, until
from runtime.test_same_numbers import assert_same

from experiments.faults.rendezvous_cut import cut_region, reconnect_region, region_link
from lowcomm_jax import exchange

NAME = "streaming"  # with three fragments


@pytest.fixture
def started(store_party):
    """`started(count, hold)`: (jobs that wait at step `AWAY`, what they will end with).

    Each has a door of its own to the folder; `hold(job)`: what it then waits for.
    """
    pools = []

    def make(count, hold):
        folder(store_party).mkdir()

        def one(region):
            reconnect_region(folder(store_party), region)
            url = f"file://{region_link(folder(store_party), region)}"
            timing = exchange.Timing(**{**vars(TIMING), "deadline_s": 60})
            own = exchange.store(url, region, count, "run", timing=timing)
            store_party.made.append(own)
            own.join(60)
            job = Job(NAME, region, count, own)
            job.holds[AWAY] = lambda: hold(job)
            return job

        pools.append(ThreadPoolExecutor(count))
        jobs = list(pools[0].map(one, range(count)))
        ends = [pools[0].submit(job.live) for job in jobs]
        until(lambda: all(job.waits_for_outage() for job in jobs), 60.0)
        return jobs, ends

    yield make
    for pool in pools:
        pool.shutdown()


def test_the_folder_comes_back_between_two_sends(started, store_party):
    """One has put off what leaves there, the other has not come to it."""
    gone = threading.Event()
    jobs, ends = started(2, lambda job: gone.is_set() and job.away)
    back = threading.Event()
    for job, step in zip(jobs, (AWAY + 4, AWAY + 2)):
        job.holds[step] = lambda job=job: back.is_set() and not job.away
    with outage(store_party):
        gone.set()
        until(lambda: [job.at for job in jobs] == [AWAY + 4, AWAY + 2], 60.0)
    back.set()
    ends = [end.result() for end in ends]
    together, counted = one_process(NAME, jobs)
    assert_same(ends, together, False)
    assert any(who.tolist() == [False, True] for who in counted.values())


@pytest.mark.parametrize("dead", [False, True])
def test_one_region_is_cut_off(dead, started, store_party):
    """For a moment, or for so long that the others go on without it."""
    shut = threading.Event()
    jobs, ends = started(3, lambda job: shut.is_set() and job.away == (job.region == 0))
    jobs[0].holds[ALONE] = lambda: not jobs[0].away
    cut_region(folder(store_party), 0)
    shut.set()
    until(lambda: jobs[0].at >= AWAY + 4, 60.0)
    if dead:
        until(lambda: jobs[1].at >= AWAY + 9, 60.0)
    reconnect_region(folder(store_party), 0)
    ends = [end.result() for end in ends]
    together, counted = one_process(NAME, jobs)
    assert_same(ends, together, False)
    alone = [step for step, who in counted.items() if who.tolist() == [False, True, True]]
    assert alone and all(step > AWAY for step in alone)
    assert all(who[1:].all() for who in counted.values())
