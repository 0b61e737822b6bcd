"""Trainers between jobs: who decides the next batch, and what is taken over from others."""

import copy
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import oracle
import pytest
from adloco.adaptive_cases import PERIOD, engine, stream

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.adloco import job_trainers
from lowcomm_jax.adloco.engine import AdaptiveEngine, Goal
from lowcomm_jax.adloco.history import Told
from lowcomm_jax.adloco.state import AdaptiveState, Trainer
from lowcomm_jax.adloco.step_plan import Switch
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.jobs.job_carrier import Counted
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.recovery.rejoin import install_trainers
from lowcomm_jax.rules.batching import Fixed, NormTest, pooled
from lowcomm_jax.state.train_state import SyncCounters
from lowcomm_jax.store.errors import Rejected
from lowcomm_jax.sync.sync_loop import SyncLoop

POLICY = NormTest(start=2, cap=64, microbatches=2, smoothing=0.0)
MEASURED = ((1.0, 8.0, 3.0), (4.0, 2.0, 1.0), (9.0, 5.0, 0.5))


def decided(looked, counted, measured=MEASURED):
    """The trainer after a round whose payloads brought these numbers, and what was decided."""
    one, told = AdaptiveEngine.__new__(AdaptiveEngine), Told()
    one.policy, one.switch, one.probe = POLICY, Switch(1), SimpleNamespace(count=2)
    one.carrier = SimpleNamespace()  # of a job; nothing is paused
    counters = dataclasses.replace(SyncCounters.start(1, 1), step=np.int64(4))
    trained = SimpleNamespace(counters=counters)
    trainer = Trainer(2, 0, POLICY.init(), measured=[(0.0, 0.0, 0.0, 0.0)], state=trained)
    told.hear(0, np.column_stack([measured, looked]), np.array(counted, bool))
    state = one._landed(AdaptiveState({0: trainer}, 0), told, stoppable=False)
    assert state.first.measured is None and not told.noise
    return state.first, told.looks


@pytest.mark.parametrize(
    "looked, counted", [([1, 0, 1], [1, 1, 1]), ([1, 1, 1], [1, 0, 1]), ([1, 0, 1], [1, 0, 1])]
)
def test_who_was_counted_and_has_measured_decides(looked, counted):
    found, looks = decided(looked, counted)
    mask = np.array([True, False, True])
    want = pooled(np.array(MEASURED)[mask], 2, 1)
    memory, request = POLICY.decide(POLICY.init(), want, 2)
    assert (found.request, found.policy) == (request, memory)
    [(step, number, look)] = looks
    assert request > 2 and (step, number) == (4, 0) and look["gbar2"] == want.gbar2 == 5.0


@pytest.mark.parametrize("looked, counted", [([0, 0, 0], [1, 1, 1]), ([1, 0, 0], [0, 1, 1])])
def test_where_nobody_has_measured_there_is_nothing_to_decide_on(looked, counted):
    found, looks = decided(looked, counted)
    assert (found.request, found.policy, looks) == (2, POLICY.init(), [])


def test_numbers_that_are_not_finite_change_nothing():
    measured = (MEASURED[0], (4.0, np.nan, 1.0), MEASURED[2])
    found, _ = decided([1, 1, 1], [1, 1, 1], measured)
    assert (found.request, found.policy) == (2, POLICY.init())


# -- a state of another region -----------------------------------------------------------------


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """(engine of region 0, its state, what region 1 gives)."""
    url, made = f"file://{tmp_path_factory.mktemp('meet')}", []
    for region in range(2):
        policy = NormTest(start=1, cap=4, microbatches=2)
        method = lc.methods.adloco(PERIOD, 2, inner_batching=policy)
        one = engine(method, 2, exchange=exchange.store(url, region, 2, "run"))
        with jax.numpy_dtype_promotion("standard"):
            made.append((one, one.init(oracle.make_params())))
    theirs = made[1][1]
    trainer = theirs.first
    trainer = trainer.replace(request=3, used=7, policy=used_policy())
    return *made[0], theirs.with_trainer(0, trainer).replace(samples=31)


def used_policy():
    return {"weight": 0.5, "along": 1.5, "across": 2.5, "signal": 3.5}


