"""The engine around several trainers: compilations, merges, virtual time, refusals."""

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
    stream,
    values,
)
from compilations import compilations
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.network import replay, uniform
from lowcomm_jax.rules.batching import Fixed, NormTest, pooled
from lowcomm_jax.rules.trainers import Trainers

STEP_SECONDS = 0.5
SIZE = 4 * oracle.SIZE
# The model of one trainer travels in 2 s; the batch test's three scalars take their share of it.
SLOW = uniform(REGIONS, 8 * SIZE / 2.0 / 1e9, delay_s=0.0, compute_s=STEP_SECONDS)
EXCHANGE = 2.0 * (1 + 12 / SIZE)


@pytest.fixture(scope="module")
def run():
    """Three trainers whose batches may grow 64-fold, from microbatches of 2."""
    policy = NormTest(start=2, cap=128, microbatches=2)
    method = lc.methods.adloco(PERIOD, 3, threshold=1.0, inner_batching=policy)
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
    assert state.first.request == 128


def test_a_merge_frees_its_trainer(fresh):
    state, _ = fresh.run(fresh.init(oracle.make_params()), stream, rounds=2)
    gone = weakref.ref(state.trainers[2].state.inner.params["a"])
    state, history = fresh.run(asking(state, t0=6, t1=4, t2=2), stream, rounds=1)
    assert list(state.trainers) == [0, 1]
    assert next(history.rows())["trainers"]["1"]["batch"] == 4  # the survivor's own
    assert gone() is None


def test_trainers_share_a_region_and_its_link(fresh):
    """Per step: samples of all trainers over the reference of 2; per round: all their models."""
    state = asking(fresh.init(oracle.make_params()), t0=4, t1=2, t2=6)
    state, history = fresh.run(state, stream, rounds=2)
    rows = list(history.rows())
    looks = [2 * 2 * 2] * 3  # two passes over two microbatches of 2, for every trainer
    seconds = 0.0
    for row in rows:
        samples = sum(t["samples"] for t in row["trainers"].values()) / REGIONS
        assert ("looks" in row) is (row["step"] % PERIOD == 0)
        seconds += STEP_SECONDS / 2 * (samples + (sum(looks) if row["step"] % PERIOD == 1 else 0))
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
    asked = [trainer["batch"] for trainer in next(history.rows())["trainers"].values()]
    assert len(asked) == 2
    work = sum(
        PERIOD * fresh.switch.samples(batch) + 2 * 2 * fresh.switch.measured(batch, 2)
        for batch in asked
    )  # two passes over two microbatches
    took = (fresh.clock.now_R - before)[0]
    assert took == pytest.approx(STEP_SECONDS / 2 * work + 2 * EXCHANGE, rel=1e-9)


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
    together = REGIONS * sum(fresh.switch.samples(b) for b in state.requests.values())
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


def looks_in(history):
    """What was decided, by the step at which it stands."""
    return {row["step"]: row["looks"] for row in history.rows() if "looks" in row}


def requests_of(history):
    """What every trainer asks for after the first round."""
    return [look["request"] for look in looks_in(history)[PERIOD].values()]


def test_a_region_that_sits_out(fresh):
    """Its noise does not count, it sends nothing, and its own progress waits for the next round."""
    state = fresh.init(oracle.make_params())
    away = np.array([True, False])
    state, history = fresh.run(state, stream, rounds=1, participants=lambda _: away)
    assert [e.participants.tolist() for e in history.events if e.kind == "land"][-1] == [
        True,
        False,
    ]
    alone = requests_of(history)
    anchor, local = state.first.state.anchor["a"], state.first.state.inner.params["a"]
    assert np.array_equal(local[0], anchor[0]) and not np.allclose(local[1], anchor[0], atol=1e-4)
    _, history = fresh.run(fresh.init(oracle.make_params()), stream, rounds=1)
    assert alone != requests_of(history)
    state, history = fresh.run(state, stream, rounds=1, participants=lambda _: ~away & away)
    assert not looks_in(history) and state.requests == dict(enumerate(alone))


def test_metrics_have_names():
    one = engine(lc.methods.diloco(PERIOD, inner_batching=Fixed(4)), largest_microbatch=4)
    state, history = one.run(one.init(oracle.make_params()), stream, steps=3)
    assert state.first.used == 12 and state.samples == 24
    assert [row["tokens"] for row in history.rows()] == [[4.0, 4.0]] * 3
    assert history["tokens"].tolist() == [[4.0, 4.0]] * 3 and "loss" in history
    assert repr(history).startswith("<History: 3 steps of ")
    assert set(history) <= set(next(history.rows()))
    with pytest.raises(KeyError, match="did you mean loss"):
        history["los"]


def refusal(make):
    with pytest.raises(ValueError) as error:
        make()
    return str(error.value)


def test_everything_wrong_is_listed_at_once():
    policy = NormTest(start=8, cap=4, microbatches=1)
    method = lc.methods.adloco(0, 0, 0, inner_batching=policy)
    text = refusal(
        lambda: engine(
            method,
            accumulate=2,
            scaling="cube",
            reference_batch=0,
            largest_microbatch=0,
            schedule=3,
            network="nowhere",
        )
    )
    for part in (
        "period=0",
        "trainers=0",
        "merge_every=0",
        "cap=4 is below start=8",
        "microbatches=1: one gradient",
        "accumulate=2",
        "scaling='cube'",
        "reference_batch=0",
        "largest_microbatch=0",
        "schedule=3: give a function, or None",
        "network",
    ):
        assert part in text, part


