"""DiLoCoX against its NumPy re-derivation: factors, residuals, delay, adaptive rank and H."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import oracle
import pytest
from compilations import compilations
from engine.dilocox_cases import (
    CALM,
    NESTEROV,
    RANK,
    SGD,
    SHAPES,
    check,
    codec,
    make_engine,
    run_oracle,
    train,
)

import lowcomm_jax as lc


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("delay", [0, 1])
def test_low_rank_with_error_feedback(regions, delay):
    method = lc.methods.dilocox(3, codec(), RANK, delay, adaptive=False)
    mask = np.ones((14, regions), bool)
    if regions > 1:
        mask[5, 1] = mask[8, 0] = False
    _, seen, batches = train(method, regions, 14, mask)
    check(seen, run_oracle(method, batches, 3, delay=delay, participants=mask))


def test_int4_factors():
    method = lc.methods.dilocox(
        3, codec(factors=lc.compression.Integer(4, block=None)), RANK, adaptive=False
    )
    _, seen, batches = train(method, 2, 7)
    run = run_oracle(method, batches, 3, rounding=oracle.int4_rows)
    check(seen, run, tolerance=2e-4)
    dense = run_oracle(method, batches, 3)
    with pytest.raises(AssertionError):
        check(seen, dense, tolerance=2e-4)


ADAPTIVE = [
    (1, {"window": 2, "energy": 0.8}),
    (0, {"window": 1, "energy": 0.7, "shortest": 2}),
    (1, {"window": 3, "energy": 0.6, "floor": 2}),
    (1, {"window": 1, "energy": 0.5, "probe": 2}),
]


@pytest.mark.parametrize("delay,settings", ADAPTIVE)
def test_rank_and_period_follow_the_measured_rank(delay, settings):
    period, steps, regions = 6, 48, 3
    rule = lc.methods.AdaGradCmp(**{"shortest": 1, "floor": 1, **settings})
    method = lc.methods.dilocox(period, codec(), RANK, delay, rule, CALM["engine"])
    mask = np.ones((steps, regions), bool)
    mask[11, 1] = False
    _, seen, batches = train(method, regions, steps, mask)
    ranks = method.schedule.ranks
    assert ranks == {1: (4, 3, 2, 1), 2: (4, 3, 2)}[rule.floor]
    adaptation = oracle.Adaptation(ranks, rule.window, rule.energy, rule.shortest, probe=rule.probe)
    options = {"adaptation": adaptation, "delay": delay, "participants": mask}
    run = run_oracle(method, batches, period, CALM["oracle"], **options)
    for t, (_, _, decided) in enumerate(seen, 1):
        want = run.at(t).extra
        assert (ranks[decided["level"]], decided["boundary"]) == (want["rank"], want["end"]), t
    check(seen, run, tolerance=1e-4)
    lengths = {int(d["boundary"]) for _, _, d in seen}
    assert any(b - a < period for a, b in itertools.pairwise(sorted(lengths)))


def test_a_round_is_as_long_as_its_payload_travels():
    settings = {"window": 1, "energy": 0.5, "shortest": 1}
    method = lc.methods.dilocox(
        6, codec(), RANK, 1, settings, CALM["engine"], step_seconds=2.0, sync_seconds=7.9
    )
    _, seen, batches = train(method, 2, 40)
    travel = (4,) * len(method.schedule.ranks)
    adaptation = oracle.Adaptation(method.schedule.ranks, 1, 0.5, travel=travel)
    run = run_oracle(method, batches, 6, CALM["oracle"], adaptation=adaptation)
    ends = sorted({int(d["boundary"]) for _, _, d in seen})
    assert min(b - a for a, b in itertools.pairwise(ends)) == 4
    check(seen, run, tolerance=1e-4)


def test_a_large_payload_has_time_to_arrive_when_the_next_is_small():
    """Each rank travels for a time of its own."""
    travel, settings = (6, 5, 3, 1), {"window": 1, "energy": 0.5, "shortest": 1, "probe": 2}
    method = lc.methods.dilocox(6, codec(), RANK, 1, {**settings, "floor": 1}, CALM["engine"])
    schedule = dataclasses.replace(method.schedule, travel=travel)
    method = dataclasses.replace(method, schedule=schedule)
    _, seen, batches = train(method, 2, 40)
    adaptation = oracle.Adaptation(schedule.ranks, 1, 0.5, travel=travel, probe=2)
    run = run_oracle(method, batches, 6, CALM["oracle"], adaptation=adaptation)
    ends = [(int(d["boundary"]), int(d["level"])) for _, _, d in seen]
    rounds = [a for a, b in itertools.pairwise(ends) if a != b]
    waits = [(b - a, level) for (a, level), (b, _) in itertools.pairwise(rounds)]
    assert all(wait >= travel[level] for wait, level in waits), waits
    assert len({level for _, level in waits}) > 2
    check(seen, run, tolerance=1e-4)


def test_full_rank_everywhere_keeps_the_rank():
    """The mean over tensors of different sizes rounds to a little above r_1."""
    settings = {"window": 1, "energy": 0.95}
    method = lc.methods.dilocox(
        2, {"name": "low_rank", "least": 1.0}, 8, delay=1, adaptive=settings
    )
    shapes = {"a": (24, 48), "b": (24, 32), "c": (48, 24), "d": (40, 24)}
    rng = np.random.default_rng(0)
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}

    def loss_fn(params, batch, rng):
        del rng
        return sum((params[k] * batch[k][0]).sum() for k in shapes)

    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.Engine(loss_fn, optax.sgd(0.1), method, 2, mesh=mesh)
    state = engine.init(params)
    for _ in range(8):
        batch = {k: rng.standard_normal((2, 1, *s)).astype(np.float32) for k, s in shapes.items()}
        state, _ = engine.step(state, batch)
    assert (int(state.counters.decided["level"]), int(state.counters.decided["boundary"])) == (
        0,
        10,
    )
    np.testing.assert_allclose(state.counters.decided["measured"], 8.0, rtol=1e-5)


def test_a_bucket_compiles_once():
    method = lc.methods.dilocox(6, codec(), RANK, 1, {"window": 1, "energy": 0.5, "probe": 2})
    engine = make_engine(method, 2)
    batches = oracle.make_batches(steps=40, regions=2, shapes=SHAPES)
    stream = [oracle.step_batch(batches, t) for t in range(1, 41)]
    states = [engine.init(oracle.make_params(shapes=SHAPES)) for _ in range(2)]
    sizes = set()

    def run():
        state, history = engine.run(states.pop(), stream)
        sizes.update(e.nbytes for e in history.events if e.kind == "send")
        return state.anchor

    assert compilations(run) > 0
    assert len(sizes) > 1, "only one bucket was used, so this test could not fail"
    assert compilations(run) == 0


def test_buckets_are_evenly_spaced():
    assert lc.methods.AdaGradCmp().ranks(16) == (16, 14, 12, 10, 8, 6, 4, 2)
    assert lc.methods.AdaGradCmp(buckets=3, floor=1).ranks(8) == (8, 5, 1)
    assert lc.methods.AdaGradCmp(buckets=1).ranks(8) == (8,)


def test_without_codec_and_delay_it_is_diloco():
    dense = lc.methods.dilocox(4, codec=None, delay=0)
    state, seen, _ = train(dense, 3, 13, finish=True)
    other, expected, _ = train(lc.methods.diloco(4), 3, 13, finish=True)
    for (a, la, _), (b, lb, _) in zip(seen, expected):
        jax.tree.map(np.testing.assert_array_equal, (a, la), (b, lb))
    jax.tree.map(np.testing.assert_array_equal, state.anchor, other.anchor)


def test_without_codec_it_is_the_dense_delay():
    _, seen, batches = train(lc.methods.dilocox(4, codec=None), 3, 13)
    run = oracle.run_dilocox_dense(
        oracle.make_params(shapes=SHAPES), batches, period=4, inner=SGD, outer=NESTEROV
    )
    check(seen, run)
