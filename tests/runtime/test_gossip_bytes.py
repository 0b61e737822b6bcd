"""What partners are said to have sent one another is what crossed between their jobs, and when."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
from runtime.party import until
from runtime.together import batches, engine, rows

import lowcomm_jax as lc
from lowcomm_jax.runtime.wire import _parse

PERIOD, ROUNDS = 4, 3


def moved(made):
    """Bytes of arrays that get here, by kind and the name they were packed under."""
    get, found = made._context.transport.get, {}

    def spied(*args):
        data = get(*args)
        about, arrays = _parse(data)
        for name, x in arrays.items():
            key = about["key"], name.partition("/")[0]
            found[key] = found.get(key, 0) + len(x)
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
                key = f"1/0.{number}.anchor", "anchor"
                if number:  # it is here before the boundary
                    until(lambda key=key: key in found, 60.0)
                    assert (f"1/{number + 1}", "payload") not in found
                state, more = one.run(state, data[-1:])
                send, land = [*history.events, *more.events]
                ahead = 0 if number else size
                assert (send.nbytes, land.ahead) == (size + ahead, size)
                assert send.bytes_sent.tolist() == send.bytes_received.tolist() == [size + ahead]
                assert land.bytes_sent.tolist() == land.bytes_received.tolist() == [size]
                assert land.groups == [(0, 1)]
            until(lambda: (f"1/0.{ROUNDS}.anchor", "anchor") in found, 60.0)
            booked = state.counters.copy()
            one.finish(state)
        assert not made._early, "no round follows"
        return booked

    with ThreadPoolExecutor(regions) as pool:
        booked = list(pool.map(job, range(regions)))
    sent = {(f"1/{n + 1}", "payload"): size for n in range(ROUNDS)}
    early = {(f"1/0.{n}.anchor", "anchor"): size for n in range(ROUNDS + 1)}
    for region, counters in enumerate(booked):
        assert {k: x for k, x in got[region].items() if k[1] != "weight"} == sent | early
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
        until(lambda: not any(x.running for x in made._running), 20.0)
        return found, state.counters

    with ThreadPoolExecutor(regions) as pool:
        for found, counters in pool.map(job, range(regions)):
            assert sorted(k for k in found if k[1] != "weight") == [
                ("1/0.0.anchor", "anchor"),
                ("1/0.1.anchor", "anchor"),
                ("1/1", "payload"),
                ("1/2", "payload"),
            ]
            np.testing.assert_array_equal(counters.bytes_received, [4 * size])
