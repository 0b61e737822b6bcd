"""Asynchronous methods between jobs: real arrivals, one record each; against NumPy and the mesh."""

import jax
import numpy as np
import oracle
import pytest
from engine.test_oracle import close
from oracle import merging
from oracle.outer import DelayedNesterovServer, HeLoCoServer
from regions.learners import (
    TIMING,
    ByHand,
    Learner,
    assert_equal,
    finish,
    look,
    records,
    run,
    table,
)
from regions.together import engine

import lowcomm_jax as lc
from lowcomm_jax.jobs.given_state import start_from_peer
from lowcomm_jax.state.train_state import rounds_landed

ARRIVALS = 11
SPEEDS = (1.0, 0.62, 0.8)
SGD = oracle.Momentum(0.05, 0.8)


def nesterov(speeds=SPEEDS, period=4, **more):
    return lc.methods.async_local_sgd(period, speeds, 0.7, 0.9, buffer=2, c=0.3, **more)


def heloco(speeds=SPEEDS, period=4, **more):
    return lc.methods.heloco(period, speeds, 0.7, 0.9, weight=0.5, **more)


def server_of(name):
    params = oracle.make_params()
    if name == "nesterov":
        return DelayedNesterovServer(params, lr=0.7, momentum=0.9, buffer=2, c=0.3)
    return HeLoCoServer(params, lr=0.7, momentum=0.9, rho=0.5, align=merging.align())


METHODS = {"nesterov": nesterov, "heloco": heloco}


def arrivals(jobs, rounds):
    """(region, own steps) of every arrival, as the records and the regions' logs say."""
    who = {k: owner for k, (owner,) in records(jobs[0], rounds).items()}
    steps = {k: at for one in jobs for at, kind, k in one.log if kind == "report"}
    return [(who[k], steps[k]) for k in range(rounds)]


def assert_replayed(jobs, name, rounds=ARRIVALS):
    """End the run, and compare all with the arrivals of its records, applied by hand."""
    told, steps = arrivals(jobs, rounds), [one.step_number for one in jobs]
    values = [one.values() for one in jobs]
    finish(jobs)
    given = (server_of(name), oracle.make_params(), jobs[0].data, told, steps, SGD)
    before, locals_, after = oracle.run_arrivals(*given)
    for one, own, mine in zip(jobs, values, locals_, strict=True):
        for key in after:
            close(one.before[key], before[key], f"{one.region} {key} before the end")
            close(own[key], mine[key], f"values of {one.region} {key}")
            close(one.anchor()[key], after[key], f"{one.region} {key}")
            np.testing.assert_array_equal(one.values()[key], one.anchor()[key], key)
    assert_equal(jobs)
    return told


@pytest.mark.parametrize("name", METHODS)
def test_every_arrival_moves_the_anchor_of_all_in_the_order_of_the_records(name, learners):
    jobs = learners(METHODS[name]())
    run(jobs, ARRIVALS, SPEEDS)
    told = assert_replayed(jobs, name)
    assert {region for region, _ in told} == {0, 1, 2}
    for one in jobs:
        assert [k for _, kind, k in one.log if kind == "land"][:ARRIVALS] == list(range(ARRIVALS))
    # The declared speeds say after how many steps a region arrives, and nothing else.
    for region, n in enumerate(jobs[0].loop.schedule.local_steps()):
        own = [at for who, at in told if who == region]
        assert own == [n * (i + 1) for i in range(len(own))]


CODEC = {"name": "int4", "error_feedback": 0.9}
ON_ONE_MESH = {
    "nesterov": nesterov,
    "heloco": heloco,
    "int4": lambda *given, **more: nesterov(*given, codec=CODEC, **more),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_ONE_MESH)
def test_arrivals_at_the_declared_speeds_are_those_of_the_mesh_bit_for_bit(name, learners):
    """Speeds whose arrivals never fall on one tick: 4, 8, ... and 5, 10, ... up to tick 19."""
    speeds, ticks = (1.0, 0.8), 19
    made = ON_ONE_MESH[name](speeds, dynamic=False)
    jobs = learners(made, 2)
    run(jobs, 100, speeds, last=ticks)
    assert [who for who, _ in arrivals(jobs, 7)] == [0, 1, 0, 1, 0, 1, 0]
    with jax.numpy_dtype_promotion("standard"):
        one = engine(made, 2)
        state = one.init(oracle.make_params())
        own, data = [0, 0], []
        for t in range(1, ticks + 1):  # a region's batches are numbered by its own steps
            own = [n + int(a) for n, a in zip(own, made.schedule.pace.active(t, 2))]
            each = [oracle.step_batch(jobs[0].data, max(n, 1)) for n in own]
            data.append(jax.tree.map(lambda *x: np.stack([y[r] for r, y in enumerate(x)]), *each))
        state, _ = one.run(state, data)
    for job in jobs:
        for key, value in job.anchor().items():
            np.testing.assert_array_equal(value, state.anchor[key][0], key)
            mine = state.inner.params[key][job.region]
            np.testing.assert_array_equal(job.values()[key], mine, key)
            given = state.received[key][job.region]
            np.testing.assert_array_equal(job.state.received[key][0], given, key)


