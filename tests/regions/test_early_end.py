"""A region whose program ends its loop early: all of them say so, and none waits for ever."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import oracle
import pytest
from regions.party import TIMING as BRIEF
from regions.test_same_numbers import METHODS
from regions.together import batches, engine, in_jobs, rows

PERIOD, STEPS = 4, 16
TIMING = dataclasses.replace(BRIEF, deadline_s=2.0)


def ends(make_exchange, lengths, caplog):
    """Warnings of the regions by thread, whose programs have so many batches."""
    data = batches(max(lengths), len(lengths))

    def job(region):
        exchange = make_exchange(region)
        try:
            one = engine(METHODS["diloco"](), len(lengths), exchange)
            with jax.numpy_dtype_promotion("standard"):
                own = [rows(batch, region) for batch in data[: lengths[region]]]
                state, _ = one.run(one.init(oracle.make_params()), own)
                one.finish(state)
        finally:
            exchange.close()

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(len(lengths)) as pool:
        for running in [pool.submit(job, r) for r in range(len(lengths))]:
            running.result()
    return [record.getMessage() for record in caplog.records]


def test_both_regions_say_that_one_ends_early(between, caplog):
    said = ends(between(2, TIMING), (STEPS, STEPS // 2), caplog)
    first = STEPS // 2 + PERIOD
    without = f"the exchange after step {first} goes on without region 1, which has ended, died or"
    assert sum(line.startswith(without) for line in said) == 1  # the first one, not each
    short = f"this region ends after {STEPS // 2} steps, others do not (region 0 trains on"
    assert sum(line.startswith(short) for line in said) == 1
    long = f"this region ends after {STEPS} steps, others do not (region 1 has left)"
    assert sum(line.startswith(long) for line in said) == 1
    assert all("give all regions as many batches" in x for x in said if "others do not" in x)


@pytest.mark.parametrize("sits", [False, True])
def test_regions_that_end_together_say_nothing(brief, caplog, sits):
    """Also where one has no part in an exchange by its own wish."""
    who = (lambda step: [True, step != PERIOD]) if sits else None
    with caplog.at_level(logging.WARNING):
        in_jobs(brief(2), METHODS["diloco"](), 2, 2 * PERIOD, who)
    assert not [record.getMessage() for record in caplog.records]
