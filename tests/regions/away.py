"""Regions in threads that are held where tests want them while the folder is away."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
from regions.party import TIMING, until
from regions.test_same_numbers import METHODS
from regions.together import batches, engine, rows, values

from experiments.faults.simulated import Replayed
from lowcomm_jax import exchange

STEPS, AWAY = 60, 9
ALONE = AWAY + 24  # several periods
# Nobody is to be taken for dead, or late, where the machine is busy.
PATIENT = exchange.Timing(**{**vars(TIMING), "deadline_s": 60.0, "dead_after_s": 3.0})


class Job:
    """A region that lets others decide when it goes on.

    Attributes:
      at: steps that were begun.
      holds: by step, what must be true before it is begun.
      seen: who was counted in what arrived, as it did.
      began: its first state, of which only the layout is left.
    """

    def __init__(self, name, region, count, own, step_s=0.01):
        self.region, self.count, self.exchange = region, count, own
        self.at, self.holds, self.seen, self.step_s = 0, {}, [], step_s
        self.one = engine(METHODS[name](), count, own)

    def live(self):
        with jax.numpy_dtype_promotion("standard"):
            state = self.began = self.one.init(oracle.make_params())
            self.one.sync_loop(state).carrier.witness = self.seen.append
            state, _ = self.one.run(state, self.batches())
            before = values(state)
            return before, values(self.one.finish(state))

    def batches(self):
        for step, batch in enumerate(batches(STEPS, self.count)):
            self.at = step
            if step in self.holds:
                until(self.holds[step], 60.0)
            time.sleep(self.step_s)
            yield rows(batch, self.region)

    @property
    def away(self):
        return self.exchange._context.heartbeat.outage is not None

    @property
    def announced(self):
        """Whether the others have been told of what it has under way, which is something."""
        under_way = list(self.exchange._open.values())
        return bool(under_way) and all(one.own for one in under_way)

    def waits_for_outage(self):
        """Whether it waits before the step of the outage, with nothing under way."""
        return self.at == AWAY and all(map(self.exchange.ready, self.exchange._open))


@contextlib.contextmanager
def started(name, count, make, holds, **options):
    """Regions that train: (jobs, futures of what each ends with).

    Args:
      name: a key of `METHODS`.
      make: region -> its exchange, which has not joined.
      holds: job -> its `holds`.
      options: of `Job`.
    """

    def one(region):
        own = make(region)
        own.join(60)
        job = Job(name, region, count, own, **options)
        job.holds = holds(job)
        return job

    with ThreadPoolExecutor(count) as pool:
        jobs = list(pool.map(one, range(count)))
        yield jobs, [pool.submit(job.live) for job in jobs]


def happened(jobs):
    """(who was counted, who of them adopted what came of it): step of a send -> bool `[R]`."""
    counted, adopted = {}, {}
    for job in jobs:
        for one in job.seen:
            if not one.last:
                groups = job.one.sync_loop(job.began).groups(one.number)
                mine = list(job.one.carrier.own_group(groups))
                who = counted.setdefault(one.step, np.ones(job.count, bool))
                who[mine] = one.counted_N
                adopted.setdefault(one.step, np.ones(job.count, bool))[job.region] = one.adopted
    return counted, adopted


def one_process(name, jobs):
    """What one process ends with, told what happened to the jobs; and who was counted."""
    counted, adopted = happened(jobs)
    with jax.numpy_dtype_promotion("standard"):
        one, everyone = engine(METHODS[name](), len(jobs)), np.ones(len(jobs), bool)
        state = one.init(oracle.make_params())
        one.sync_loop(state).carrier = Replayed(lambda step: adopted.get(step, everyone))
        state, _ = one.run(state, batches(STEPS, len(jobs)), counted.get)
        return (values(state), values(one.finish(state))), counted