def test_a_state_brings_batches_policies_and_places_in_the_streams(states):
    one, own, theirs = states
    del theirs.trainers[1]  # has merged
    own.trainers[1].state.counters.bytes_sent[:] = 5
    _, arrays, document = one.carrier.given(theirs)
    found = install_trainers(one, own, arrays, document)
    assert list(found.trainers) == [0] and found.samples == 31
    trainer = found.first
    assert (trainer.request, trainer.policy) == (3, used_policy())
    assert trainer.used == 7 and trainer.measured is None
    assert found.counters.bytes_sent.tolist() == [5]


def test_residuals_of_all_trainers_start_anew(tmp_path):
    """What they hold was counted after the checkpoint that they come from."""
    method = lc.methods.adloco(PERIOD, 2, codec="sign_ef", inner_batching=Fixed(1))
    one = engine(method, 2, exchange=exchange.store(f"file://{tmp_path}", 0, 2, "run"))
    with jax.numpy_dtype_promotion("standard"):
        own, theirs = one.init(oracle.make_params()), one.init(oracle.make_params())
    for number, trainer in own.trainers.items():
        codec = jax.tree.map(lambda x: x + 1, trainer.state.codec)
        own = own.with_trainer(number, trainer.replace(state=trainer.state.replace(codec=codec)))
    _, arrays, document = one.carrier.given(theirs)
    found = install_trainers(one, own, arrays, document)
    for number, trainer in found.trainers.items():
        like = theirs.trainers[number].state.codec
        assert jax.tree.leaves(like)
        jax.tree.map(np.testing.assert_array_equal, trainer.state.codec, like)


def test_what_regions_could_part_by_is_refused(tmp_path):
    method = lc.methods.adloco(PERIOD, 2, inner_batching=Fixed(1))
    others = exchange.store(f"file://{tmp_path}", 0, 2, "run", heal="majority")
    with pytest.raises(ValueError, match="heal='majority': every trainer has an anchor of its own"):
        engine(method, 2, exchange=others)


def test_a_round_has_an_exchange_a_trainer(tmp_path):
    method = lc.methods.adloco(PERIOD, 3, inner_batching=Fixed(1))
    others = exchange.store(f"file://{tmp_path}", 0, 2, "run", keep=5)
    engine(method, 2, exchange=others)
    assert others._payload_gc.keep == 15


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda d: d.pop("trainers"), Rejected),
        (lambda d: d["trainers"].pop("samples"), Rejected),
        (lambda d: d["trainers"]["live"]["0"].update(request=-1), Rejected),
        (lambda d: d["trainers"]["live"]["0"].update(request="2"), Rejected),
        (lambda d: d["trainers"]["live"]["0"].update(used=[1, 1]), Rejected),
        (lambda d: d["trainers"]["live"]["0"].update(policy=None), Rejected),
        (lambda d: d["trainers"]["live"]["0"]["policy"].update(signal=float("nan")), Rejected),
        (lambda d: d["trainers"]["live"]["0"]["policy"].update(more=1.0), Rejected),
        (lambda d: d["trainers"]["live"]["0"].update(measured=[(1.0, "x", 0.0, 1.0)]), Rejected),
        (lambda d: d["trainers"]["live"].update(x=d["trainers"]["live"]["0"]), Rejected),
        (lambda d: d["trainers"]["live"].update({"7": d["trainers"]["live"]["0"]}), ValueError),
        (lambda d: d["trainers"]["live"].clear(), ValueError),
    ],
)
def test_a_damaged_document_is_not_taken(damage, error, states):
    one, own, theirs = states
    _, arrays, document = copy.deepcopy(one.carrier.given(theirs))
    damage(document)
    with pytest.raises(error):
        install_trainers(one, own, arrays, document)


# -- where a region starts that has only landed ------------------------------------------------


@pytest.fixture
def region(tmp_path):
    """(engine of region 0 of two trainers, its state)."""
    method = lc.methods.adloco(PERIOD, 2, inner_batching=Fixed(1))
    one = engine(method, 2, exchange=exchange.store(f"file://{tmp_path}", 0, 2, "run"))
    with jax.numpy_dtype_promotion("standard"):
        return one, one.init(oracle.make_params())


