"""The engine around several trainers: compilations, merges that hurt, virtual time, refusals."""

import dataclasses
import weakref

import jax
import numpy as np
import optax
import oracle
import pytest
from adloco.adaptive_cases import (
    MESH,
    PERIOD,
    REGIONS,
    asking,
    engine,
    same,
    stream,
    uneven_stream,
    values,
)
from compilations import compilations
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.adloco.merge import merge_before_round
from lowcomm_jax.network import replay, uniform
from lowcomm_jax.rules.batching import Fixed, NormTest
from lowcomm_jax.rules.trainers import Trainers

STEP_SECONDS = 0.5
SIZE = 4 * oracle.SIZE
# The model of one trainer travels in 2 s; the batch test's three scalars take their share of it.
SLOW = uniform(REGIONS, 8 * SIZE / 2.0 / 1e9, delay_s=0.0, compute_s=STEP_SECONDS)
EXCHANGE = 2.0 * (1 + 12 / SIZE)


@pytest.fixture(scope="module")
def run():
    """Three trainers whose batches may grow 64-fold, from microbatches of 2."""
    method = lc.methods.adloco(
        PERIOD, 3, 2, "norm", start_batch=2, max_batch=128, microbatches=2, threshold=1.0
    )
    return engine(method, network=SLOW, schedule=lambda samples: 1 / (1 + samples / 300))


@pytest.fixture
def fresh(run):
    """The engine with a clock at zero and merges as in its method."""
    with jax.numpy_dtype_promotion("standard"):
        clean = engine(lc.methods.local_sgd(PERIOD, inner_batching=Fixed(2)), network=SLOW)
    run.clock, run.trainers = clean.clock, run.method.trainers
    return run


def test_a_batch_that_grows_64_fold_compiles_nothing(fresh):
    fresh.trainers = Trainers(3, None)
    state, _ = fresh.run(fresh.init(oracle.make_params()), stream, rounds=1)

    def grow():
        nonlocal state
        for batch in (3, 9, 30, 77, 128):
            state, history = fresh.run(asking(state, t0=batch, t1=2, t2=5), stream, rounds=1)
            state, _ = fresh.run(state, stream, steps=1)
            list(history.rows())
            state, _ = fresh.run(state, stream, rounds=1)
        return values(state)

    assert compilations(grow) == 0
    assert state.first.batch == 128


def test_a_merge_frees_its_trainer(fresh):
    state, _ = fresh.run(fresh.init(oracle.make_params()), stream, rounds=2)
    gone = weakref.ref(state.trainers[2].state.inner.params["a"])
    state, _ = fresh.run(asking(state, t0=6, t1=4, t2=2), stream, rounds=1)
    assert list(state.trainers) == [0, 1]
    assert state.trainers[1].batch == 4  # the survivor's own
    assert gone() is None


def test_a_merge_that_hurts_is_undone(fresh):
    fresh.trainers = Trainers(3, 1, hurt_bound=0.5)
    state, _ = fresh.run(fresh.init(oracle.make_params()), stream, rounds=1, evaluate=lambda _: 1)
    before = values(state)
    losses = iter([2.0, 3.0, 2.6])
    requests = state.requests

    def evaluate(params):
        assert params["a"].shape == (3, 5)
        return next(losses)

    def before_round(state):
        round_ = state.step // PERIOD
        return merge_before_round(fresh.trainers, fresh._programs(state), state, round_, evaluate)

    state, [merge] = before_round(state)
    assert (merge.before, merge.after, merge.accepted) == ((2.0, 3.0), 2.6, False)
    assert merge.rise == pytest.approx(0.6)
    assert state.requests == requests and same(values(state), before)
    losses = iter([2.0, 3.0, 2.4])
    state, [merge] = before_round(state)
    assert merge.accepted and len(state.trainers) == 2
    losses = iter([2.0, 3.0, float("nan")])
    _, [merge] = before_round(state)
    assert not merge.accepted
    with pytest.raises(ValueError, match="evaluate"):
        fresh.run(state, stream, rounds=1)


def test_trainers_share_a_region_and_its_link(fresh):
    """Per step: samples of all trainers over the reference of 2; per round: all their models."""
    state = asking(fresh.init(oracle.make_params()), t0=4, t1=2, t2=6)
    state, history = fresh.run(state, stream, rounds=2, evaluate=lambda _: 0.0)
    rows = list(history.rows())
    looks = [2 * 2 * 2] * 3  # two passes over two microbatches of 2, for every trainer
    seconds = 0.0
    for row in rows:
        samples = sum(t["samples"] for t in row["trainers"].values()) / REGIONS
        seconds += STEP_SECONDS / 2 * (samples + (sum(looks) if "looks" in row else 0))
    assert [t["samples"] for t in rows[0]["trainers"].values()] == [8, 4, 12]
    exchanges = 2 * 3 * EXCHANGE  # rounds, trainers, seconds
    assert fresh.clock.now_R == pytest.approx([seconds + exchanges] * REGIONS, rel=1e-9)
    sent = fresh.clock.ledger.sent_R().tolist()
    assert sent == state.counters.bytes_sent.tolist() == [2 * 3 * (SIZE + 12)] * REGIONS
    again = replay(SLOW, rows)
    assert again.now_R == pytest.approx(fresh.clock.now_R, rel=1e-12)
    # A trainer that is gone takes its compute, its bytes and its place on the link with it.
    before, spent = fresh.clock.now_R.copy(), state.counters.bytes_sent
    state, history = fresh.run(state, stream, rounds=1)
    assert (state.counters.bytes_sent - spent).tolist() == [2 * (SIZE + 12)] * REGIONS
    plans = history.segments[0].plans.values()
    work = sum(
        PERIOD * plan.total / REGIONS + fresh.probe.samples(fresh._measured_size(plan))
        for plan in plans
    )
    took = (fresh.clock.now_R - before)[0]
    assert took == pytest.approx(STEP_SECONDS / 2 * work + 2 * EXCHANGE, rel=1e-9)


