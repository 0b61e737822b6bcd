"""A region that comes back has a state at once: its donor is asked between steps, and in waits."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from recovery.test_replayed_jobs import assert_as_in_one_process, begin, in_standard
from regions.faults import vanish
from regions.party import TIMING
from regions.test_same_numbers import METHODS, RULE
from regions.together import batches, rows, values

import lowcomm_jax as lc
from lowcomm_jax.recovery import rejoin

R, STEPS, PATIENCE_S = 3, 40, 30.0


class Job:
    """Region 2 dies and comes back. Region 1 waits before a step until it has got a state.

    Attributes:
      dies: step after which region 2 dies.
      slowly_s: how long a step of the others lasts at most, until region 2 is there.
      held: step before which region 1 waits.
      given: set once region 2 has a state.
      back: set once region 2 is in the run.
      seen: who was counted in what arrived, as it did.
      came: the step at which region 2 came in.

    """

    slowly_s = 0.5

    def __init__(self, name, region, make, dies, held, given, back):
        self.name, self.region, self.make, self.dies, self.held = name, region, make, dies, held
        self.given, self.back = given, back
        self.seen, self.came = [], None

    def live(self):
        exchange = self.make(self.region)
        one, state = begin(self, exchange)
        if self.region == 2:
            one.run(state, [rows(batch, 2) for batch in batches(STEPS, R)[: self.dies]])
            vanish(exchange)
            one, state = begin(self, self.spied(self.make(2)))
            state = rejoin.enter(one, state, rows(batches(1, R)[0], 2))
            self.came = int(state.counters.step)
            self.back.set()
        state, _ = one.run(state, self.batches(int(state.counters.step)))
        before = values(state)
        return before, values(one.finish(state))

    def spied(self, exchange):
        newest = exchange.state_transfer.newest

        def noted():
            if (state := newest()) is not None:
                self.given.set()
            return state

        exchange.state_transfer.newest = noted
        return exchange

    def batches(self, done):
        for t, batch in list(enumerate(batches(STEPS, R), 1))[done:]:
            if self.region == 1 and t == self.held:
                assert self.given.wait(PATIENCE_S), "region 2 was given nothing meanwhile"
            if self.region != 2 and t > self.dies:
                (self.back if t > self.held else self.given).wait(self.slowly_s)
            yield rows(batch, self.region)


def live(name, between, dies, held):
    """(the jobs, what each ends with) of three regions."""
    timing = dataclasses.replace(TIMING, deadline_s=2 * PATIENCE_S)
    events, make = (threading.Event(), threading.Event()), between(R, timing)
    jobs = [Job(name, region, make, dies, held, *events) for region in range(R)]
    with ThreadPoolExecutor(R) as pool:
        return jobs, list(pool.map(in_standard, [job.live for job in jobs]))


@pytest.mark.parametrize(
    ("name", "dies", "held"),
    [
        ("diloco", 5, 8),  # sends, and waits for that; in slices
        ("streaming", 5, 8),  # waits for what it has sent earlier, before it sends
        pytest.param("radial", 5, 8, marks=pytest.mark.slow),
        pytest.param("dilocox", 6, 8, marks=pytest.mark.slow),
    ],
)
def test_while_its_donor_stands_in_an_exchange(name, dies, held, between):
    """The exchange cannot end before region 1 has sent, which is when the newcomer has its state.

    It lands that exchange with the others, since it has no part in it, and starts behind it.
    """
    jobs, ended = live(name, between, dies, held)
    assert jobs[2].came >= held
    assert_as_in_one_process(name, jobs, ended, STEPS)


def test_between_exchanges(between, monkeypatch):
    """Nothing is due for long: it is given the state of the newest step, and begins with that."""
    monkeypatch.setitem(METHODS, "long", lambda: lc.methods.diloco(30, RULE))
    jobs, ended = live("long", between, 5, 25)
    assert 5 < jobs[2].came < 30
    masks = assert_as_in_one_process("long", jobs, ended, STEPS)
    assert masks[30].all(), "it counts in the next exchange"
