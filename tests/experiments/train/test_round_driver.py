"""A region at a pace of its own, as `train` drives it: in pieces, until its last round landed."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.train.drivers import RoundDriver
from experiments.train.stopping import Stopping
from lowcomm_jax.schedule import Learners

TICKS = 24
SCHEDULE = Learners(period=4, fragments=2, delay=1)


class Carrier:
    """Of a learner with which a round lands after every third step."""

    def __init__(self):
        self.landed, self.last, self.newest = 0, None, 5


class Engine:
    def __init__(self):
        self.carrier, self.steps = Carrier(), 0
        self.loop = SimpleNamespace(carrier=self.carrier, schedule=SCHEDULE)

    def sync_loop(self, state):
        return self.loop

    def run(self, batches, rounds):
        self.carrier.last = rounds
        for _ in batches:
            self.steps += 1
            self.carrier.landed += self.steps % 3 == 0
            assert self.steps < 1000

    def state(self):
        counters = SimpleNamespace(sends=np.array([self.carrier.landed]), step=self.steps)
        return SimpleNamespace(counters=counters, in_flight={})


class Driver(RoundDriver):
    @property
    def engine(self):
        return self._run.engine

    def _open(self, state, step):
        return itertools.count()

    def step(self, state):
        return state.counters.step


@pytest.fixture
def run():
    job = SimpleNamespace(steps=TICKS, by_rounds=True, method=SimpleNamespace(schedule=SCHEDULE))
    return SimpleNamespace(job=job, engine=Engine(), fault_hooks=None, exchange=None)


def interrupt(requested):
    return SimpleNamespace(requested=requested, here=requested)


def train(driver, count, stopping):
    """As the loop does it."""
    for given in driver.calls(driver.engine.state, count, stopping):
        driver.engine.run(**given)


def test_it_trains_in_pieces_until_the_last_round_has_landed(run):
    driver = Driver(run, contextlib.nullcontext)
    stopping, ends = Stopping(run, interrupt(False)), []
    while (done := driver.progress(run.engine.state())) < TICKS:
        train(driver, 8, stopping)
        ends.append((driver.progress(run.engine.state()), run.engine.carrier.landed))
        assert ends[-1][0] > done
    assert len(ends) > 1 and ends[-1] == (TICKS, SCHEDULE.rounds_by(TICKS))
    assert run.engine.carrier.last == SCHEDULE.rounds_by(TICKS)
    assert run.engine.steps == 3 * SCHEDULE.rounds_by(TICKS), "no step after the last round"


def test_a_signal_ends_it_with_a_round_that_all_have_agreed_on(run):
    """Later than the newest round that is open, since others may land that one already."""
    proposed = []

    def agree(name, proposal):
        proposed.append(proposal["step"])
        return {"step": 8}

    run.exchange = SimpleNamespace(agree=agree)
    driver, stopping = Driver(run, contextlib.nullcontext), Stopping(run, interrupt(True))
    assert stopping.begins()
    train(driver, TICKS, stopping)
    assert proposed[0] > run.engine.carrier.newest
    assert run.engine.carrier.landed == 8 and run.engine.carrier.last == 8
