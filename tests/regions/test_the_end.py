"""All regions end alike: also where one was left out at the last step, or has just come in."""

import dataclasses
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from regions.faults import vanish
from regions.party import TIMING, over_peers, until
from regions.test_same_numbers import METHODS, assert_same, expected
from regions.together import batches, engine, in_jobs, rows, values

import lowcomm_jax as lc
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.store.errors import Rejected
from lowcomm_jax.store.heartbeat import Heartbeat

R, STEPS = 3, 4  # one period: the last step is a boundary


def comes(name, count, own):
    """What a region ends with that enters when all steps are made, and how often it has sent."""
    one = engine(METHODS[name](), count, own)
    with jax.numpy_dtype_promotion("standard"):
        batch = rows(batches(STEPS, count)[0], own.region)
        state = rejoin.enter(one, one.init(oracle.make_params()), batch)
        assert state.counters.step == STEPS
        state = one.finish(state)
    return values(state), state.counters.sends.tolist()


def test_what_was_left_out_at_the_last_step_is_sent_once_more(between):
    def sits_out(step):
        return [True, step != STEPS, True]

    together = expected(METHODS["diloco"](), R, STEPS, sits_out)
    assert_same(in_jobs(between(R), METHODS["diloco"](), R, STEPS, sits_out), together, False)


@pytest.mark.parametrize("sits", [True, False])
def test_who_comes_in_at_the_last_step_ends_with_the_others(sits, brief):
    """It makes as many exchanges as they do, and has the same anchor."""
    data = batches(STEPS, R)
    with ThreadPoolExecutor(R) as pool:
        made = list(pool.map(brief(R), range(R)))
    vanish(made[2])

    def stays(region):
        one = engine(METHODS["diloco"](), R, made[region])
        answer = one.carrier.answer
        # On a busy machine it would be given a state after an earlier step.
        one.carrier.answer = lambda state: state.counters.step == STEPS and answer(state)
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            until(lambda: 2 in made[region].state_transfer.asking(), 60.0)
            who = (lambda step: [True, region == 0, True]) if sits else None
            state, _ = one.run(state, [rows(b, region) for b in data], who)
            state = one.finish(state)
            rejoin.serve(one, state)
            return values(state), state.counters.sends.tolist()

    with ThreadPoolExecutor(R) as pool:
        running = [pool.submit(stays, 0), pool.submit(stays, 1)]
        running.append(pool.submit(lambda: comes("diloco", R, brief(R)(2))))
        ends = [one.result() for one in running]
    assert [sends for _, sends in ends] == [ends[0][1]] * R
    for (anchor, _), _ in ends[1:]:
        jax.tree.map(np.testing.assert_array_equal, anchor, ends[0][0][0])


@pytest.mark.parametrize("name", ["diloco", pytest.param("streaming", marks=pytest.mark.slow)])
def test_who_comes_after_the_end_takes_the_result(name, brief):
    """The others have sent once more without it: those sends are no difference of anchors."""
    data = batches(STEPS, 2)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(brief(2), range(2)))
    vanish(made[1])
    over = threading.Event()

    def stays():
        one = engine(METHODS[name](), 2, made[0])
        with jax.numpy_dtype_promotion("standard"):
            state, _ = one.run(one.init(oracle.make_params()), [rows(b, 0) for b in data])
            state = one.finish(state)
            over.set()
            until(lambda: 1 in made[0].state_transfer.asking(), 60.0)
            rejoin.serve(one, state)
            return values(state), state.counters.sends.tolist()

    def comes_late():
        assert over.wait(60.0)
        return comes(name, 2, brief(2)(1))

    with ThreadPoolExecutor(2) as pool:
        ends = [end.result(100) for end in [pool.submit(stays), pool.submit(comes_late)]]
    assert ends[1][1] == ends[0][1]
    jax.tree.map(np.testing.assert_array_equal, ends[1][0], ends[0][0])


@pytest.mark.parametrize("comes_back", [True, False])
def test_who_comes_when_all_are_gone_takes_the_result_that_they_left(comes_back, brief, tmp_path):
    """It begins nothing alone. Where all have ended together, nothing is left."""
    data = batches(STEPS, 2)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(brief(2), range(2)))
    if comes_back:
        vanish(made[1])

    def trains(region):
        one = engine(METHODS["diloco"](), 2, made[region])
        with jax.numpy_dtype_promotion("standard"):
            state, _ = one.run(one.init(oracle.make_params()), [rows(b, region) for b in data])
            state = one.finish(state)
        rejoin.serve(one, state)
        made[region].close()
        return values(state), state.counters.sends.tolist()

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(trains, [0] if comes_back else [0, 1]))
    assert (tmp_path / "run" / "result").exists() == comes_back
    if not comes_back:
        return
    back = brief(2)(1)
    assert back.epoch == 1 and not back.awaited
    found, sends = comes("diloco", 2, back)
    assert sends == ends[0][1]
    jax.tree.map(np.testing.assert_array_equal, found, ends[0][0])