def test_gradients_that_are_reduced_at_a_rounds_first_step_are_booked_there():
    """With scope across: a dense fp32 gradient and three scalars a trainer, once a round."""
    settings = {"start_batch": 2, "max_batch": 2, "microbatches": 2, "scope": "across"}
    one = engine(lc.methods.adloco(PERIOD, 2, None, "norm", **settings))
    state, history = one.run(one.init(oracle.make_params()), stream, steps=1)
    assert [(e.step, e.trainer) for e in history.events if e.kind == "send"] == [(1, 0), (1, 1)]
    assert state.counters.bytes_sent.tolist() == [2 * (SIZE + 12)] * REGIONS
    state, history = one.run(state, stream, rounds=1)
    assert (
        state.counters.bytes_sent.tolist() == [2 * (SIZE + 12 + SIZE)] * REGIONS
    )  # and both models
    assert all(event.fragment >= 0 for event in history.events)


def test_one_trainer_with_a_fixed_batch_is_the_ordinary_engine():
    method = lc.methods.diloco(PERIOD, inner_batching=Fixed(4))
    adaptive = engine(method, largest_microbatch=4)
    plain = lc.Engine(loss_fn, optax.sgd(0.02), lc.methods.diloco(PERIOD), REGIONS, mesh=MESH)
    start = oracle.make_params()
    state, history = adaptive.run(adaptive.init(start), stream, steps=7)
    batches = (stream(0, 4 * t, 4) for t in range(7))
    other, wanted = plain.run(plain.init(start), batches)
    state, other = adaptive.finish(state), plain.finish(other)
    for a, b in zip(jax.tree.leaves(lc.global_params(state)), jax.tree.leaves(other.anchor)):
        np.testing.assert_allclose(a, b[0], rtol=1e-6, atol=1e-7)
    keys = ("step", "tokens", "loss")
    found = [{k: row[k] for k in keys} for row in history.rows()]
    for row, want in zip(found, wanted.rows(), strict=True):
        assert row["step"] == want["step"] and row["tokens"] == want["tokens"]
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-6)


def test_a_run_is_measured_in_rounds_steps_or_samples(fresh):
    fresh.trainers = Trainers(3, None)
    start = fresh.init(oracle.make_params())
    state, _ = fresh.run(start, stream, steps=2)
    state, _ = fresh.run(state, stream, rounds=1)  # the one that is under way
    assert state.step == 3
    used = state.samples
    together = REGIONS * sum(fresh.switch.plan(b).samples_R[0] for b in state.requests.values())
    state, history = fresh.run(state, stream, samples=together + 1)
    assert len(history) == 2 and state.samples == used + 2 * together  # whole steps
    # Of several the first that is reached.
    state, history = fresh.run(state, stream, samples=10 * together, rounds=1)
    assert len(history) == 1 and state.step % PERIOD == 0
    state, history = fresh.run(state, stream, samples=together, rounds=2, steps=5)
    assert len(history) == 1
    for wrong in ({}, {"steps": -1}, {"samples": 1.5}, {"rounds": 1, "steps": 2.5}):
        with pytest.raises(ValueError):
            fresh.run(state, stream, **wrong)


def test_a_region_that_sits_out(fresh):
    """Its noise does not count, it sends nothing, and its own progress waits for the next round."""
    state = fresh.init(oracle.make_params())
    away = np.array([True, False])
    state, history = fresh.run(state, stream, rounds=1, participants=lambda _: away)
    assert [e.participants.tolist() for e in history.events if e.kind == "land"][-1] == [
        True,
        False,
    ]
    alone = [look["request"] for look in history.segments[0].looks.values()]
    anchor, local = state.first.state.anchor["a"], state.first.state.inner.params["a"]
    assert np.array_equal(local[0], anchor[0]) and not np.allclose(local[1], anchor[0], atol=1e-4)
    _, history = fresh.run(fresh.init(oracle.make_params()), stream, rounds=1)
    assert alone != [look["request"] for look in history.segments[0].looks.values()]
    state, history = fresh.run(state, stream, rounds=1, participants=lambda _: ~away & away)
    assert not history.segments[0].looks and state.requests == dict(enumerate(alone))


