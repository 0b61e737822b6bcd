"""Anchors that must be the same and are not stop the run, or one of them holds."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from regions.together import CUT, Over, batches, engine, rows, unhurried, values

import lowcomm_jax as lc
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.store import terms
from lowcomm_jax.store.errors import Parted

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


def everyone_parts(job, make, said):
    """Two jobs: both find out, and none comes back."""
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
        running = [pool.submit(job, r, made[r]) for r in range(2)]
        for one in running:
            with pytest.raises(Parted, match=said) as error:
                one.result()
            assert not error.value.heals


def test_without_a_rule_all_stop(between):
    data = batches(8, 2)

    def job(region, exchange):
        with jax.numpy_dtype_promotion("standard"):
            one, state = begin(region, 2, exchange, parted=1)
            one.run(state, [rows(b, region) for b in data[PARTS:]])

    everyone_parts(job, between(2), r"region 0: anchor \w{16}; region 1: ")


@pytest.mark.parametrize("heal, count, parted", [("majority", 3, 0), ("lowest", 2, 1)])
def test_who_parted_stops_and_takes_what_holds(brief, heal, count, parted):
    steps = 400
    data, entered = batches(steps, count), Over()

    def job(region, exchange):
        with jax.numpy_dtype_promotion("standard"):
            one, state = begin(region, count, exchange, parted)
            if region == parted:
                with pytest.raises(Parted) as error:
                    one.run(state, [rows(b, region) for b in data[PARTS:]])
                assert error.value.heals
                exchange.close(linger_s=0.0)
                one = engine(method(), count, brief(count, heal=heal)(region))
                state = one.init(oracle.make_params())
                state = rejoin.enter(one, state, rows(data[0], region))
                entered.set()
            state, _ = one.run(state, unhurried(data, region, entered, int(state.counters.step)))
            return values(one.finish(state))

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(brief(count, heal=heal), range(count)))
        ended = list(pool.map(lambda r: job(r, made[r]), range(count)))
    assert entered.is_set()
    for anchor, _ in ended[1:]:
        jax.tree.map(np.testing.assert_array_equal, anchor, ended[0][0])


def test_who_decides_on_another_fragment_is_found_out(brief):
    """At the very slot, though regions that sent different fragments have nothing in common."""
    data = batches(12, 2)

    def job(region, exchange):
        with jax.numpy_dtype_promotion("standard"):
            method = lc.methods.cocodc(6, 3, 0, syncs_per_period=6, pattern=CUT)
            one = engine(method, 2, exchange)
            state = one.init(oracle.make_params())
            state, _ = one.run(state, [rows(b, region) for b in data[:3]])
            # As if they had measured otherwise: the next slot goes to the largest.
            state = state.replace(rate=state.rate.at[region].set(1e9))
            one.run(state, [rows(b, region) for b in data[3:]])

    said = r"level 0, step 4: region 0: .*fragment 0; region 1: .*fragment 1"
    everyone_parts(job, brief(2), said)


def test_what_the_last_landing_leaves_is_compared_too(between):
    def job(region, exchange):
        with jax.numpy_dtype_promotion("standard"):
            one, state = begin(region, 2, exchange, parted=1)
            one.finish(state)

    everyone_parts(job, between(2), r"exchange 4.end, sends 1: region 0: anchor \w{16}; region 1: ")


@pytest.mark.parametrize(
    "heal, anchors, stopped, heals",
    [
        ("stop", [1, 1, 1], [], None),
        ("stop", [1, 1, 2], [0, 1, 2], False),
        ("stop", [None, 1, 1], [], None),
        ("stop", [None, 1, 2], [0, 1, 2], False),
        ("majority", [1, 2, 2], [0], True),
        ("majority", [1, 1, 2, 2, 2], [0, 1], True),
        ("majority", [1, 1, 2, 2], [0, 1, 2, 3], False),  # half are no majority
        ("majority", [1, 2, 3, 4], [0, 1, 2, 3], False),
        ("majority", [1, 2, None], [0, 1, 2], False),  # one against one
        ("lowest", [1, 2, 2], [1, 2], True),
        ("lowest", [None, 2, 3], [2], True),
    ],
)
def test_whose_terms_hold(heal, anchors, stopped, heals):
    """Where those of none do, all stop, and none takes what another one has."""
    known = {r: {"step": 8} | ({"anchor": x} if x else {}) for r, x in enumerate(anchors)}
    found = []
    for region, own in known.items():
        try:
            terms.check("8", known, region, own, heal)
        except Parted as error:
            assert error.heals == heals
            found.append(region)
    assert found == stopped
    assert terms.counting(known, heal) == set(known) - set(stopped if heals else [])