def test_who_has_not_come_in_yet_when_the_others_end_misses_the_end(brief):
    """It lives, but meets the others still, or compiles: nobody will be left to give it a state."""
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(brief(3), range(3)))
    assert not any(one.misses(STEPS) for one in made)
    vanish(made[2])
    until(lambda: made[0].steps().keys() == made[1].steps().keys() == {0, 1}, 20.0)
    back = made[2]._context
    again = Heartbeat(back.store, back.slots, 2, 3, back.timing)
    again.start(back.heartbeat.check, above=1)
    try:
        for changes in ({"epoch": 0}, {"epoch": 1}, {"epoch": 1, "wants": True}):
            again.update(**changes)
            until(lambda e=changes["epoch"]: made[0]._context.heartbeat.latest()[2].epoch == e)
            until(lambda: 2 in made[0].steps().keys() & made[1].steps().keys())
            assert made[0].misses(STEPS) and not made[1].misses(STEPS)
        again.update(wants=False, awaited=True)  # it has come in
        until(lambda: not made[0].misses(STEPS))
    finally:
        again.stop(leaving=False)


def test_who_lacks_payloads_that_go_with_a_job_is_waited_for_and_misses_the_end(between):
    """It lived when the others ended, but is cut off before it has got the last payloads."""
    timing = dataclasses.replace(TIMING, deadline_s=0.5)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(between(2, timing, kind=over_peers), range(2)))
    needed = functools.partial(made[0].is_needed, time.monotonic() + 60.0)
    assert not made[0].misses(0)

    def goes_on_alone(key):
        made[0].start(key, {"x": np.ones((1, 2), np.float32)})
        made[0].finish(key)

    goes_on_alone("1")
    assert made[0].misses(0)  # where it stays for nobody, as after a signal
    assert needed() and not made[0].misses(0)
    assert not made[0].is_needed(time.monotonic()) and made[0].misses(0)  # it stays no longer
    began = time.monotonic()
    made[0]._linger(30.0, lambda: False)
    assert time.monotonic() - began < 10.0
    made[1].start("1", {"x": np.ones((1, 2), np.float32)})
    made[1].finish("1")
    until(lambda: not made[0].misses(0))
    goes_on_alone("2")
    assert needed()
    made[1]._context.heartbeat.update(paused=True)
    until(lambda: not needed())  # it fetches nothing more, and comes back
    assert made[0].misses(0)
    made[1]._context.heartbeat.update(paused=False)
    until(needed)
    vanish(made[1])
    until(lambda: not needed())  # nobody lives who could get them
    assert made[0].misses(0)


def test_a_result_that_is_damaged_is_named(brief, tmp_path):
    first = brief(1)(0)
    first.leave_result((4, {"w": np.arange(3.0)}, {}))
    (piece,) = (tmp_path / "run" / "blob").glob("result.1.*")
    piece.write_bytes(bytes(24))
    first._context.heartbeat.update(awaited=False)
    with pytest.raises(Rejected, match="a piece of array w of a state was damaged"):
        first.result()
    piece.unlink()
    with pytest.raises(Rejected, match="a piece of its result is gone: no blob "):
        first.result()


def test_groups_do_not_wait_for_one_another_at_the_end(brief):
    """Whether a region of another group was left out they do not know."""
    count, data = 4, batches(STEPS, 4)
    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(brief(count), range(count)))
    vanish(made[3])
    until(lambda: all(x.steps().keys() == {0, 1, 2} for x in made[:3]), 20.0)

    def job(region):
        one = engine(METHODS["noloco"](), count, made[region])
        with jax.numpy_dtype_promotion("standard"):
            state, _ = one.run(one.init(oracle.make_params()), [rows(b, region) for b in data])
            return one.finish(state).counters.sends.tolist()

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(job, range(3))) == [[1]] * 3


def test_on_a_mesh_nothing_is_sent_where_all_have_landed():
    one = engine(lc.methods.async_local_sgd(4, [1.0, 1.0], dynamic=False), 2)
    with jax.numpy_dtype_promotion("standard"):
        state, _ = one.run(one.init(oracle.make_params()), batches(STEPS, 2))
        sends = state.counters.sends.tolist()
        assert one.finish(state).counters.sends.tolist() == sends


def test_offloaded_anchors_are_compared_too(between):
    together = expected(METHODS["diloco"](), 2, 6)
    assert_same(in_jobs(between(2), METHODS["diloco"](), 2, 6, offload=True), together, False)