def moved(state):
    """Every trainer with an anchor of its own, away from the values of this region."""
    for number, trainer in state.trainers.items():
        anchor = jax.tree.map(lambda x: x + 1 + number, trainer.state.anchor)  # noqa: B023
        state = state.with_trainer(
            number, trainer.replace(state=trainer.state.replace(anchor=anchor))
        )
    return state


def starts_from(state, anchors):
    for number, trainer in state.trainers.items():
        for name, x in anchors[number].items():
            np.testing.assert_array_equal(trainer.state.anchor[name], x)
            np.testing.assert_array_equal(trainer.state.inner.params[name], x)


def anchors_of(state):
    return {i: jax.tree.map(np.array, t.state.anchor) for i, t in state.trainers.items()}


def test_after_rounds_that_it_missed_a_region_starts_from_the_anchors(region, monkeypatch):
    """Its own values are those from before the rounds that the others made without it."""
    (one, state), told = region, []

    def lands(state, source, goal):
        steps = min(goal.left(state), PERIOD)
        for number, trainer in moved(state).trainers.items():
            counters = trainer.state.counters.copy()
            counters = dataclasses.replace(counters, step=np.int64(counters.step + steps))
            own = trainer.state.replace(counters=counters)
            state = state.with_trainer(number, trainer.replace(state=own))
        return state

    monkeypatch.setattr(one.carrier.exchange, "frontier", lambda: 2 * PERIOD)
    monkeypatch.setattr(one, "warm", lambda state, source: state)
    monkeypatch.setattr(one, "pass_steps", lands)
    monkeypatch.setattr(one.carrier, "tell", lambda state, *steps: told.append(steps))
    wanted = anchors_of(moved(moved(state)))
    found, history = one.run(state, stream, steps=2 * PERIOD)
    assert told == [(step, step) for step in (PERIOD, 2 * PERIOD)] and not len(history)
    starts_from(found, wanted)


def test_who_comes_after_the_end_starts_from_the_anchors_of_the_result(region, monkeypatch):
    one, state = region
    theirs, others = moved(state), one.carrier.exchange
    wanted, result = anchors_of(theirs), one.carrier.given(theirs)
    monkeypatch.setattr(type(others), "awaited", False)
    monkeypatch.setattr(others, "sent_before", lambda: 0)
    monkeypatch.setattr(others, "result", lambda: result)
    # Nothing is compiled, since nobody is there to exchange anything with.
    monkeypatch.setattr(one, "warm", lambda state, source: state)
    monkeypatch.setattr(rejoin, "precompile", lambda engine, state, *_: state)
    starts_from(rejoin.enter(one, state, stream), wanted)


def test_a_checkpoint_in_a_round_has_this_regions_numbers(region, tmp_path):
    """They travel with the round's payload, which is sent after the run goes on."""
    one, state = region
    measured = [(1.0, 0.1, 3.0, 1.0)]
    state = state.with_trainer(1, state.trainers[1].replace(measured=measured))
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, extra={}, config={}, method=one.method)
        found = checkpoints.restore(one, oracle.make_params()).state
    assert [t.measured for t in found.trainers.values()] == [None, measured]


# -- what is sent, and what was heard ----------------------------------------------------------


def headers(one):
    """By trainer, what its payloads carry."""
    return {
        number: {name: np.asarray(x).tolist() for name, x in own.carrier.header.items()}
        for number, own in one.engines.items()
    }


def test_a_payload_carries_what_its_trainer_measured_last(region):
    one, state = region
    nothing = {"noise": [[0.0] * 4]}
    assert headers(one) == {0: nothing, 1: nothing}
    measured = [(1.0, 0.5, 3.0, 1.0)]
    for given in (measured, jax.numpy.asarray(measured)):
        job_trainers.carry(one.engines[1], 1, given, Told())
        one.loops(state)
        one.sync_loop(state)
        assert headers(one) == {0: nothing, 1: {"noise": [[1.0, 0.5, 3.0, 1.0]]}}
        job_trainers.carry(one.engines[1], 1, None, Told())
        assert headers(one) == {0: nothing, 1: nothing}


