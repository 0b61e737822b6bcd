"""Regions at a pace of their own, in real time: one dies, comes back, and copies a peer."""

import threading
import time

import jax
import numpy as np
import oracle
import pytest
from regions.faults import outage
from regions.learners import PATTERN, Learner, table
from regions.party import TIMING, at_once, until
from regions.together import rows

import lowcomm_jax as lc
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.store.errors import Superseded

R, ROUNDS, DIES = 3, 60, 12
pytestmark = pytest.mark.slow


class Killed(Exception):
    """The job is gone."""


class Live(Learner):
    """A learner in real time; `gave` is what it has last given to one that came back."""

    def __init__(self, region, own, made, step_s, dies=None):
        super().__init__(region, own, made, table())
        self.step_s, self.dies = step_s, dies
        self.gave, self.came, self.at = None, None, 0

    def batches(self):
        for number in range(self.step_number, 100_000):
            if self.dies is not None and number >= self.dies:
                raise Killed
            self.at = number
            time.sleep(self.step_s)
            yield rows(oracle.step_batch(self.data, number % 60 + 1), self.region)

    def live(self):
        gives = self.one.carrier.given

        def give(state):
            self.gave = gives(state)
            return self.gave

        with jax.numpy_dtype_promotion("standard"):
            self.one.carrier.given = give
            if not self.exchange.awaited:
                batch = next(self.batches())
                self.state = rejoin.enter(self.one, self.state, batch)
                self.came = self.step_number, self.one.carrier.position(self.state)
                self.copied = self.values()
            self.state, self.history = self.one.run(self.state, self.batches(), rounds=ROUNDS)
            self.before = self.anchor()
            self.state = self.one.finish(self.state)
            rejoin.serve(self.one, self.state, 10.0)


METHODS = {
    "learners": (
        lambda: lc.methods.decoupled_diloco(3, 3, 2, 1, 0.8, pattern=PATTERN),
        lambda given, key: given[f"inner/params/{key}"][0],
    ),
    "arrivals": (
        lambda: lc.methods.async_local_sgd(3, (1.0, 1.0, 1.0)),
        lambda given, key: given[f"anchor/{key}"][0],
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_region_that_dies_copies_a_peer_and_nobody_stops(name, store_party):
    make, copied = METHODS[name]
    made = make()
    regions = store_party.run(R)
    jobs = [Live(x.region, x, made, 0.08 + 0.04 * x.region) for x in regions]
    jobs[2].dies = DIES
    steps_then = []

    def act(one):
        try:
            one.live()
        except Killed:
            one.exchange._context.heartbeat.stop(leaving=False)
            until(lambda: 2 not in jobs[0].exchange.steps(), 30.0)
            steps_then.append(jobs[0].loop.carrier.landed)
            own = store_party.region(2, R)
            own.join(30.0)
            # The others go on while it has joined and has not come in, however busy the machine is.
            until(lambda: jobs[0].loop.carrier.landed > steps_then[0], 30.0)
            again = Live(2, own, made, 0.08)
            again.live()
            jobs.append(again)

    at_once(act, jobs)
    again = jobs.pop()
    assert steps_then[0] >= 1
    jobs[2] = again
    for one in jobs[1:]:
        for key, value in one.before.items():
            np.testing.assert_array_equal(value, jobs[0].before[key], key)
            np.testing.assert_array_equal(one.anchor()[key], jobs[0].anchor()[key], key)
    position, arrays, _ = next(one.gave for one in jobs if one.gave is not None)
    assert again.came[1] == position > 0
    for key, value in again.copied.items():
        np.testing.assert_array_equal(value, copied(arrays, key), key)
    counted = [e for e in again.history.events if e.kind == "land" and e.values["admitted"][2]]
    assert counted, "it takes part again"


def test_a_second_job_in_its_place_ends_the_first(store_party):
    made = lc.methods.decoupled_diloco(3, 3, 2, 1, 0.8, pattern=PATTERN)
    regions = store_party.run(2)
    jobs = [Live(x.region, x, made, 0.05) for x in regions]
    ended = []

    def act(one):
        try:
            one.live()
        except (Superseded, RuntimeError) as error:
            ended.append(type(error))

    threads = [threading.Thread(target=act, args=(one,), daemon=True) for one in jobs]
    for thread in threads:
        thread.start()
    until(lambda: jobs[1].loop.carrier.landed > 2, 60.0)
    own = store_party.region(1, 2, timing=TIMING)
    own.join(30.0)
    until(lambda: Superseded in ended, 30.0)
    own.close(linger_s=0.0)
    for x in regions:
        x.fail(RuntimeError("the test is over"))
    for thread in threads:
        thread.join(30.0)


def test_they_train_on_while_the_folder_is_away_and_rounds_go_on_when_it_is_back(store_party):
    made = lc.methods.decoupled_diloco(3, 3, 2, 1, 0.8, pattern=PATTERN)
    jobs = [Live(x.region, x, made, 0.05) for x in store_party.run(2)]
    seen = {}

    def watch(_):
        until(lambda: all(one.loop.carrier.landed > 4 for one in jobs), 60.0)
        with outage(store_party):
            time.sleep(1.5)
            seen["away"] = [(one.at, one.loop.carrier.landed) for one in jobs]
            time.sleep(1.0)
            seen["still"] = [(one.at, one.loop.carrier.landed) for one in jobs]

    at_once(lambda act: act(None) if act is watch else act.live(), [*jobs, watch])
    for (step, landed), (later, still) in zip(seen["away"], seen["still"], strict=True):
        assert later > step and still == landed < ROUNDS
    for key, value in jobs[0].before.items():
        np.testing.assert_array_equal(value, jobs[1].before[key], key)
