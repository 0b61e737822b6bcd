"""Training through many random faults: whatever happens, those who live end with one anchor."""

import contextlib
import faulthandler
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle.jax_problem import loss_fn
from regions.faults import outage, vanish
from regions.party import TIMING, until
from regions.together import CUT, batches, engine, rows, values

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.recovery import rejoin

R, PERIOD = 4, 6
RULE = lc.outer.nesterov(0.6, 0.5)
METHODS = {
    "streaming": lambda: lc.methods.streaming_diloco(PERIOD, 3, 2, 0.3, pattern=CUT, outer=RULE),
    "sparseloco": lambda: lc.methods.sparseloco(PERIOD),
}
DATA = batches(240, R)
KINDS = ["kill", "kill", "rejoin", "rejoin", "late", "corrupt", "partition", "outage"]


class Run:
    """What the jobs of a campaign have in common.

    Attributes:
      last: the step at which all end, once that is known.
      over: all have; until then those who come late are given a state.
    """

    def __init__(self, make, method):
        self.make, self.method = make, method
        self.last: int | None = None
        self.over = threading.Event()


class Job:
    """A region's job, as a thread that trains until it is ended."""

    def __init__(self, run: Run, region: int):
        self.run, self.region = run, region
        self.step, self.rest_s, self.dead = 0, 0.0, False
        self.exchange: exchange.RemoteExchange | None = None
        self.ended: tuple | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        try:
            with jax.numpy_dtype_promotion("standard"):
                while self.ended is None and not self.dead:
                    # Cut off for so long that a payload is gone: it comes in again.
                    with contextlib.suppress(exchange.Lost, exchange.StoreUnavailable):
                        self._train()
        except BaseException as error:
            if not self.dead:
                self.error = error

    def _train(self) -> None:
        if self.exchange is not None:
            vanish(self.exchange)
        self.exchange = self.run.make(self.region)
        self.exchange.join(60.0)
        one = engine(self.run.method(), R, self.exchange)
        state = one.init(oracle.make_params())
        state = rejoin.enter(one, state, rows(DATA[0], self.region))
        while self.run.last is None or int(state.counters.step) < self.run.last:
            at = int(state.counters.step)
            count = PERIOD if self.run.last is None else min(PERIOD, self.run.last - at)
            state, _ = one.run(state, self._batches(at, count))
            self.step = int(state.counters.step)
        state = one.finish(state)
        self.ended = values(state)
        while not (self.run.over.wait(0.1) or self.dead):
            rejoin.serve(one, state)

    def _batches(self, at: int, count: int):
        for step in range(at, at + count):
            time.sleep(0.01 + self.rest_s)
            self.rest_s = 0.0
            yield rows(DATA[step % len(DATA)], self.region)

    def kill(self) -> None:
        self.dead = True
        if self.exchange is not None:
            vanish(self.exchange)

    def corrupt(self) -> None:
        """The next payload is published with a flipped bit."""
        transport = self.exchange._context.transport
        put = transport.put

        def once(name, data):
            transport.put = put
            return put(name, data[:-1] + bytes([data[-1] ^ 1]))

        transport.put = once

    def cut_off(self, seconds: float) -> None:
        """The store cannot be reached from this region."""
        store = self.exchange._context.store
        answer = store._answer

        def away(future, nbytes=0):
            raise exchange.StoreUnavailable("cut off")

        store._answer = away
        time.sleep(seconds)
        store._answer = answer


def strike(kind: str, region: int, jobs: dict[int, Job], dead: list[Job], party) -> None:
    """One fault; what cannot happen to this region now does not."""
    ready = region in jobs and jobs[region].step > 0
    if kind == "rejoin" and region not in jobs:
        jobs[region] = Job(dead[-1].run, region)
    elif kind == "kill" and ready and sum(job.step > 0 for job in jobs.values()) > 1:
        jobs[region].kill()
        dead.append(jobs.pop(region))
    elif kind == "late" and ready:
        jobs[region].rest_s = 3.0
    elif kind == "corrupt" and ready:
        jobs[region].corrupt()
    elif kind == "partition" and ready:
        jobs[region].cut_off(1.5)
    elif kind == "outage":
        with outage(party):
            time.sleep(1.0)


def campaign(party, method, faults: int, seed: int) -> tuple:
    """Train, strike and heal; returns (the jobs at the end, the method, steps)."""

    def make(region):
        timing = exchange.Timing(**{**vars(TIMING), "deadline_s": 2.0})
        return party.region(region, R, timing=timing)

    rng, run = np.random.default_rng(seed), Run(make, method)
    jobs, dead = {r: Job(run, r) for r in range(R)}, []
    until(lambda: all(job.step >= PERIOD for job in jobs.values()), 120.0)
    for _ in range(faults):
        strike(str(rng.choice(KINDS)), int(rng.integers(R)), jobs, dead, party)
        time.sleep(float(rng.uniform(0.05, 0.6)))
        assert not [job.error for job in jobs.values() if job.error]
    for region in range(R):
        if region not in jobs:
            strike("rejoin", region, jobs, dead, party)

    def healed():
        assert not [job.error for job in jobs.values() if job.error]
        return all(job.step > 0 for job in jobs.values())

    until(healed, 120.0)
    run.last = max(job.step for job in jobs.values()) + 10 * PERIOD
    with contextlib.suppress(AssertionError):
        until(lambda: all(job.ended or job.error for job in jobs.values()), 120.0)
    run.over.set()
    for job in [*jobs.values(), *dead]:
        job.thread.join(20.0)
        if job.thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
        assert not job.thread.is_alive(), f"region {job.region} waits for ever, at step {job.step}"
    with contextlib.suppress(StopIteration):
        raise next(job.error for job in jobs.values() if job.error)
    return jobs, method, run.last


def loss(anchor) -> float:
    """Of an anchor `[1, ...]` by leaf, over the data of all regions."""
    params = jax.tree.map(lambda x: jnp.asarray(x[0]), anchor)
    losses = [
        loss_fn(params, {k: x[r] for k, x in b.items()}, None) for b in DATA[:60] for r in range(R)
    ]
    return float(np.mean([float(x) for x in losses]))


def check(jobs: dict[int, Job], method, steps: int) -> None:
    """One anchor, and a loss like that of a run without faults."""
    anchors = [job.ended[0] for job in jobs.values()]
    for other in anchors[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, anchors[0])
    with jax.numpy_dtype_promotion("standard"):
        whole = engine(method(), R)
        state, _ = whole.run(
            whole.init(oracle.make_params()), (DATA[t % len(DATA)] for t in range(steps))
        )
        free = values(whole.finish(state))[0]
        start = {k: np.asarray(x)[None] for k, x in oracle.make_params().items()}
        found, wanted, untrained = loss(anchors[0]), loss(free), loss(start)
    # Neither worse nor better than as many steps without faults, by a tenth of what was learnt.
    assert abs(found - wanted) < 0.1 * (untrained - wanted), (found, wanted, untrained)


@pytest.mark.parametrize("name", METHODS)
def test_few_faults(store_party, name):
    check(*campaign(store_party, METHODS[name], 6, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_hundred_faults(store_party, name):
    check(*campaign(store_party, METHODS[name], 200, seed=1))
