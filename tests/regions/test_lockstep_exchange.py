"""Regions of several processes under the contract of an exchange."""

import sys
import threading
import weakref

import numpy as np
import pytest
from processes_in_threads import leaders, together
from regions.party import LIKE, SECRET, TIMING, payload

from lowcomm_jax import exchange
from lowcomm_jax.rounds.paced_rounds import RoundExchange
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.schedule import Admission

HERE = threading.local()
PROCESSES = weakref.WeakKeyDictionary()  # by exchange


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens the exchange of a region in one of its processes, which is a thread here."""
    for module in ("lowcomm_jax.mesh.leader", "lowcomm_jax.rounds.membership"):
        monkeypatch.setattr(sys.modules[module], "leader", lambda: HERE.process)

    def make(process, region):
        HERE.process = process
        url = f"file://{tmp_path}/meet"
        made = exchange.store(url, region, 2, "run", SECRET, timing=TIMING)
        PROCESSES[made] = process
        return made

    return make


def in_each(act, exchanges):
    """`act(exchange)` in the process of each."""

    def one(exchange):
        HERE.process = PROCESSES[exchange]
        return act(exchange)

    return together(one, exchanges)


@pytest.fixture
def regions(opened):
    """Two regions of two processes each, as pairs of exchanges."""
    jobs = [leaders(2), leaders(2)]
    made = [together(lambda one, r=r: opened(one, r), jobs[r]) for r in range(2)]
    yield made
    everywhere(lambda one: one.close(), made)
    for team in jobs[0] + jobs[1]:
        team._channel.close()


def everywhere(act, regions):
    return in_each(act, [one for region in regions for one in region])


def test_all_processes_of_all_regions_hold_the_same(regions):
    def act(one):
        one.join(20.0)
        one.beat(3)
        one.start("0", payload(one.region, 0))
        arrived = one.finish("0")
        return arrived, set(one.steps()), one.agree("stop", {"step": 7}), one.awaited, one.epoch

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
        with HERE.process.together():
            one.start("0", payload(one.region, 0))
            if not HERE.process.leads:
                raise OSError("disk full")
            return one.finish("0")

    first, second = in_each(act, regions[0])
    assert "process 1 of this job failed: OSError: disk full" in str(first)
    assert isinstance(second, OSError)


def test_processes_of_different_regions_are_refused(opened):
    job = leaders(2)
    found = together(lambda one: opened(one, one.index), job)
    for error in found:
        assert isinstance(error, ValueError) and "give all of them the same" in str(error)
    for one in job:
        one._channel.close()


def test_all_processes_take_the_same_way_through_rounds(regions):
    """Who is first in its job reports, looks and decides; the others hold the same numbers."""

    def act(one):
        one.join(20.0)
        rounds, seen = one.rounds(Admission(2, 0.0), 2, 1, [LIKE], 0), []
        for number in range(3):
            rounds.stepped()
            rounds.report(number, payload(one.region, number), {"round": number}, number)
            while (ours := rounds.names_ours(number)) is None:
                rounds.wait()
            arrived = rounds.take(number, {"round": number})
            sums = {name: float(x.sum()) for name, x in arrived.arrays.items()}
            seen.append((ours, arrived.participants.tolist(), sums))
            one.beat(number + 1)
        rounds.go_on(4)
        return seen, rounds.seen()

    found = everywhere(act, regions)
    assert found[0][1] == (4, 3) and all(took == [True, True] for _, took, _ in found[0][0])
    assert all(one == found[0] for one in found)


def test_the_first_process_calls_every_method_that_needs_the_exchange():
    """Others have no context: a method that is not led would end them alone."""
    apart = {
        RemoteExchange: {"fail", "rounds", "stop_when"},
        RoundExchange: {"begin", "look"},
    }
    for kind, names in apart.items():
        public = {n: getattr(kind, n) for n in dir(kind) if not n.startswith("_")}
        calls = {n: m.fget if isinstance(m, property) else m for n, m in public.items()}
        assert {n for n, call in calls.items() if not hasattr(call, "__wrapped__")} == names
