"""Trainers and growing batches where every region is a job: they end as on one mesh.

The mesh is held against NumPy by `tests/adloco/test_trainers_oracle.py`.
"""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from adloco.adaptive_cases import PERIOD, engine, stream
from regions.faults import vanish
from regions.party import KINDS, TIMING
from regions.together import Over

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.rules.batching import NormTest


def method(trainers=3, merge_every=1, cap=12, codec=None):
    policy = NormTest(start=1, cap=cap, microbatches=2)
    rule = lc.outer.nesterov(0.5, 0.6)
    return lc.methods.adloco(
        PERIOD, trainers, merge_every, outer=rule, codec=codec, inner_batching=policy
    )


def own_stream(region, regions):
    """One region's part of the streams."""

    def source(trainer, start, count):
        return jax.tree.map(
            lambda x: x[region : region + 1], stream(trainer, start, count, regions)
        )

    return source


def seen(state):
    """By trainer: what must be equal in all regions, and the regions' own values `[R, ...]`."""
    return {
        number: (
            [np.array(x) for x in jax.tree.leaves((t.state.anchor, t.state.outer))],
            (t.request, t.used, state.samples, t.policy),
            [np.array(x) for x in jax.tree.leaves(t.state.inner.params)],
        )
        for number, t in state.trainers.items()
    }


def train(one, source, runs, participants=None):
    """What `seen` gives after every run, and after `finish`."""
    with jax.numpy_dtype_promotion("standard"):
        state, found = one.init(oracle.make_params()), []
        for many in runs:
            state, _ = one.run(state, source, participants=participants, **many)
            found.append(seen(state))
        return [*found, seen(one.finish(state))]


def on_mesh(made, regions, runs, participants=None):
    return train(
        engine(made(), regions), lambda *given: stream(*given, regions), runs, participants
    )


def in_jobs(between, made, regions, runs, participants=None, kind=exchange.store, **settings):
    make = between(regions, kind=kind)

    def job(region):
        to_others = make(region)
        one = engine(made(), regions, exchange=to_others, **settings)
        found = train(one, own_stream(region, regions), runs, participants)
        to_others.close()
        return found

    with ThreadPoolExecutor(regions) as pool:
        return [f.result() for f in [pool.submit(job, r) for r in range(regions)]]


def assert_same(jobs, together):
    for region, job in enumerate(jobs):
        for at, (got, want) in enumerate(zip(job, together, strict=True)):
            assert got.keys() == want.keys(), at
            for number, (shared, numbers, own) in want.items():
                assert got[number][1] == numbers, (at, region, number)
                for x, y in zip(got[number][0], shared, strict=True):
                    np.testing.assert_array_equal(x, y)
                for x, y in zip(got[number][2], own, strict=True):
                    np.testing.assert_array_equal(x[0], y[region])


@pytest.mark.parametrize("regions", [2, 3])
def test_anchors_batches_and_merges_are_those_of_one_process(regions, between):
    runs = [{"rounds": 2}, {"steps": 2}, {"steps": 5}]
    together = on_mesh(method, regions, runs)
    kind = KINDS["peers" if regions == 3 else "store"]
    jobs = in_jobs(between, method, regions, runs, kind=kind)
    assert_same(jobs, together)
    assert len(together[-2]) < 3 and max(n[1][0] for n in together[-2].values()) > 1


def sitting_out(step):
    """Of three rounds: region 0 has no part in the second, region 1 in the third."""
    return [step != 2 * PERIOD, step != 3 * PERIOD]


def test_absent_regions_count_for_nothing(between):
    """Neither do their gradients: the batch follows from those that took part."""
    runs = [{"rounds": 4}]
    together = on_mesh(method, 2, runs, sitting_out)
    assert_same(in_jobs(between, method, 2, runs, sitting_out), together)
    everyone = on_mesh(method, 2, runs)
    assert [x[1] for x in together[0].values()] != [x[1] for x in everyone[0].values()]


def test_the_exchanges_of_all_trainers_are_waited_for_together(between, monkeypatch):
    """They land one by one; waited for one by one, their deadlines would add up."""
    asked, arrives = [], exchange.RemoteExchange.arrives

    def noted(self, names, answers=None):
        asked.append(sorted(names))
        return arrives(self, names, answers)

    monkeypatch.setattr(exchange.RemoteExchange, "arrives", noted)
    in_jobs(between, lambda: method(merge_every=9), 2, [{"steps": PERIOD}])
    rounds = [names for names in asked if len(names) > 1]
    assert rounds and {tuple(x.split(".")[0] for x in names) for names in rounds} == {
        ("0", "1", "2")
    }