def steps_while(one, monkeypatch, act, rounds=ARRIVALS):
    """`one` makes a step; its first wait for its arrival's number begins with `act(its rounds)`."""
    waited, wait = [], ByHand.wait

    def once(self):
        if self is one.loop.carrier.rounds and not waited:
            waited.append(1)
            act(self)
        else:
            wait(self)

    monkeypatch.setattr(ByHand, "wait", once)
    one.step(rounds)
    assert waited


def meets(one, other, monkeypatch, rounds):
    """While `one` waits for the number of its arrival, `other` makes a step."""

    def act(waiting):
        waiting._publish()
        other.step(rounds)

    steps_while(one, monkeypatch, act, rounds)


def two_before_their_second_arrival(learners, **more):
    made = nesterov((1.0, 1.0), **more)
    jobs = learners(made, 2)
    run(jobs, ARRIVALS, (1.0, 1.0), last=7)
    assert [one.loop.carrier.landed for one in jobs] == [2, 2]
    return jobs


def test_who_comes_second_keeps_its_steps_and_goes_to_the_next_round(learners, monkeypatch):
    one, other = jobs = two_before_their_second_arrival(learners)
    meets(one, other, monkeypatch, ARRIVALS)
    look(jobs)
    assert records(one, 4) == {0: (0,), 1: (1,), 2: (1,), 3: (0,)}
    assert one.log[-3:] == [(8, "report", 3), (8, "land", 2), (8, "land", 3)]
    run(jobs, 7, (1.0, 1.0), first=9)
    assert_replayed(jobs, "nesterov", 7)


@pytest.mark.parametrize("codec", [None, CODEC])
def test_an_arrival_after_the_last_round_is_taken_back_and_travels_at_the_end(
    codec, learners, monkeypatch
):
    one, other = jobs = two_before_their_second_arrival(learners, codec=codec)
    residual = [np.array(x) for x in jax.tree.leaves(one.state.codec)]
    meets(one, other, monkeypatch, 3)
    assert one.loop.carrier.landed == 3 and one.log[-2:] == [(8, "report", -1), (8, "land", 2)]
    assert not one.state.in_flight
    for was, now in zip(residual, jax.tree.leaves(one.state.codec), strict=True):
        np.testing.assert_array_equal(was, now)
    other.step(3)  # lands nothing, and makes no step beyond the last round
    assert other.step_number == 8
    if codec is None:
        assert_replayed(jobs, "nesterov", 3)
    else:
        finish(jobs)
        assert_equal(jobs)


class GoneError(Exception):
    """The job is gone."""


def announces_and_dies(dead, monkeypatch):
    """At the step of its arrival, before that has a record."""

    def gone(self):
        self._publish()
        raise GoneError

    with monkeypatch.context() as patch:
        patch.setattr(ByHand, "wait", gone)
        with pytest.raises(GoneError):
            dead.step(ARRIVALS)
    dead.exchange._context.heartbeat.stop(leaving=False)


def test_who_dies_before_its_arrival_has_a_record_still_counts(learners, monkeypatch):
    """It has announced, and is gone: another region writes the record when it has the payload."""
    jobs = learners(nesterov((1.0, 1.0, 1.0)))
    run(jobs, ARRIVALS, (1.0, 1.0, 1.0), last=7)
    dead, *living = jobs
    announces_and_dies(dead, monkeypatch)
    look(living)
    number = living[0].loop.carrier.rounds.committed - 1
    assert records(living[0], number + 1)[number] == (0,)
    dead.log.append((8, "report", number))
    run(living, ARRIVALS, (1.0, 1.0), first=8)
    told = arrivals([living[0], *jobs], ARRIVALS)
    given = (oracle.make_params(), jobs[0].data, told, [8, *(x.step_number for x in living)], SGD)
    before, _, _ = oracle.run_arrivals(server_of("nesterov"), *given)
    for one in living:
        for key, value in one.anchor().items():
            close(value, before[key], key)


def test_a_report_is_told_with_the_round_that_was_its_own(learners, monkeypatch):
    """Also if the next round has landed here before the region looks again."""
    one, other = jobs = two_before_their_second_arrival(learners)

    def act(waiting):
        waiting.look()
        other.step(ARRIVALS)
        look(jobs)

    steps_while(one, monkeypatch, act)
    assert records(one, 4) == {0: (0,), 1: (1,), 2: (0,), 3: (1,)} and one.loop.carrier.landed == 4
    assert [k for _, kind, k in one.log if kind == "report"] == [0, 2]


