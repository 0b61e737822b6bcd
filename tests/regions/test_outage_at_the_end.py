"""The store is away when a run ends: what was deferred is waited for, since nobody trains on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from regions.away import STEPS, Job, one_process
from regions.faults import outage
from regions.party import TIMING, until
from regions.test_same_numbers import assert_same

from lowcomm_jax import exchange

R = 2
GONE = STEPS - 9  # two sends and more are deferred
PATIENT = {**vars(TIMING), "deadline_s": 60.0, "dead_after_s": 3.0}


@pytest.mark.parametrize("name", ["diloco", pytest.param("streaming", marks=pytest.mark.slow)])
def test_what_is_deferred_when_training_ends_is_done_before_the_last_synchronisation(name, party):
    gone = threading.Event()

    def one(region):
        own = party.region(region, R, timing=exchange.Timing(**PATIENT))
        own.join(60)
        job = Job(name, region, R, own)
        job.holds[GONE] = lambda: gone.is_set() and job.away
        return job

    with ThreadPoolExecutor(R) as pool:
        jobs = list(pool.map(one, range(R)))
        ends = [pool.submit(job.live) for job in jobs]
        until(lambda: all(job.at == GONE for job in jobs), 60.0)
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
    assert len(deferred) >= 2 and min(deferred) > GONE
