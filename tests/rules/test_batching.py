"""Batch tests against the published formulas and against gradients of known noise."""

import dataclasses
import json
import math

import numpy as np
import pytest
from rules.gradients import draw, published, statistics

from lowcomm_jax.rules.batching import (
    AugmentedTest,
    BatchPolicy,
    Fixed,
    NormTest,
    Statistics,
    pooled,
)

D = 40
MEAN = np.linspace(0.2, 1.4, D)
SCALE = np.linspace(3.0, 0.5, D)  # not isotropic, so that a mean over components shows
ETA, THETA, NU = 0.3, 0.07, 0.4
HUGE = 10**9


def asked(policy, stats, batch=1):
    return policy.decide(policy.init(), stats, batch)[1]


def test_decisions_are_the_published_formulas():
    """Five microbatches of 3 samples each; every factor of the formulas shows."""
    g_MxD = draw(np.random.default_rng(1), MEAN, SCALE, 5, 3)
    expected = published(g_MxD, 3, ETA, THETA, NU)
    stats = statistics(g_MxD[None], 3)
    stats = dataclasses.replace(stats, signal=stats.gbar2)  # as published
    common = {"start": 1, "cap": HUGE, "microbatches": 5}
    norm = NormTest(eta=ETA, **common)
    inner = AugmentedTest(theta=THETA, nu=math.inf, **common)
    both = AugmentedTest(theta=THETA, nu=NU, **common)
    loose = AugmentedTest(theta=50.0, nu=0.01, **common)
    assert asked(norm, stats) == math.ceil(expected["norm"])
    assert asked(inner, stats) == math.ceil(expected["inner"])
    assert asked(both, stats) == math.ceil(max(expected["inner"], expected["orthogonal"]))
    # The orthogonal part binds when it is the larger one: summed over components, not averaged.
    assert asked(loose, stats) == math.ceil(expected["orthogonal"] * (NU / 0.01) ** 2)
    assert min(expected.values()) > 2, "a batch of 1 would hide a wrong factor"


def test_the_debiased_norm_test_does_not_depend_on_the_batch():
    """tr Sigma / (eta^2 ||g||^2); biased, small batches would ask for far less."""
    trace, g2 = float(np.sum(SCALE**2)), float(MEAN @ MEAN)
    policy = NormTest(start=1, cap=HUGE, eta=ETA, smoothing=0.0, microbatches=2)
    regions, rounds = 3, 4000
    for b in (1, 4, 32):
        rng = np.random.default_rng([7, b])
        g = draw(rng, MEAN, SCALE, rounds * regions * 2, b).reshape(rounds, regions, 2, D)
        each = np.array([dataclasses.astuple(statistics(one, b)) for one in g])
        signal, noise = each[:, 1], each[:, 2] + each[:, 3]
        # The mean of a ratio is not the ratio of means: each part is tested, then their quotient.
        assert abs(signal.mean() - g2) < 4 * signal.std() / np.sqrt(rounds)
        assert abs(noise.mean() - trace) < 4 * noise.std() / np.sqrt(rounds)
        mean, expected = Statistics(*each.mean(axis=0)), trace / (ETA**2 * g2)
        assert asked(policy, mean) == pytest.approx(expected, rel=0.03, abs=1)
        if b == 1:
            biased = dataclasses.replace(mean, signal=mean.gbar2)
            assert asked(policy, biased) < 0.75 * expected


def test_regions_are_pooled():
    """Three of six microbatches of two samples. ||g||^2 is ||gbar||^2 without its noise."""
    found = pooled(np.array([(5.0, 30.0, 6.0), (6.0, 20.0, 3.0), (7.0, 40.0, 9.0)]), 6, 2)
    wanted = (6.0, 6 - 30 / 5 / 6, 2 * 6 / 5, 2 * 24 / 5)
    assert dataclasses.astuple(found) == pytest.approx(wanted, rel=1e-12)


STATS = Statistics(gbar2=2.0, signal=1.5, variance_along=1.5, variance_across=4.5)


def test_smoothing_averages_the_statistics_and_not_the_batch():
    policy = NormTest(start=1, cap=HUGE, eta=0.5, smoothing=0.75)
    louder = Statistics(gbar2=20.0, signal=15.0, variance_along=3.0, variance_across=57.0)
    state, first = policy.decide(policy.init(), STATS, 1)
    assert first == math.ceil(6 / (0.25 * 1.5))
    state, second = policy.decide(json.loads(json.dumps(state)), louder, 1)
    noise = (0.75 * 6 + 60) / 1.75
    signal = (0.75 * 1.5 + 15) / 1.75
    assert second == math.ceil(noise / (0.25 * signal))


def test_batches_are_capped_and_never_shrink():
    policy = NormTest(start=2, cap=10, eta=0.5)  # asks for 16
    assert asked(policy, STATS) == 10
    assert asked(dataclasses.replace(policy, cap=HUGE), STATS, 20) == 20
    assert asked(dataclasses.replace(policy, cap=HUGE), STATS, 2) == 16


@pytest.mark.parametrize("signal", [1e-13, -0.3, float("nan"), float("inf")])
def test_without_signal_the_batch_stays(signal):
    """Near zero, below its own noise (debiased < 0), or not finite."""
    policy = NormTest(start=1, cap=HUGE)
    state, batch = policy.decide(policy.init(), dataclasses.replace(STATS, signal=signal), 7)
    assert batch == 7
    assert (state == policy.init()) == (not math.isfinite(signal))


def test_a_fixed_batch_stays():
    policy = Fixed(6)
    assert policy.decide(policy.init(), STATS, 6) == ({}, 6)
    assert policy.microbatches == 0 < NormTest(start=1, cap=HUGE).microbatches
    assert all(isinstance(p, BatchPolicy) for p in (policy, NormTest(start=1, cap=HUGE)))


def test_bad_settings_are_named_together():
    policy = AugmentedTest(start=8, cap=4, theta=0.0, nu=float("nan"), smoothing=1.0)
    text = "\n".join(policy.violations())
    for part in ("cap=4 is below start=8", "theta=0.0", "nu=nan", "smoothing=1.0"):
        assert part in text
    norm = "\n".join(NormTest(start=0, cap=None, microbatches=1).violations())
    for part in ("start=0", "cap=None", "one gradient a region has no variance"):
        assert part in norm
    assert "Fixed" in NormTest(start=1, cap=8, microbatches=0).violations()[0]
    assert len(Fixed(0).violations()) == 1
    assert NormTest(start=1, cap=8).violations() == Fixed(4).violations() == []