def test_the_ordinary_engine_names_the_adaptive_one():
    for method in (lc.methods.adloco(4), lc.methods.diloco(4, inner_batching=Fixed(4))):
        text = refusal(lambda: lc.Engine(loss_fn, optax.sgd(0.1), method, 2, mesh=MESH))  # noqa: B023
        assert "AdaptiveEngine" in text
    assert "no batch policy" in refusal(lambda: engine(lc.methods.diloco(4)))
    bare = dataclasses.replace(lc.methods.diloco(4), trainers=Trainers(2, 3))
    text = refusal(lambda: lc.Engine(loss_fn, optax.sgd(0.1), bare, 2, mesh=MESH))
    assert "use lowcomm_jax.AdaptiveEngine" in text
    text = refusal(lambda: engine(bare))
    assert "trainers need a batch policy, too: give inner_batching, as batching.Fixed(b)" in text
    assert "lc.Engine" not in text
    engine(dataclasses.replace(bare, inner_batching=lc.batching.Fixed(2)))
    for method, part in (
        (lc.methods.ddp(inner_batching=Fixed(4)), "takes a fixed batch and one"),
        (lc.methods.diloco(4, inner_batching="norm"), "inner_batching='norm'"),
        (lc.methods.adloco(4, inner_batching=Fixed(4)), "largest_microbatch=2 is below start=4"),
        (lc.methods.adloco(4, inner_batching=NormTest(start=2, cap=None)), "cap=None"),
        (lc.methods.adloco(4, threshold=0.5), "threshold=0.5"),
    ):
        assert part in refusal(lambda: engine(method, 1)), part  # noqa: B023


@pytest.mark.parametrize("scaling", ["{x}", "{s.seed}", ["sqrt"]])
def test_what_was_given_is_shown_as_it_is(scaling):
    text = refusal(lambda: engine(lc.methods.adloco(4), scaling=scaling, reference_batch="{x}"))
    assert f"scaling={scaling!r}: choose one of none, sqrt, linear" in text
    assert "reference_batch='{x}': give a whole number of at least 1" in text


def test_a_run_that_finishes_within_a_round_decides_by_those_who_took_part():
    """The noise of an absent region decides nothing; the next run of the engine tells nothing."""
    policy = NormTest(start=2, cap=64, microbatches=4)
    one = engine(lc.methods.adloco(PERIOD, 1, inner_batching=policy))
    state = one.init(oracle.make_params())
    state, _ = one.run(state, stream, steps=1, participants=lambda _: np.array([True, False]))
    measured = np.asarray(state.first.measured)
    size = one.switch.measured(policy.start, one.probe.count)

    def asks(regions):
        noise = pooled(measured[regions, :3], one.probe.count, size)
        return policy.decide(policy.init(), noise, policy.start)[1]

    assert asks([0]) != asks([0, 1])
    before = state.counters.bytes_sent
    ended = one.finish(state)
    assert ended.first.request == asks([0])
    assert (ended.counters.bytes_sent - before).tolist() == [SIZE + 12] * REGIONS
    _, history = one.run(one.init(oracle.make_params()), stream, steps=1)
    assert not looks_in(history)


def test_a_run_that_was_finished_goes_on_with_the_survivors_batch(fresh):
    """Not with the sum of all requests, which no policy may ask for."""
    state = asking(fresh.init(oracle.make_params()), t0=100, t1=128, t2=128)
    state, history = fresh.run(fresh.finish(state), stream, rounds=1)
    assert list(state.trainers) == [1]
    assert next(history.rows())["trainers"]["1"]["batch"] == 128


@pytest.mark.parametrize("called, found", [((0, 0, 6), 5), ((0, 2, 2), 4)])
def test_a_source_that_gives_another_number_of_samples_is_refused(called, found):
    """Be it to measure, or to train on."""
    policy = NormTest(start=2, cap=64, microbatches=3)
    one = engine(lc.methods.adloco(PERIOD, 1, inner_batching=policy))

    def source(trainer, start, count):
        return stream(trainer, start, found if (trainer, start, count) == called else count)

    _, start, count = called
    wanted = f"asks for {count} samples from {start} on, and the source gives {found} a region"
    assert wanted in refusal(lambda: one.run(one.init(oracle.make_params()), source, rounds=1))


def test_a_state_of_another_engine_is_refused(fresh):
    """Before anything is measured or compiled with it."""
    policy = NormTest(start=2, cap=64, microbatches=3)
    one = engine(lc.methods.adloco(PERIOD, 1, inner_batching=policy))
    other = fresh.init({"another": np.zeros(3, np.float32)})
    wanted = "this state was made by another engine: call engine.init(params) first"
    assert refusal(lambda: one.run(other, stream, rounds=1)) == wanted


def told_in(history):
    """The events of every row, and what was decided there."""
    return [(row["step"], row.get("events"), row.get("looks")) for row in history.rows()]


@pytest.mark.parametrize("network", [None, SLOW])
def test_a_segment_that_raised_leaves_nothing_for_the_next_one(network):
    """Trainer 0 has sent and landed when the stream of trainer 1 cannot be read."""
    policy = NormTest(start=2, cap=64, microbatches=2)

    def made():
        return engine(lc.methods.adloco(PERIOD, 2, inner_batching=policy), network=network)

    def breaks(trainer, start, count):
        if trainer == 1:
            raise OSError("gone")
        return stream(trainer, start, count)

    one, other = made(), made()
    with pytest.raises(OSError, match="gone"):
        one.run(one.init(oracle.make_params()), breaks, rounds=1)
    _, found = one.run(one.init(oracle.make_params()), stream, rounds=2)
    _, wanted = other.run(other.init(oracle.make_params()), stream, rounds=2)
    assert told_in(found) == told_in(wanted)
    kinds = [(event.trainer, event.kind) for event in found.events if event.step == PERIOD]
    assert sorted(kinds) == sorted([(i, kind) for i in (0, 1) for kind in ("send", "land")] * 2)
