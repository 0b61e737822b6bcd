"""One process that is told who was counted and who came back ends where the jobs did."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from regions.faults import vanish
from regions.party import TIMING, until
from regions.test_same_numbers import METHODS
from regions.together import Over, batches, engine, rows, unhurried, values

from lowcomm_jax.recovery import rejoin
from lowcomm_jax.recovery.rejoin import rejoin_regions

R, STEPS, DIES, WAIT = 3, 160, 9, 24
AHEAD, EVERY = 8, 2  # the step of a send; steps between sends


def begin(job, exchange):
    """A job's engine, which notes in `job.seen` who was counted in what arrives; and its state."""
    one = engine(METHODS[job.name](), R, exchange)
    state = one.init(oracle.make_params())
    one.sync_loop(state).carrier.witness = job.seen.append
    return one, state


class Job:
    """Region 2 dies and comes back; the others wait a little for it."""

    def __init__(self, name, region, make, saved, ahead, entered, comes):
        self.name, self.region, self.make, self.saved = name, region, make, saved
        self.ahead, self.entered, self.comes = ahead, entered, comes
        self.seen, self.came = [], None

    def live(self):
        exchange = self.make(self.region)
        one, state = begin(self, exchange)
        if self.ahead and self.region != 2:
            self.stay_behind(exchange)
        if self.region == 2:
            dies = AHEAD if self.ahead else DIES
            one.run(state, [rows(batch, 2) for batch in batches(STEPS, R)[:dies]])
            log, name = exchange._context.commit_log, f"{exchange.epoch}/{AHEAD // EVERY}"
            if self.ahead:
                until(lambda: log.announced(name, {2: [1]}))
            vanish(exchange)
            exchange = self.make(2)
            if self.ahead == "counts":
                self.come_in_after(exchange, lambda: log.committed(name))
            one, state = begin(self, exchange)
            state.counters.step = np.int64(self.saved)
            state = rejoin.enter(one, state, rows(batches(1, R)[0], 2))
            self.came = int(state.counters.step)
            self.entered.set()
        data, done = batches(STEPS, R), int(state.counters.step)
        state, _ = one.run(
            state, unhurried(data, self.region, self.entered, done, since=WAIT, wait_s=0.5)
        )
        before = values(state)
        return before, values(one.finish(state))

    def come_in_after(self, exchange, counted):
        """Come in once the others have counted what the job before has sent."""
        come_in = exchange.come_in

        def late():
            self.comes.set()
            until(counted)
            come_in()

        exchange.come_in = late

    def stay_behind(self, exchange):
        """Be at the send before when region 2 asks for a state; let it come in there if it does."""
        start, beat = exchange.start, exchange.beat

        def give_then(step=None, trained=None):
            if step == AHEAD - EVERY:
                until(exchange.state_transfer.asking)
            beat(step, trained)

        def start_late(key, *args, **how):
            if key == str(AHEAD // EVERY):
                assert (self.comes if self.ahead == "counts" else self.entered).wait(60)
            start(key, *args, **how)

        exchange.beat, exchange.start = give_then, start_late


@pytest.mark.parametrize(
    "name, saved, ahead",
    [
        pytest.param("streaming", WAIT + 6, "", marks=pytest.mark.slow),
        ("streaming", 0, "is replaced"),
        pytest.param("radial", 0, "counts", marks=pytest.mark.slow),
        pytest.param("sparseloco", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_region_dies_and_comes_back(name, saved, ahead, between):
    """Also with residuals, and while payloads are under way; not before the step of its checkpoint,
    which may be further than the others are if it had trained on alone; and not before the last
    payload that it had sent, which counts unless the new job has announced its absence before."""
    timing = dataclasses.replace(TIMING, deadline_s=60.0) if ahead else TIMING
    entered, comes, make = Over(), threading.Event(), between(R, timing)
    jobs = [Job(name, region, make, saved, ahead, entered, comes) for region in range(R)]
    with ThreadPoolExecutor(R) as pool:
        done = list(pool.map(in_standard, [job.live for job in jobs]))
    came = jobs[2].came
    assert max(AHEAD - 1 if ahead else DIES, saved - 1) < came < STEPS
    masks = assert_as_in_one_process(name, jobs, done, min(STEPS, entered.last))
    if ahead:
        assert masks[AHEAD][2] == (ahead == "counts")
    else:
        assert not all(mask[2] for mask in masks.values())


def assert_as_in_one_process(name, jobs, done, steps):
    """One process that is told what the jobs have seen ends with the same bits.

    Args:
      jobs: with `seen` and `came`; region 2 is the one that came back.
      done: what each ended with, before and after `finish`.
      steps: of the run.

    Returns:
      Step of a send -> bool `[R]`, who was counted in it.
    """
    came, seen = jobs[2].came, {}
    for job in jobs:
        for counted in job.seen:
            at = counted.fragment, counted.number
            # What they agreed on is the same wherever it is seen.
            assert seen.setdefault(at, counted).counted_N.tolist() == counted.counted_N.tolist()
    masks = {one.step: one.counted_N for one in seen.values() if not one.last}
    ends = {one.fragment: one.counted_N for one in seen.values() if one.last}
    assert set(ends) == set(range(len(ends)))
    with jax.numpy_dtype_promotion("standard"):
        one = engine(METHODS[name](), R)
        state, fresh = one.init(oracle.make_params()), one.init(oracle.make_params())
        data = batches(steps, R)
        state, _ = one.run(state, data[:came], masks.get)
        state = rejoin_regions(one.sync_loop(state), state, fresh, np.array([False, False, True]))
        state, _ = one.run(state, data[came:], masks.get)
        together = values(state), values(one.finish(state, ends.get))
    for region, job in enumerate(done):
        for (anchor, params), (all_anchors, all_params) in zip(job, together, strict=True):
            for leaf, value in anchor.items():
                np.testing.assert_array_equal(value, all_anchors[leaf], leaf)
            for leaf, value in params.items():
                np.testing.assert_array_equal(value[0], all_params[leaf][region], leaf)
    return masks


def in_standard(act):
    with jax.numpy_dtype_promotion("standard"):
        return act()
