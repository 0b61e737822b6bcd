"""What partners are said to have sent one another is what crossed between their jobs."""

from concurrent.futures import ThreadPoolExecutor

import jax
import oracle
from runtime.together import batches, engine, rows

import lowcomm_jax as lc
from lowcomm_jax.runtime.wire import _parse


def test_anchors_are_booked_with_the_payloads_they_travel_with(between):
    regions, period, rounds, moved = 2, 4, 3, {}

    def job(region):
        made = between(regions)(region)
        get, moved[region] = made._context.transport.get, []

        def spied(*args):
            data = get(*args)
            moved[region] += [len(x) for name, x in _parse(data)[1].items() if name != "weight"]
            return data

        made._context.transport.get = spied
        one = engine(lc.methods.noloco(period, seed=3), regions, made)
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            data = [rows(batch, region) for batch in batches(period * rounds, regions)]
            state, history = one.run(state, data)
        return state.counters, history.events

    with ThreadPoolExecutor(regions) as pool:
        jobs = list(pool.map(job, range(regions)))
    values = sum(x.size for x in oracle.make_params().values())
    both = 2 * 4 * values  # pseudo-gradients and anchors
    for region, (clock, events) in enumerate(jobs):
        assert clock.bytes_sent.tolist() == clock.bytes_received.tolist() == [rounds * both]
        assert sum(moved[region]) == rounds * both
        assert [(e.nbytes, e.ahead) for e in events] == [(both, 0), (0, 0)] * rounds
