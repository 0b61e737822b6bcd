"""Regions in threads that are held where tests want them while the folder is away."""

import time

import jax
import oracle
from exchange.party import until
from jobs.test_same_numbers import METHODS
from jobs.together import batches, engine, rows, values

STEPS, AWAY = 60, 9


class Job:
    """A region that lets others decide when it goes on.

    Attributes:
      at: steps that were begun.
      holds: by step, what must be true before it is begun.
      seen: who was counted in what arrived, as it did.
    """

    def __init__(self, name, region, count, own):
        self.region, self.count, self.exchange = region, count, own
        self.at, self.holds, self.seen = 0, {}, []
        self.one = engine(METHODS[name](), count, own)

    def live(self):
        with jax.numpy_dtype_promotion("standard"):
            state = self.one.init(oracle.make_params())
            self.one.trips(state).arrivals.witness = self.seen.append
            state, _ = self.one.run(state, self.batches())
            before = values(state)
            return before, values(self.one.finish(state))

    def batches(self):
        for step, batch in enumerate(batches(STEPS, self.count)):
            self.at = step
            if step in self.holds:
                until(self.holds[step], 60.0)
            time.sleep(0.01)
            yield rows(batch, self.region)

    @property
    def away(self):
        return self.exchange._office.beats.outage is not None

    def settled(self):
        """Whether it waits before the step of the outage, with nothing under way."""
        return self.at == AWAY and all(map(self.exchange.ready, self.exchange._open))


def one_process(name, jobs):
    """What one process ends with, told who was counted in which send."""
    counted = {one.step: one.counted_N for job in jobs for one in job.seen if not one.last}
    with jax.numpy_dtype_promotion("standard"):
        one = engine(METHODS[name](), len(jobs))
        state, _ = one.run(one.init(oracle.make_params()), batches(STEPS, len(jobs)), counted.get)
        return (values(state), values(one.finish(state))), counted
