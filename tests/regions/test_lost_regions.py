"""A region that sits out, dies, or comes back, costs the others nothing but its share."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from regions.faults import vanish
from regions.test_same_numbers import METHODS, assert_same, expected, own_anchors
from regions.together import Over, batches, engine, in_jobs, rows, unhurried, values

from lowcomm_jax.recovery import rejoin
from lowcomm_jax.store.errors import Parted

R = 3


def sitting_out(step):
    """Everyone, but region 1 in the second period, and 0 and 2 in the third."""
    return [step not in range(9, 13), step not in range(5, 9), step not in range(9, 13)]


@pytest.mark.parametrize("name", ["sparseloco", "as coded", "diloco", "noloco"])
def test_absent_regions_are_as_absent_as_on_the_mesh(name, between):
    together = expected(METHODS[name](), R, 14, sitting_out)
    jobs = in_jobs(between(R), METHODS[name](), R, 14, sitting_out)
    assert_same(jobs, together, own_anchors(name))


@pytest.mark.parametrize("name", ["diloco", "noloco", "as coded"])
def test_survivors_go_on_and_the_lost_region_comes_back(name, brief):
    """Until it is back the anchors are those of a run in which it sits out from its death on."""
    steps, dies, back = 400, 9, 24
    data, entered = batches(steps, R), Over()
    whole = engine(METHODS[name](), R)
    state, _ = whole.run(whole.init(oracle.make_params()), data[:back], lambda t: [1, 1, t < dies])
    anchor = jax.tree.map(np.array, state.anchor)

    def job(region, start, stop, state, exchange):
        one = engine(METHODS[name](), R, exchange)
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params()) if state is None else state
            state, _ = one.run(state, [rows(batch, region) for batch in data[start:stop]])
        return one, state

    with ThreadPoolExecutor(R) as pool:
        made = list(pool.map(brief(R), range(R)))

        def first(region):
            return job(region, 0, dies if region == 2 else back, None, made[region])

        def lost(region):
            one, state = first(region)
            vanish(made[region])
            return one, state

        jobs = list(pool.map(lambda r: (lost if r == 2 else first)(r), range(R)))
        for region, (_, state) in enumerate(jobs[:2]):
            row = region if own_anchors(name) else 0
            for leaf, value in state.anchor.items():
                np.testing.assert_array_equal(value[0], anchor[leaf][row], leaf)

        def survivor(region):
            one, state = jobs[region]
            with jax.numpy_dtype_promotion("standard"):
                state, _ = one.run(state, unhurried(data, region, entered, back, wait_s=0.2))
                return values(one.finish(state))

        def again():
            one, told = engine(METHODS[name](), R, brief(R)(2)), []
            with jax.numpy_dtype_promotion("standard"):
                fresh = one.init(oracle.make_params())
                state = rejoin.enter(one, fresh, rows(data[0], 2), told.append)
                *before, given = told
                assert before == ["programs are compiled or loaded", "programs are ready"]
                assert re.fullmatch(r"a state of step \d+ is here", given)
                at = int(state.counters.step)
                entered.set()
                state, history = one.run(state, unhurried(data, 2, entered, at))
                return at, values(one.finish(state)), history.events

        newcomer = pool.submit(again)
        survivors = list(pool.map(survivor, range(2)))
        at, ended, events = newcomer.result()
    assert back <= at < steps
    assert any(event.kind == "send" for event in events)
    for anchors, _ in () if own_anchors(name) else survivors:
        jax.tree.map(np.testing.assert_array_equal, anchors, ended[0])


def test_a_state_that_is_not_what_the_others_have_is_not_begun_from(brief):
    """It was whole when it was given, and signed: only the others' digests tell."""
    data, over = batches(400, R), Over()

    def trains(region, exchange):
        if region == 0:
            give = exchange.give_state

            def damaged(step, arrays, document):
                wrong = {k: x + np.float32(1e-3) for k, x in arrays.items() if "anchor/" in k}
                give(step, {**arrays, **wrong}, document)

            exchange.give_state = damaged

        one = engine(METHODS["diloco"](), R, exchange)
        with jax.numpy_dtype_promotion("standard"):
            one.run(one.init(oracle.make_params()), unhurried(data, region, over, since=12))

    with ThreadPoolExecutor(R) as pool:
        made = list(pool.map(brief(R, heal="majority"), range(R)))
        running = [pool.submit(trains, region, made[region]) for region in range(2)]
        vanish(made[2])
        one = engine(METHODS["diloco"](), R, brief(R, heal="majority")(2))
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            with pytest.raises(Parted, match="at a state of step") as error:
                rejoin.enter(one, state, rows(data[0], 2))
        assert error.value.heals
        over.set()
        for job in running:
            job.result()


def test_who_comes_in_has_told_its_step(brief):
    """Also if nothing has landed since the state it was given: or nobody would wait for it."""
    data, over, told = batches(400, 2), Over(), []

    def trains(exchange):
        one = engine(METHODS["diloco"](), 2, exchange)
        with jax.numpy_dtype_promotion("standard"):
            one.run(one.init(oracle.make_params()), unhurried(data, 0, over, since=12))

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(brief(2), range(2)))
        running = pool.submit(trains, made[0])
        vanish(made[1])
        again = brief(2)(1)
        one, come_in = engine(METHODS["diloco"](), 2, again), again.come_in
        frontier = again.frontier
        again.frontier = lambda done=False: frontier(done) if told else 0

        def spied():
            told.append(again._context.heartbeat.own.step)
            come_in()

        again.come_in = spied
        with jax.numpy_dtype_promotion("standard"):
            state = rejoin.enter(one, one.init(oracle.make_params()), rows(data[0], 1))
        over.set()
        again.close(linger_s=0.0)
        running.result()
    assert 0 < told[0] <= int(state.counters.step)


def test_a_restored_state_must_be_reconnected(between):
    one = engine(METHODS["diloco"](), 1, between(1)(0))
    with pytest.raises(ValueError, match=r"call engine.reconnect\(state\)"):
        one.carrier.collect(None, None, "0", False, True)