def test_a_run_that_ends_inside_a_round(between):
    """What was measured at the start of the last round weighs the last merge, as on the mesh."""

    def made():
        return method(trainers=2, merge_every=None, cap=64)

    runs = [{"rounds": 1}, {"steps": 1}]
    together = on_mesh(made, 2, runs)
    assert_same(in_jobs(between, made, 2, runs), together)
    assert len(together[-1]) == 1


def test_payloads_that_are_coded(between):
    def made():
        return method(trainers=2, merge_every=2, codec="int8")

    runs = [{"rounds": 3}]
    assert_same(in_jobs(between, made, 2, runs), on_mesh(made, 2, runs))


class Region:
    """A job that trains until it is told to end, and waits before every round if it is told to.

    `pause(round)` may wait, and return False: then the round is not begun.
    """

    def __init__(self, region, regions, to_others, pause=lambda round_: None):
        self.one = engine(method(), regions, exchange=to_others)
        self.stream, self.pause = own_stream(region, regions), pause

    def source(self, trainer, start, count):
        return self.stream(trainer, start, count)

    def begin(self):
        with jax.numpy_dtype_promotion("standard"):
            return self.one.init(oracle.make_params())

    def train(self, state, rounds):
        """(state, events) after so many rounds of the run."""
        events = []
        with jax.numpy_dtype_promotion("standard"):
            while state.step < rounds * PERIOD:
                if self.pause(state.step // PERIOD) is False:
                    break
                state, history = self.one.run(state, self.source, rounds=1)
                events += history.events
        return state, events

    def finish(self, state):
        with jax.numpy_dtype_promotion("standard"):
            return self.one.finish(state)


def assert_alike(states):
    """What all regions have in common is the same, bit for bit."""
    first, *others = map(seen, states)
    for other in others:
        assert other.keys() == first.keys()
        for number, (shared, numbers, _) in first.items():
            assert other[number][1] == numbers
            for x, y in zip(other[number][0], shared, strict=True):
                np.testing.assert_array_equal(x, y)


def test_a_region_that_is_late_lands_what_it_missed_and_counts_again(between):
    """Its rounds went on without it: it does not repeat them at its own pace."""
    rounds, gone = 40, threading.Event()

    def slow(round_):
        if round_ == 3:
            gone.set()
            time.sleep(3.0)

    def unhurried(round_):
        time.sleep(0.1)

    make = between(2, dataclasses.replace(TIMING, deadline_s=0.8))
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
        jobs = [Region(0, 2, made[0], unhurried), Region(1, 2, made[1], slow)]

        def live(job):
            state, events = job.train(job.begin(), rounds)
            return job.finish(state), events

        (first, _), (late, events) = pool.map(live, jobs)
    assert_alike([first, late])
    steps = {event.step for event in events if event.kind == "send" and event.participants.all()}
    assert len(steps) < rounds - 1  # some it only landed
    assert max(steps) == rounds * PERIOD


def test_a_region_that_is_late_ends_where_it_was_told_to(brief):
    """The others are several rounds further."""
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(brief(2), range(2)))
        jobs = [Region(r, 2, x) for r, x in enumerate(made)]
        states = list(pool.map(lambda job: job.train(job.begin(), 1)[0], jobs))
        jobs[1].one.carrier.exchange.frontier = lambda done=False: 9 * PERIOD
        jobs[1].one.pass_steps = lambda state, source, goal: passed(state, goal)
        jobs[1].one.start_from_anchors = lambda state: state
        gone = []

        def passed(state, goal):
            gone.append(min(goal.left(state), PERIOD))
            counters = state.counters.copy()
            counters.step += gone[-1]
            state = state.with_trainer(
                0, state.first.replace(state=state.first.state.replace(counters=counters))
            )
            return state

        state, _ = jobs[1].one.run(states[1], jobs[1].source, steps=2 * PERIOD)
    assert state.step == 3 * PERIOD and gone == [PERIOD, PERIOD]


