"""While the folder is away the regions train on by themselves, and catch up when it is back."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from exchange.faults import outage
from exchange.party import TIMING, until
from jobs.away import AWAY, STEPS, Job, one_process
from jobs.test_same_numbers import METHODS, assert_same
from jobs.together import batches, engine

from lowcomm_jax import exchange

R = 3


def trained_on(name, make, party, furthest):
    """(what the jobs end with, the jobs, the step of the first once all noticed that it is back).

    It is away until all have come as far as `furthest` without one another.
    """
    gone = threading.Event()
    with ThreadPoolExecutor(R) as pool:
        jobs = [Job(name, r, R, x) for r, x in enumerate(pool.map(make, range(R)))]
        for job in jobs:
            job.holds[AWAY] = lambda job=job: gone.is_set() and job.away
        running = [pool.submit(job.live) for job in jobs]
        until(lambda: all(job.settled() for job in jobs), 60.0)
        with outage(party):
            gone.set()
            until(lambda: all(job.at >= furthest for job in jobs), 60.0)
            # No further: the fragment leaves again, which it cannot before it has landed.
            time.sleep(0.5)
            assert max(job.at for job in jobs) <= furthest + 1
        until(lambda: not any(job.away for job in jobs))
        noticed = max(job.at for job in jobs)
        return [one.result() for one in running], jobs, noticed


@pytest.fixture
def regions(party):
    """`regions(region)`: joins."""

    def make(region):
        made = party.region(region, R, timing=exchange.Timing(**{**vars(TIMING), "deadline_s": 60}))
        made.join(60)
        return made

    return make


# The next send of what could not land: for that everyone waits.
@pytest.mark.parametrize("name, furthest", [("diloco", 15), ("sparseloco", 15), ("streaming", 15)])
def test_training_goes_on_until_what_was_not_sent_would_leave_again(name, furthest, regions, party):
    ends, jobs, noticed = trained_on(name, regions, party, furthest)
    together, counted = one_process(name, jobs)
    assert_same(ends, together, False)
    left_out = [step for step, who in counted.items() if not who.any()]
    assert left_out and min(left_out) > AWAY, "what could not be sent took nobody's part"
    # One may notice before another that it is back; whoever has not takes no part until then.
    assert all(who.all() for step, who in counted.items() if not AWAY < step <= noticed + 1)
    assert noticed < STEPS - 10


def alone(own, again):
    """(engine, state, key): a region whose first payload has left, perhaps as an earlier job's."""
    one = engine(METHODS["streaming"](), 1, own)
    with jax.numpy_dtype_promotion("standard"):
        state, data = one.init(oracle.make_params()), iter(batches(6, 1))
        while not state.in_flight:
            state, _ = one.step(state, next(data))
        (key,) = state.in_flight
        assert state.in_flight[key].takes_part.all()
        if again:
            own._open.clear()
            one.reconnect(state)
    return one, state, key


@pytest.fixture
def forgetful(party, monkeypatch):
    """(a region that says once that it has withdrawn what it has announced, whether it could)."""
    own, asked = party.region(0, 1), []
    own.join(10)
    finish = own.finish

    def forget(key, like, postpone=False):
        asked.append(postpone)
        if postpone:
            raise exchange.Postponed(key)
        return finish(key, like)

    monkeypatch.setattr(own, "finish", forget)
    return own, asked


def test_who_is_counted_though_it_has_withdrawn_joins_again(forgetful):
    one, state, key = alone(forgetful[0], again=False)
    arrivals = one.trips(state).arrivals
    state, flight = arrivals.wait(state, key, postpone=True)
    assert flight is None and not state.in_flight[key].takes_part.any()
    with pytest.raises(exchange.Lost, match="counts what this region has withdrawn"):
        arrivals.wait(state, key)


def test_what_an_earlier_job_may_have_announced_is_not_withdrawn(forgetful):
    own, asked = forgetful
    one, state, key = alone(own, again=True)
    _, flight = one.trips(state).arrivals.wait(state, key, postpone=True)
    assert flight.takes_part.all() and asked == [False]


def finish(region):
    like = {"x": jax.ShapeDtypeStruct((2,), np.float64)}
    return region.finish("k", like, postpone=True)


def test_who_has_announced_waits(party):
    regions, landed = party.run(2), []
    regions[0].start("k", {"x": np.ones(2)})
    until(lambda: regions[0]._open["k"].heard.own)
    with outage(party):
        until(lambda: regions[0]._office.beats.outage is not None)
        assert not regions[0]._open["k"].withdraw()
        landing = threading.Thread(target=lambda: landed.append(finish(regions[0])))
        landing.start()
        landing.join(0.5)
        assert landing.is_alive()
    regions[1].start("k", {"x": np.ones(2)})
    landing.join()
    assert landed[0].participants.tolist() == [True, True]


def test_what_was_withdrawn_is_announced_as_absence_and_removed(party):
    regions = party.run(2)
    like = {"x": jax.ShapeDtypeStruct((2,), np.float64)}
    with outage(party):
        until(lambda: regions[0]._office.beats.outage is not None)
        regions[0].start("k", {"x": np.ones(2)})
        with pytest.raises(exchange.Postponed):
            regions[0].finish("k", like, postpone=True)
        assert not regions[0].ready("k")
    regions[1].start("k", {"x": np.ones(2)})
    found = [x.finish("k", like) for x in regions]
    assert [x.participants.tolist() for x in found] == [[False, True]] * 2
