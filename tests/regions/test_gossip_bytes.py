"""What partners are said to have sent one another is what crossed between their jobs, and when."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
from regions.party import idle, until
from regions.together import batches, engine, rows

import lowcomm_jax as lc
from lowcomm_jax.store.wire import parse

PERIOD, ROUNDS = 4, 3


def moved(made):
    """Bytes of arrays in the files that get here, file by file, by kind."""
    get, found = made._context.transport.get, {"payload": [], "anchor": []}

    def spied(*args):
        data = get(*args)
        _, arrays = parse(data)
        for kind, sizes in found.items():
            own = [x.nbytes for name, x in arrays.items() if name.startswith(f"{kind}/")]
            sizes += [sum(own)] if own else []
        return data

    made._context.transport.get = spied
    return found


def test_anchors_are_booked_and_travel_ahead_of_the_payloads(between):
    """At a boundary pseudo-gradients alone travel; before the first one nobody has landed."""
    regions = 2
    values = sum(x.size for x in oracle.make_params().values())
    size, got = 4 * values, {}

    def job(region):
        made = between(regions)(region)
        got[region] = found = moved(made)
        one = engine(lc.methods.noloco(PERIOD, seed=3), regions, made)
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            for number in range(ROUNDS):
                data = batches(PERIOD * ROUNDS, regions)[number * PERIOD : (number + 1) * PERIOD]
                data = [rows(batch, region) for batch in data]
                state, history = one.run(state, data[:-1])
                if number:  # it is here before the boundary
                    until(lambda n=number: len(found["anchor"]) == n + 1, 60.0)
                    assert len(found["payload"]) == number
                state, more = one.run(state, data[-1:])
                send, land = [*history.events, *more.events]
                ahead = 0 if number else size
                assert (send.nbytes, land.ahead) == (size + ahead, size)
                assert send.bytes_sent.tolist() == send.bytes_received.tolist() == [size + ahead]
                assert land.bytes_sent.tolist() == land.bytes_received.tolist() == [size]
                assert land.groups == [(0, 1)]
            until(lambda: len(found["anchor"]) == ROUNDS + 1, 60.0)
            booked = state.counters.copy()
            one.finish(state)
        assert not made._early, "no round follows"
        return booked

    with ThreadPoolExecutor(regions) as pool:
        booked = list(pool.map(job, range(regions)))
    files = {"payload": [size] * ROUNDS, "anchor": [size] * (ROUNDS + 1)}
    for region, counters in enumerate(booked):
        assert got[region] == files
        total = [(2 * ROUNDS + 1) * size]
        assert counters.bytes_sent.tolist() == counters.bytes_received.tolist() == total


def test_the_last_synchronisation_sends_no_anchor_ahead(between):
    """One that a landing has sent before it goes with it."""
    regions = 2
    size = 4 * sum(x.size for x in oracle.make_params().values())

    def job(region):
        made = between(regions)(region)
        found = moved(made)
        one = engine(lc.methods.noloco(PERIOD, seed=3), regions, made)
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            data = [rows(batch, region) for batch in batches(PERIOD + 1, regions)]
            state, _ = one.run(state, data)
            state = one.finish(state)
        until(lambda: idle(made), 20.0)
        return found, state.counters

    with ThreadPoolExecutor(regions) as pool:
        for found, counters in pool.map(job, range(regions)):
            assert found == {"payload": [size] * 2, "anchor": [size] * 2}
            np.testing.assert_array_equal(counters.bytes_received, [4 * size])