def test_a_lost_region_comes_back_with_the_others_trainers_and_batches(brief, monkeypatch):
    """No sooner than the last send of the job before it."""
    rounds, dies, entered = 60, 2, Over(more=8)
    catch_up, least = rejoin.catch_up_trainers, []

    def noted(*given):
        least.append(given[-1])
        return catch_up(*given)

    monkeypatch.setattr(rejoin, "catch_up_trainers", noted)

    def until_entered(round_):
        if round_ > dies:
            entered.wait(0.3)
        return entered.begins(round_ + 1)

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(brief(3), range(3)))
        jobs = [Region(r, 3, x, until_entered) for r, x in enumerate(made)]
        states = list(pool.map(lambda job: job.train(job.begin(), dies)[0], jobs))
        vanish(made[2])

        def survive(number):
            state, _ = jobs[number].train(states[number], rounds)
            return jobs[number].finish(state)

        def again():
            job = Region(2, 3, brief(3)(2), until_entered)
            state = rejoin.enter(job.one, job.begin(), job.source)
            at = state.step
            entered.set()
            state, events = job.train(state, rounds)
            return job.finish(state), at, events

        newcomer = pool.submit(again)
        ended = list(pool.map(survive, range(2)))
        last, at, events = newcomer.result()
    assert dies * PERIOD < at < rounds * PERIOD and least == [dies * PERIOD]
    assert any(event.kind == "send" and event.participants.all() for event in events)
    assert_alike([*ended, last])
    assert len(last.trainers) == 1


def test_a_restored_run_goes_on_in_the_middle_of_a_round(between, tmp_path):
    """The statistics that were measured at its start are in the checkpoint."""
    runs = [{"steps": PERIOD + 1}, {"steps": 2 * PERIOD}]
    whole, one_at_a_time = in_jobs(between, method, 2, runs), threading.Lock()

    def job(region):
        to_others = between(2)(region)
        one, source = engine(method(), 2, exchange=to_others), own_stream(region, 2)
        with jax.numpy_dtype_promotion("standard"):
            state, _ = one.run(one.init(oracle.make_params()), source, **runs[0])
            measured = [np.asarray(trainer.measured) for trainer in state.trainers.values()]
            with one_at_a_time, Checkpoints(tmp_path / f"own{region}") as kept:
                kept.save(state, extra={}, config={})
                kept.wait()
                state = kept.restore(one, oracle.make_params()).state
            found = [np.asarray(trainer.measured) for trainer in state.trainers.values()]
            np.testing.assert_array_equal(found, measured)
            assert np.shape(measured) == (2, 1, 4)
            one.reconnect(state)
            state, _ = one.run(state, source, **runs[1])
            found = seen(state), seen(one.finish(state))
        to_others.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(job, range(2)))
    for region in range(2):
        for got, want in zip(found[region], whole[region][1:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_a_wait_of_trainers_can_be_stopped_and_goes_on_where_it_was(
    away, killed, between, tmp_path
):
    """The state that is returned meanwhile can be saved, also while the store is away."""
    make = between(2)

    def begin(region):
        one, source = engine(method(), 2, exchange=make(region)), own_stream(region, 2)
        state, _ = one.run(one.init(oracle.make_params()), source, rounds=1)
        if region == 1:
            return one, state
        others, asked = one.carrier.exchange, iter([False] * 5)
        others.stop_when(lambda: next(asked, True))
        reachable = others.reachable
        others.reachable = lambda: not away and reachable()
        state, history = one.run(state, source, rounds=1)
        assert state.paused and state.step == 2 * PERIOD == PERIOD + len(history)
        assert {event.kind for event in history.events} == {"send"}
        state, history = one.run(state, source, rounds=1)  # it is still to stop
        assert state.paused and not len(history)
        others.stop_when(lambda: False)
        others.reachable = reachable
        return one, state

    def again(region, one, state):
        """As begun, in the job of another process."""
        with Checkpoints(tmp_path / str(region)) as kept:
            kept.save(state, extra={}, config={})
        vanish(one.carrier.exchange)
        one = engine(method(), 2, exchange=make(region))
        with Checkpoints(tmp_path / str(region)) as kept:
            state = kept.restore(one, oracle.make_params()).state
        one.reconnect(state)
        return one, state

    def go_on(region, one, state):
        found, rows = [], []
        for _ in range(2):
            state, history = one.run(state, own_stream(region, 2), rounds=1)
            found.append(seen(state))
            rows.append(list(history.rows()))
        if region == 0:
            assert not rows[0]
            owed = rows[1][0]
            landed = {event["trainer"] for event in owed["events"] if event["kind"] == "land"}
            assert landed == {0, 1} and owed["looks"].keys() == {"0", "1"}
        return [*found, seen(one.finish(state))]

    with ThreadPoolExecutor(2) as pool, jax.numpy_dtype_promotion("standard"):
        begun = list(pool.map(begin, range(2)))
        if killed:
            begun = list(pool.map(again, range(2), *zip(*begun)))
        found = list(pool.map(go_on, range(2), *zip(*begun)))
    assert_same(found, on_mesh(method, 2, [{"rounds": 2}, {"rounds": 1}]))
