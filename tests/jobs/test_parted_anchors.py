"""Anchors that must be the same and are not stop the run, or one of them holds."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from jobs.together import batches, engine, rows, values

import lowcomm_jax as lc
from lowcomm_jax.jobs import AnchorsDifferError, rejoin
from lowcomm_jax.jobs.digest import compare

PARTS = 4  # the step after which one region's anchor is another


def method():
    return lc.methods.diloco(4, lc.outer.nesterov(0.6, 0.85))


def begin(region, count, exchange, parted):
    """An engine, and its state when the anchor of the `parted` region has just been changed."""
    one = engine(method(), count, exchange)
    data = batches(PARTS, count)
    state, _ = one.run(one.init(oracle.make_params()), [rows(b, region) for b in data])
    if region == parted:
        state = state.replace(anchor={k: x.at[0].add(1e-3) for k, x in state.anchor.items()})
    return one, state


def test_without_a_rule_all_stop(between):
    data = batches(8, 2)

    def job(region, exchange):
        with jax.numpy_dtype_promotion("standard"):
            one, state = begin(region, 2, exchange, parted=1)
            one.run(state, [rows(b, region) for b in data[PARTS:]])

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(between(2), range(2)))
        running = [pool.submit(job, r, made[r]) for r in range(2)]
        for one in running:
            with pytest.raises(AnchorsDifferError, match=r"region 0: \w{16}, region 1: ") as error:
                one.result()
            assert not error.value.heals


@pytest.mark.parametrize("heal, count, parted", [("majority", 3, 0), ("lowest", 2, 1)])
def test_who_parted_stops_and_takes_what_holds(brief, heal, count, parted):
    steps = 400
    data, entered = batches(steps, count), threading.Event()

    def unhurried(region, at):
        for batch in data[at:]:
            entered.wait(0.1)
            yield rows(batch, region)

    def job(region, exchange):
        with jax.numpy_dtype_promotion("standard"):
            one, state = begin(region, count, exchange, parted)
            if region == parted:
                with pytest.raises(AnchorsDifferError) as error:
                    one.run(state, [rows(b, region) for b in data[PARTS:]])
                assert error.value.heals
                exchange.close(linger_s=0.0)
                one = engine(method(), count, brief(count, heal=heal)(region))
                state = one.init(oracle.make_params())
                state = rejoin.enter(one, state, rows(data[0], region))
                entered.set()
            state, _ = one.run(state, unhurried(region, int(state.clock.step)))
            return values(one.finish(state))

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(brief(count, heal=heal), range(count)))
        ended = list(pool.map(lambda r: job(r, made[r]), range(count)))
    assert entered.is_set()
    for anchor, _ in ended[1:]:
        jax.tree.map(np.testing.assert_array_equal, anchor, ended[0][0])


@pytest.mark.parametrize(
    "heal, digests, counted, stopped, heals",
    [
        ("stop", [1, 1, 2], [1, 1, 1], [0, 1, 2], False),
        ("majority", [1, 2, 2], [1, 1, 1], [0], True),
        ("majority", [1, 2, 2], [1, 1, 0], [0, 1, 2], False),  # one against one
        ("lowest", [1, 2, 2], [1, 1, 1], [1, 2], True),
        ("lowest", [1, 2, 3], [0, 1, 1], [0, 2], True),  # who was not counted does not know
        ("stop", [1, 1, 2], [1, 1, 0], [], None),
    ],
)
def test_which_anchor_holds(heal, digests, counted, stopped, heals):
    table = np.array([[d, d] for d in digests], np.uint32)
    found = []
    for region in range(3):
        try:
            compare("0@4", table, np.array(counted, bool), region, heal)
        except AnchorsDifferError as error:
            assert error.heals == heals
            found.append(region)
    assert found == stopped