def test_a_round_of_one_region_with_one_microbatch_decides_nothing():
    """Two regions have a variance between them, and one has none: nothing is noted of its round."""
    settings = {"start_batch": 2, "max_batch": 64, "microbatches": 1, "scope": "across"}
    one = engine(lc.methods.adloco(PERIOD, 1, None, "norm", **settings))
    state, history = one.run(one.init(oracle.make_params()), stream, rounds=1)
    assert history.segments[0].looks
    known, requests = state.first.policy, state.requests
    away = np.array([True, False])
    state, history = one.run(state, stream, rounds=1, participants=lambda _: away)
    assert (state.first.policy, state.requests) == (known, requests)
    assert not history.segments[0].looks and len(list(history.rows())) == PERIOD
    state, history = one.run(state, stream, rounds=1)
    assert history.segments[0].looks and state.first.policy != known


def test_regions_of_uneven_hardware_share_a_step():
    """Shares 3 to 1 of a mean of 4: batches of 6 and 2, each region at its own pace."""
    slow = uniform(REGIONS, 1000.0, delay_s=0.0, compute_s=STEP_SECONDS)
    method = lc.methods.diloco(PERIOD, inner_batching=Fixed(1, shares=(3.0, 1.0)))
    method = dataclasses.replace(method, trainers=Trainers(1, None, threshold=1.0))
    run = engine(method, largest_microbatch=1, network=slow, reference_batch=4)
    starts = []
    state = asking(run.init(oracle.make_params()), t0=4)
    state, history = run.run(state, uneven_stream(starts), steps=3)
    assert state.first.used_R.tolist() == [18, 6] and state.samples == 24
    assert starts[1:] == [([0, 0], 6), ([6, 2], 6), ([12, 4], 6)]
    assert [row["tokens"] for row in history.rows()] == [[6.0, 2.0]] * 3
    assert history["tokens"].tolist() == [[6.0, 2.0]] * 3 and "loss" in history
    assert repr(history).startswith("<AdaptiveHistory: 3 steps of ")
    assert set(history) <= set(next(history.rows()))
    with pytest.raises(KeyError, match="did you mean loss"):
        history["los"]
    # Seconds of the network are those of 4 samples; the slower region is waited for.
    assert run.clock.now_R == pytest.approx([3 * STEP_SECONDS * 6 / 4] * REGIONS, rel=1e-4)


def refusal(make):
    with pytest.raises(ValueError) as error:
        make()
    return str(error.value)


def test_everything_wrong_is_listed_at_once():
    method = lc.methods.adloco(
        0, 0, 0, "norm", 8, 4, "worst", "keep", -1.0, theta=0.5, microbatches=1
    )
    text = refusal(
        lambda: engine(
            method,
            accumulate=2,
            scaling="cube",
            reference_batch=0,
            memory=0,
            network="nowhere",
        )
    )
    for part in (
        "period=0",
        "trainers=0",
        "merge_every=0",
        "cap=4 is below start=8",
        "choose='worst'",
        "moments='keep'",
        "hurt_bound=-1.0",
        "theta=0.5: the norm test does not read it",
        "microbatches=1: one gradient",
        "accumulate=2",
        "scaling='cube'",
        "reference_batch=0",
        "memory=0",
        "network",
    ):
        assert part in text, part


def test_the_ordinary_engine_names_the_adaptive_one():
    for method in (lc.methods.adloco(4), lc.methods.diloco(4, inner_batching=Fixed(4))):
        text = refusal(lambda: lc.Engine(loss_fn, optax.sgd(0.1), method, 2, mesh=MESH))  # noqa: B023
        assert "AdaptiveEngine" in text
    assert "no batch policy" in refusal(lambda: engine(lc.methods.diloco(4)))
    for method, part in (
        (lc.methods.ddp(inner_batching=Fixed(4)), "takes a fixed batch and one"),
        (lc.methods.diloco(4, inner_batching="norm"), "inner_batching='norm'"),
        (lc.methods.adloco(4, test="nrom"), "test='nrom'"),
        (lc.methods.adloco(4, scope="across"), "scope='across' with 1 region"),
        (lc.methods.adloco(4, start_batch=4), "the memory cap of 2 samples is below"),
        (lc.methods.adloco(4, inner_batching=NormTest(start=2, cap=None)), "cap=None"),
        (lc.methods.adloco(4, threshold=0.5), "threshold=0.5"),
    ):
        assert part in refusal(lambda: engine(method, 1)), part  # noqa: B023


@pytest.mark.parametrize("scaling", ["{x}", "{s.seed}", ["sqrt"]])
def test_what_was_given_is_shown_as_it_is(scaling):
    text = refusal(lambda: engine(lc.methods.adloco(4), scaling=scaling, memory="{x}"))
    assert f"scaling={scaling!r}: use none, sqrt, linear" in text
    assert "memory='{x}': a whole number, at least 1, is needed" in text


def test_one_of_two_sizes_is_enough():
    text = refusal(lambda: engine(lc.methods.adloco(4), memory=10**9))
    assert "memory=1000000000: give it, or largest_microbatch, but not both" in text
