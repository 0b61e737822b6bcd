"""Trainers that merge, against their NumPy re-derivation: two regions, three trainers."""

import dataclasses
import math

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.rules.batching import Fixed, NormTest
from lowcomm_jax.rules.trainers import Trainers

REGIONS, PERIOD = 2, 3
# What each of three trainers asks for before every round; odd, unequal numbers.
REQUESTS = [
    {0: 1, 1: 1, 2: 1},
    {0: 5, 1: 3, 2: 4},
    {0: 6, 1: 3, 2: 5},  # the pair is (2, 1)
    {0: 6, 2: 7},
    {0: 9, 2: 7},  # and then (0, 2)
    {0: 9, 2: 8},
    {0: 9, 2: 8},
]
SGD = (oracle.Momentum(0.05, 0.8), optax.sgd(0.05, momentum=0.8))
ADAMW = (oracle.AdamW(0.02), optax.adamw(0.02))


def stream(trainer, start, count):
    return oracle.make_stream(7, trainer, start, count, REGIONS)


def engine(inner, policy, trainers, largest_microbatch, **kwargs):
    method = lc.methods.adloco(PERIOD, outer=lc.outer.nesterov(0.5, 0.6), inner_batching=policy)
    return lc.AdaptiveEngine(
        loss_fn,
        inner,
        dataclasses.replace(method, trainers=dataclasses.replace(trainers, threshold=1.0)),
        REGIONS,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
        largest_microbatch=largest_microbatch,
        **kwargs,
    )


@pytest.fixture(scope="module")
def fixed():
    """Engines that serve every request by microbatches of 1, by inner optimizer."""
    return {inner: engine(inner[1], Fixed(1), Trainers(3, 2), 1) for inner in (SGD, ADAMW)}


def check(state, want, label):
    assert list(state.trainers) == sorted(want)
    for number, trainer in state.trainers.items():
        assert trainer.used == want[number].used
        for key, value in want[number].anchor.items():
            close(trainer.state.anchor[key][0], value, f"{label} {number} anchor {key}")
            for r, local in enumerate(want[number].regions.values):
                close(trainer.state.inner.params[key][r], local[key], f"{label} {number} {r} {key}")


def merges_of(history):
    merges = [merge for row in history.rows() for merge in row.get("merges", ())]
    return [(merge["round"], merge["survivor"], merge["retired"]) for merge in merges]


def close(actual, expected, name):
    np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("inner", [SGD, ADAMW])
def test_merges(inner, fixed):
    """Requests are written into the state, so that nothing but trainers and merges is tested."""
    run = fixed[inner]
    state = run.init(oracle.make_params())
    seen, merges = oracle.run_trainers(
        oracle.make_params(),
        stream,
        lambda round_, number, _: REQUESTS[round_ + 1][number],
        rounds=6,
        start=REQUESTS[0],
        regions=REGIONS,
        period=PERIOD,
        merge_every=2,
        inner=inner[0],
        outer=oracle.Nesterov(0.5, 0.6),
    )
    found = []
    for round_, want in enumerate(seen):
        asked = {i: t.replace(request=REQUESTS[round_][i]) for i, t in state.trainers.items()}
        state, history = run.run(state.replace(trainers=asked), stream, rounds=1)
        found += merges_of(history)
        check(state, want, f"round {round_}")
        if round_ == 1:
            check_mean(state, want, REQUESTS[round_])
    assert found == merges and len(found) == 2


def check_mean(state, want, requests):
    """What is evaluated: the mean over trainers, weighted by what they ask for."""
    assert len(want) == 3
    shares = np.array([requests[i] for i in want], float) / sum(requests[i] for i in want)
    for key, value in lc.global_params(state).items():
        mean = sum(share * one.anchor[key] for share, one in zip(shares, want.values()))
        close(value, mean, f"mean {key}")
        assert lc.region_params(state)[key].shape == (REGIONS, *mean.shape)


def schedule(samples):
    return 1 / (1 + samples / 300)


def test_whole_run():
    """Norm test, switch to accumulation, merges, learning rate with the batch and with samples."""
    policy = NormTest(start=2, cap=40, eta=1.1, microbatches=3, smoothing=0.3)
    run = engine(SGD[1], policy, Trainers(3, 2), 4, scaling="sqrt", schedule=schedule)
    state = run.init(oracle.make_params())

    def samples_of(asked):
        """Microbatches of 2 and 4; whatever is more is accumulated."""
        return 2 if asked <= 2 else 4 * math.ceil(asked / 4)

    def decide(round_, number, instance):
        m = 4 if samples_of(instance.asks) >= 3 * 4 else 2
        asked = oracle.norm_test(instance, number, stream, m, 3, 1.1, 0.3)
        return max(instance.asks, math.ceil(min(asked, 40)))

    seen, merges = oracle.run_trainers(
        oracle.make_params(),
        stream,
        decide,
        rounds=6,
        start={0: 2, 1: 2, 2: 2},
        regions=REGIONS,
        period=PERIOD,
        merge_every=2,
        inner=SGD[0],
        outer=oracle.Nesterov(0.5, 0.6),
        samples_of=samples_of,
        factor=lambda consumed, b: math.sqrt(b / 2) * schedule(consumed),
    )
    found = []
    for round_, want in enumerate(seen):
        state, history = run.run(state, stream, rounds=1)
        found += merges_of(history)
        assert state.requests == {i: w.asks for i, w in want.items()}, round_
        check(state, want, f"round {round_}")
    assert found == merges and len(found) == 2
    asked = [w.asks for want in seen for w in want.values()]
    assert 12 < max(asked) <= 40 and len(set(asked)) > 3  # the test did decide
    total = run.finish(state)
    for key, value in seen[-1][next(iter(state.trainers))].anchor.items():
        close(lc.global_params(total)[key], value, key)