def test_a_schedule_that_reads_what_lands_keeps_what_its_trainer_measured(tmp_path):
    """CoCoDC's rates travel in no header, and are measurements all the same."""
    method = lc.methods.cocodc(PERIOD, 1, 0, inner_batching=POLICY)
    one = engine(method, 2, exchange=exchange.store(f"file://{tmp_path}", 0, 2, "run"))
    with jax.numpy_dtype_promotion("standard"):
        [(number, trainer, loop)] = one.loops(one.init(oracle.make_params()))
    job_trainers.carry(one.engines[number], number, [(1.0, 0.5, 3.0, 1.0)], Told())
    header = loop._header(trainer.state, PERIOD)
    assert {name: np.asarray(x).tolist() for name, x in header.items()} == {
        "noise": [[1.0, 0.5, 3.0, 1.0]]
    }


def test_what_a_landing_heard_that_raised_decides_nothing(region, monkeypatch):
    """The next landing hears of trainer 1 alone."""
    one, state = region
    one.policy, one.probe = NormTest(start=1, cap=4, microbatches=2), SimpleNamespace(count=2)
    counters = dataclasses.replace(state.counters, behind=np.int64(1))
    for number, trainer in state.trainers.items():
        paused = trainer.state.replace(counters=counters.copy())
        trainer = trainer.replace(state=paused, policy=one.policy.init())
        state = state.with_trainer(number, trainer)
    header = {"noise": np.ones((2, 4), np.float32)}
    outcome = Counted(0, PERIOD, 0, False, np.ones(2, bool), True, header)

    class Loop:
        def __init__(self, number, carrier, raises):
            self.number, self.carrier, self.raises, self.owed = number, carrier, raises, []

        def go_on(self, own, mask):
            if self.raises:
                raise OSError("gone")
            if self.number == 1 or any(loop.raises for *_, loop in loops):
                self.carrier.witness(outcome)
            return own

    def made(raises):
        return [
            (number, trainer, Loop(number, one.engines[number].carrier, raises and number == 1))
            for number, trainer in state.trainers.items()
        ]

    monkeypatch.setattr(one, "loops", lambda state: loops)
    monkeypatch.setattr(one.carrier, "tell", lambda *given: None)
    loops, told = made(True), Told()
    with pytest.raises(OSError, match="gone"):
        one._landed(state, told)
    assert told.noise.keys() == {0}
    loops, told = made(False), Told()
    one._landed(state, told)
    [(_, number, look)] = told.looks
    want = pooled(np.ones((2, 3)), 2, 1)
    assert number == 1 and look.pop("request") == 4 and look == dataclasses.asdict(want)


def test_rounds_that_a_region_only_lands_decide_on_its_next_batches(region, monkeypatch):
    """As in the regions that have sent: by what comes with their payloads."""
    one, state = region
    one.policy, one.probe = NormTest(start=1, cap=4, microbatches=2), SimpleNamespace(count=2)
    for number, trainer in state.trainers.items():
        state = state.with_trainer(number, trainer.replace(policy=one.policy.init()))
    header = {"noise": np.ones((2, 4), np.float32)}
    outcome = Counted(0, PERIOD, 0, False, np.ones(2, bool), True, header)

    class Loop:
        def __init__(self, number):
            self.carrier = one.engines[number].carrier

        def after(self, own, steps, mask):
            self.carrier.witness(outcome)
            counters = own.counters.copy()
            return own.replace(counters=dataclasses.replace(counters, step=np.int64(steps))), []

    monkeypatch.setattr(one, "warm", lambda state, source: state)
    monkeypatch.setattr(one, "loops", lambda s: [(i, t, Loop(i)) for i, t in s.trainers.items()])
    found = one.pass_steps(state, stream, Goal(PERIOD))
    assert found.step == PERIOD and found.requests == {0: 4, 1: 4}


def test_a_paused_step_owes_its_events_once_it_is_done():
    """What has happened in one that raised is not told by the next."""
    loop = SyncLoop.__new__(SyncLoop)
    loop.carrier, loop.owed, raises = SimpleNamespace(paused=True), [], True

    def run_due(state, mask, events):
        events.append("landing")
        if raises:
            raise OSError("gone")
        return state

    loop.run_due = run_due
    with pytest.raises(OSError, match="gone"):
        loop.go_on("state", np.ones(1, bool))
    assert loop.owed == []
    raises = False
    assert loop.go_on("state", np.ones(1, bool)) == "state" and loop.owed == ["landing"]
