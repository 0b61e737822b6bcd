"""Regions of several processes under the contract of an exchange."""

import numpy as np
import pytest
from processes_in_threads import leaders, together
from runtime.party import LIKE, SECRET, TIMING, payload

from lowcomm_jax import exchange
from lowcomm_jax.runtime.connect import LockstepExchange
from lowcomm_jax.runtime.remote import RemoteExchange


@pytest.fixture
def regions(tmp_path):
    """Two regions of two processes each, as pairs of exchanges."""
    jobs = [leaders(2), leaders(2)]

    def make(region):
        def process(team):
            def open_one():
                url = f"file://{tmp_path}/meet"
                return exchange.store(url, region, 2, "run", SECRET, timing=TIMING)

            return LockstepExchange(team, region, 2, "stop", open_one)

        return together(process, jobs[region])

    made = [make(region) for region in range(2)]
    yield made
    together(lambda one: one.close(), [one for region in made for one in region])
    for team in jobs[0] + jobs[1]:
        team._channel.close()


def everywhere(act, regions):
    return together(act, [one for region in regions for one in region])


def test_all_processes_of_all_regions_hold_the_same(regions):
    def act(one):
        one.join(20.0)
        one.beat(3)
        one.start("0", payload(one.region, 0))
        arrived = one.finish("0", LIKE)
        return arrived, one.living(), one.agree("stop", {"step": 7}), one.awaited, one.epoch

    found = everywhere(act, regions)
    for arrived, *rest in found:
        assert rest == [{0, 1}, {"step": 7}, True, 1]
        assert arrived.participants.all()
        for name, x in arrived.arrays.items():
            np.testing.assert_array_equal(x, found[0][0].arrays[name])
            np.testing.assert_array_equal(x[1], np.asarray(payload(1, 0)[name][0]))


def test_what_the_first_process_refuses_all_refuse(regions):
    def act(one):
        return one.start("", {})

    for error in everywhere(act, regions):
        assert isinstance(error, ValueError) and "join() first" in str(error)


def test_a_failed_process_ends_the_wait_of_the_first(regions):
    """It waits for a region that says nothing; without a sign it would until the deadline."""
    everywhere(lambda one: one.join(20.0), regions)

    def act(one):
        with one._leader.together():
            one.start("0", payload(one.region, 0))
            if not one._leader.leads:
                raise OSError("disk full")
            return one.finish("0", LIKE)

    first, second = together(act, regions[0])
    assert "process 1 of this job failed: OSError: disk full" in str(first)
    assert isinstance(second, OSError)


def test_processes_of_different_regions_are_refused(tmp_path):
    job = leaders(2)
    found = together(lambda one: LockstepExchange(one, one.index, 2, "stop", None), job)
    for error in found:
        assert isinstance(error, ValueError) and "give all of them the same" in str(error)
    for one in job:
        one._channel.close()


def test_every_method_of_the_exchange_is_there():
    public = {name for name in dir(RemoteExchange) if not name.startswith("_")}
    assert public - set(dir(LockstepExchange)) == {"fail"}
