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
    InnerProductTest,
    NormTest,
    Statistics,
    pooled,
)

D = 40
MEAN = np.linspace(0.2, 1.4, D)
SCALE = np.linspace(3.0, 0.5, D)  # not isotropic, so that a mean over components shows
ETA, THETA, NU = 0.3, 0.07, 0.4


def asked(policy, stats, batch=1):
    return policy.decide(policy.init(), stats, batch)[1]


def test_decisions_are_the_published_formulas():
    """M = 5 regions with one microbatch of 3 samples each; every factor of the formulas shows."""
    g_MxD = draw(np.random.default_rng(1), MEAN, SCALE, 5, 3)
    expected = published(g_MxD, 3, ETA, THETA, NU)
    stats = statistics(g_MxD[:, None], 3, "across")
    common = {"start": 1, "cap": None, "scope": "across", "microbatches": 1, "debias": False}
    norm = NormTest(eta=ETA, **common)
    inner = InnerProductTest(theta=THETA, **common)
    both = AugmentedTest(theta=THETA, nu=NU, **common)
    loose = AugmentedTest(theta=50.0, nu=0.01, **common)
    assert asked(norm, stats) == math.ceil(expected["norm"])
    assert asked(inner, stats) == math.ceil(expected["inner"])
    assert asked(both, stats) == math.ceil(max(expected["inner"], expected["orthogonal"]))
    # The orthogonal part binds when it is the larger one: summed over components, not averaged.
    assert asked(loose, stats) == math.ceil(expected["orthogonal"] * (NU / 0.01) ** 2)
    assert min(expected.values()) > 2, "a batch of 1 would hide a wrong factor"


@pytest.mark.parametrize("scope", ["within", "across"])
def test_the_debiased_norm_test_does_not_depend_on_the_batch(scope):
    """tr Sigma / (M eta^2 ||g||^2) a microbatch; biased, small batches would ask for far less."""
    trace, g2 = float(np.sum(SCALE**2)), float(MEAN @ MEAN)
    policy = NormTest(start=1, cap=None, eta=ETA, smoothing=0.0, microbatches=2, scope=scope)
    regions, rounds = 3, 4000
    for b in (1, 4, 32):
        rng = np.random.default_rng([7, b])
        g = draw(rng, MEAN, SCALE, rounds * regions * 2, b).reshape(rounds, regions, 2, D)
        each = [statistics(one, b, scope) for one in g]
        signal = np.array([s.signal for s in each])
        noise = np.array([s.variance_along + s.variance_across for s in each])
        # The mean of a ratio is not the ratio of means: each part is tested, then their quotient.
        assert abs(signal.mean() - g2) < 4 * signal.std() / np.sqrt(rounds)
        assert abs(noise.mean() - trace) < 4 * noise.std() / np.sqrt(rounds)
        mean = dataclasses.replace(
            each[0],
            gbar2=np.mean([s.gbar2 for s in each]),
            spread=np.mean([s.spread for s in each]),
            along=np.mean([s.along for s in each]),
        )
        per_microbatch = trace / (mean.microbatches * ETA**2 * g2)
        expected = per_microbatch * 2  # a region's step is two microbatches
        assert asked(policy, mean) == pytest.approx(expected, rel=0.03, abs=1)
        biased = dataclasses.replace(policy, debias=False)
        if b == 1:
            assert asked(biased, mean) < 0.75 * expected


def test_a_region_alone_and_regions_together_split_the_same_need():
    """`across` tests the mean over R regions: each needs 1 / R of what a region alone needs."""
    stats = Statistics(1, 1, 6, 2, gbar2=5.0, spread=30.0, along=6.0)
    together = dataclasses.replace(stats, regions=3)
    policy = NormTest(start=1, cap=None, eta=0.1)
    assert asked(policy, stats) == math.ceil(2 * 30 / 5 / (0.01 * (5 - 30 / 30)))
    assert asked(policy, together) == math.ceil(2 * 30 / 5 / (0.01 * (5 - 30 / 30)) / 3)