def test_a_wait_for_the_own_arrival_can_be_stopped_and_goes_on_where_it_was(learners, monkeypatch):
    """The state that is returned meanwhile has the payload in flight, and can be saved."""
    jobs = two_before_their_second_arrival(learners)
    one = jobs[0]
    names_ours, asked = ByHand.names_ours, []

    def late(self, number):
        return None if self is one.loop.carrier.rounds else names_ours(self, number)

    def stops():
        asked.append(1)
        return len(asked) > 3

    monkeypatch.setattr(ByHand, "names_ours", late)
    one.exchange.stop_when(stops)
    one.step(ARRIVALS)
    assert one.loop.carrier.paused and list(one.state.in_flight) == ["0@8"]
    assert int(one.state.counters.behind) == 1 and [k for _, _, k in one.log] == [0, 0, 1, 2]
    monkeypatch.setattr(ByHand, "names_ours", names_ours)
    one.exchange.stop_when(lambda: False)
    one.step(ARRIVALS)
    assert one.loop.carrier.landed == rounds_landed(one.state) == 3, "it landed before the step"
    run(jobs, ARRIVALS, (1.0, 1.0), first=9)
    steps = [step for step, kind, _ in one.log if kind == "report"]
    assert steps[:3] == [4, 8, 12] and not one.loop.carrier.paused
    assert_replayed(jobs, "nesterov")


def test_an_arrival_of_the_job_before_is_not_ones_own(learners, monkeypatch, store_party):
    """Its record comes late: the job in its place has made steps since, and keeps them."""
    jobs = learners(nesterov((1.0, 1.0)), 2)
    run(jobs, ARRIVALS, (1.0, 1.0), last=7)
    dead, other = jobs
    given = other.one.carrier.given(other.state)
    announces_and_dies(dead, monkeypatch)
    own = store_party.region(0, 2, timing=TIMING, keep=1000)
    own.join(20.0)
    again = Learner(0, own, dead.one.method, table(2))
    again.state = start_from_peer(again.loop, again.state, *given[1:])
    own.come_in()
    look([other])
    assert records(other, 3)[2] == (0,), "the other one has written the record"
    for _ in range(4):
        again.step(ARRIVALS)
    assert again.log[-3:] == [(11, "report", 3), (11, "land", 2), (11, "land", 3)]
    look([again, other])
    assert records(other, 4)[3] == (0,)


def test_bytes_are_those_of_the_arrivals_of_each(learners):
    """Region 1 arrives half as often: as on one mesh, it sends half as much as it receives."""
    speeds = (1.0, 0.5)
    jobs = learners(nesterov(speeds, dynamic=False), 2)
    run(jobs, 100, speeds, last=18)
    nbytes = 4 * sum(x.size for x in oracle.make_params().values())
    sent, received = (
        [int(getattr(one.state.counters, name)[0]) for one in jobs]
        for name in ("bytes_sent", "bytes_received")
    )
    assert sent == [4 * nbytes, 2 * nbytes] and received == [2 * nbytes, 4 * nbytes]


def test_a_run_may_go_on_after_its_end(learners):
    jobs = learners(nesterov((1.0, 1.0, 1.0)))
    run(jobs, 6, (1.0, 1.0, 1.0))
    finish(jobs)
    run(jobs, 12, (1.0, 1.0, 1.0), first=jobs[0].step_number + 1)
    assert all(one.loop.carrier.landed == 12 for one in jobs)
    assert_equal(jobs)


def test_who_sits_out_keeps_its_steps(learners):
    """Without its arrival the anchor does not move; its next arrival has all steps since."""
    (one,) = learners(nesterov((1.0,)), 1)
    data = [jax.tree.map(lambda x: x[:1], oracle.step_batch(one.data, t)) for t in range(1, 13)]
    sits_out = {4, 5}
    with jax.numpy_dtype_promotion("standard"):
        one.state, history = one.one.run(
            one.state, data, lambda step: [step not in sits_out], rounds=2
        )
    assert [event.step for event in history.events if event.kind == "send"] == [6, 10]
    assert one.step_number == 10


def test_arrivals_are_counted_by_the_declared_speeds():
    schedule = nesterov((1.0, 0.8), dynamic=False).schedule
    assert [schedule.opens(k) for k in range(-1, 7)] == [0, 4, 5, 8, 10, 12, 15, 16]
    assert [schedule.rounds_by(t) for t in (0, 3, 4, 5, 16, 20)] == [0, 0, 1, 2, 7, 9]