STATS = Statistics(2, 2, 3, 4, gbar2=2.0, spread=6.0, along=1.5)  # signal 1.5, v 1.5, w 4.5


def test_smoothing_averages_the_statistics_and_not_the_batch():
    policy = NormTest(start=1, cap=None, eta=0.5, smoothing=0.75, monotone=False)
    louder = dataclasses.replace(STATS, spread=60.0, gbar2=20.0, along=3.0)
    state, first = policy.decide(policy.init(), STATS, 1)
    assert first == math.ceil(6 / (0.25 * 1.5))
    state, second = policy.decide(json.loads(json.dumps(state)), louder, first)
    noise = (0.75 * 6 + 60) / 1.75
    signal = (0.75 * 1.5 + (20 - 60 / 4 / 3)) / 1.75
    assert second == math.ceil(noise / (0.25 * signal))


def test_batches_are_monotone_capped_and_slowed_as_asked():
    policy = NormTest(start=2, cap=10, eta=0.5)  # asks for 16
    assert asked(policy, STATS) == 10
    assert asked(dataclasses.replace(policy, cap=None), STATS, 20) == 20
    free = dataclasses.replace(policy, cap=None, monotone=False)
    assert asked(free, STATS, 20) == 16
    assert asked(dataclasses.replace(free, eta=50.0), STATS, 20) == 2
    assert asked(dataclasses.replace(policy, cap=None, growth=1.5), STATS, 6) == 9
    assert asked(dataclasses.replace(policy, cap=None, growth=1.5), STATS, 1) == 2


@pytest.mark.parametrize("gbar2", [1e-13, 0.3, float("nan"), float("inf")])
def test_without_signal_the_batch_stays(gbar2):
    """Near zero, below its own noise (debiased < 0), or not finite."""
    policy = NormTest(start=1, cap=None)
    spread = 0.0 if gbar2 < 1e-6 else 6.0
    stats = dataclasses.replace(STATS, gbar2=gbar2, spread=spread, along=0.0)
    state, batch = policy.decide(policy.init(), stats, 7)
    assert batch == 7
    if not math.isfinite(gbar2):
        assert state == policy.init()


def test_one_microbatch_in_all_has_no_variance_and_changes_nothing():
    """`across` with one microbatch a region, in a round in which one region takes part."""
    policy = NormTest(start=1, cap=None, scope="across", microbatches=1)
    values = {name: np.array([2.0, 3.0]) for name in ("gbar2", "spread", "along")}
    alone, both = (pooled(values, "across", 1, 4, np.array(who)) for who in ([0, 1], [1, 1]))
    state = policy.decide(policy.init(), both, 3)[0]
    assert both.has_variance and not alone.has_variance
    assert state != policy.init() and policy.decide(state, alone, 7) == (state, 7)


def test_a_fixed_batch_stays():
    policy = Fixed(6)
    assert policy.decide(policy.init(), STATS, 6) == ({}, 6)
    assert policy.microbatches == 0 < NormTest(start=1, cap=None).microbatches
    assert all(isinstance(p, BatchPolicy) for p in (policy, NormTest(start=1, cap=None)))


def test_bad_settings_are_named_together():
    policy = AugmentedTest(
        start=8, cap=4, theta=0.0, nu=float("nan"), smoothing=1.0, growth=1.0, shares=(1.0,)
    )
    text = "\n".join(policy.violations(2))
    for part in ("cap=4 is below start=8", "theta=0.0", "nu=nan", "smoothing=1.0", "growth=1.0"):
        assert part in text
    assert "shares=(1.0,): give 2 positive numbers" in text
    norm = NormTest(start=0, cap=None, microbatches=1)
    assert any("start=0" in line for line in norm.violations(1))
    assert any("one gradient a region has no variance" in line for line in norm.violations(1))
    across = NormTest(start=1, cap=None, microbatches=1, scope="across")
    assert across.violations(2) == []
    assert "there is no other" in across.violations(1)[0]
    assert "scope='both'" in NormTest(start=1, cap=None, scope="both").violations(2)[0]
    assert NormTest(start=1, cap=8).violations(1) == Fixed(4).violations(1) == []
