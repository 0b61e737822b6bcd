"""Intervals, interpolation and pairing, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from experiments.compare.costs import mean_costs
from experiments.compare.stats import (
    Spread,
    against_margin,
    crossing,
    effect_size,
    estimate,
    holm,
    paired,
    paired_share,
    spread_of,
)


def test_interval_over_three_seeds():
    found = estimate([2.0, 2.6, 2.3])
    # s = 0.3; Student's t for 2 degrees of freedom, 97.5 %: 4.302653
    assert found.mean == pytest.approx(2.3) and found.count == 3
    assert found.half == pytest.approx(4.302653 * 0.3 / math.sqrt(3), rel=1e-6)


def test_interval_needs_two_values_and_skips_missing_ones():
    assert estimate([None, 1.5, None]) == estimate([1.5])
    assert estimate([1.5]).half is None and estimate([1.5]).verdict == "one seed, no interval"
    assert estimate([None]).mean is None and estimate([None]).verdict == "nothing to compare"
    two = estimate([1.0, None, 1.4])
    assert two.half == pytest.approx(12.706205 * 0.2, rel=1e-6) and two.count == 2


@pytest.mark.parametrize(
    "values, verdict",
    [
        ((-0.30, -0.31, -0.32), "lower"),
        ((0.30, 0.31, 0.32), "higher"),
        ((-0.30, 0.20, -0.10), "no evidence of a difference"),
        ((0.0, 0.0, 0.0), "no evidence of a difference"),
    ],
)
def test_verdicts(values, verdict):
    assert estimate(values).verdict == verdict


def steps_to(losses, target):
    found = crossing(losses, target)
    return found and found.of([10 * i for i in range(len(losses))])


def test_a_target_is_interpolated_at_the_first_crossing():
    losses = (6.0, 4.0, 3.0, 3.4, 2.0)
    assert steps_to(losses, 3.3) == pytest.approx(10 + 10 * 0.7)
    assert steps_to(losses, 3.0) == 20
    assert steps_to(losses, 6.5) == 0
    assert steps_to(losses, 2.3) == pytest.approx(30 + 10 * 1.1 / 1.4)
    assert steps_to(losses, 1.9) is None
    # A loss that was not finite gives no line to interpolate on.
    assert steps_to((6.0, None, 3.0), 4.0) == 20


def test_pairs_need_both_seeds():
    here, there = {"0": 2.0, "1": 3.0, "2": None}, {"0": 2.5, "2": 1.0}
    assert paired(here, there) == {"0": -0.5, "1": None, "2": None}
    assert paired_share(here, there) == {"0": pytest.approx(-0.2), "1": None, "2": None}
    assert paired_share({"0": 2.0}, {"0": 0.0}) == {"0": None}


@pytest.mark.parametrize(("seeds", "expected"), [(1, 0.3), (2, None)])
def test_one_seed_has_its_interval_over_documents(seeds, expected):
    """With several seeds the interval is over seeds, and that of one run says nothing of it."""
    row = {"compression": 4.0, "staleness": 2, "document_interval": 0.3, "exchanges": 5}
    row |= {"skipped": 3, "networks": {}}
    rows = [row, {**row, "staleness": 7, "compression": 6.0}]
    found = mean_costs(rows[:seeds], seeds)
    assert found["document_interval"] == expected
    assert found["staleness"] == (2 if seeds == 1 else 7)
    assert found["compression"] == (4.0 if seeds == 1 else 5.0)
    assert found["skipped"] == 3 * seeds
    assert mean_costs(rows[:1], 2)["document_interval"] is None  # the other seed is still to come


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1, and never below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == [] and holm([0.03]) == [0.03]


def test_an_effect_size_by_hand():
    # Mean 2, standard deviation 1, and 1 - 3 / (4 * 3 - 5) = 4 / 7.
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2 * 4 / 7)
    assert effect_size([-1.0, -2.0, -3.0]) == pytest.approx(-2 * 4 / 7)
    assert effect_size([1.0, 2.0]) is None and effect_size([2.0, 2.0, 2.0]) is None


def test_groups_lend_each_other_their_spread():
    # Equal variances of 0.04: no more apart than by chance, so that all four degrees of freedom
    # are everyone's. Student's t for 4, 97.5 %: 2.776445.
    alike = [[1.0, 1.2, 0.8], [5.0, 5.2, 4.8]]
    spread = spread_of(alike)
    assert spread == Spread(pytest.approx(0.04), math.inf, 4)
    found = against_margin(alike[1], 4.5, spread)
    assert found.mean == 5.0
    assert found.half == pytest.approx(2.776445 * 0.2 / math.sqrt(3), rel=1e-6)
    t = 0.5 / (0.2 / math.sqrt(3))
    x = t / math.sqrt(4 + t * t)  # for 4 degrees of freedom, in closed form
    assert found.p == pytest.approx(1 - x * (3 - x * x) / 2, rel=1e-9)
    # A prior of 2 degrees of freedom weighs as much as three values: (2 * 0.01 + 2 * 0.04) / 4.
    found = against_margin(alike[1], 4.5, Spread(0.01, 2.0, 100))
    assert found.half == pytest.approx(2.776445 * math.sqrt(0.025 / 3), rel=1e-6)
    assert against_margin(alike[1], 4.5, Spread(0.01, 2.0, 3)).half > found.half  # none has more


def test_the_spread_of_known_variances_is_found():
    """Variances drawn as 0.5 times 6 over a chi-square of 6; groups of three and of five."""
    draw = np.random.default_rng(0)
    sigma = np.sqrt(0.5 * 6 / draw.chisquare(6, 6000))
    groups = [s * draw.standard_normal(3 + 2 * (i % 2)) for i, s in enumerate(sigma)]
    found = spread_of(groups)
    assert found.degrees == pytest.approx(6, rel=0.1) and found.variance == pytest.approx(0.5, 0.05)
    assert found.known == 6000 * 3


@pytest.mark.parametrize(
    "sigma, rare",
    [
        (lambda draw, n: np.ones(n), 0.002),
        (lambda draw, n: 1 / np.sqrt(draw.chisquare(3, n)), 0.002),
        (lambda draw, n: np.exp(0.7 * draw.standard_normal(n)), 0.002),
        (lambda draw, n: np.where(draw.random(n) < 0.1, 5.0, 1.0), 0.004),
    ],
    ids=["equal", "as assumed", "log-normal", "a tenth much noisier"],
)
def test_a_true_margin_is_rejected_about_as_often_as_p_says(sigma, rare):
    """Over all groups, also where their variances are not what is assumed.

    Where a few are far noisier than all others, small p-values are too small by three times.
    """
    draw, p = np.random.default_rng(0), []
    for _ in range(150):
        groups = 0.7 + sigma(draw, 100)[:, None] * draw.standard_normal((100, 3))
        spread = spread_of(groups)
        p += [against_margin(group, 0.7, spread).p for group in groups]
    assert (np.array(p) < 0.05).mean() < 0.06
    assert (np.array(p) < 0.001).mean() < rare


def test_one_group_is_an_ordinary_t_test():
    values = [0.3, 0.1, 0.2, 0.5]
    found, usual = against_margin(values, 0.0, spread_of([values])), estimate(values)
    assert (found.mean, found.half) == pytest.approx((usual.mean, usual.half))
    stats = pytest.importorskip("scipy.stats")
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)


def test_groups_without_any_spread():
    same = [1.0, 1.0, 1.0]
    assert against_margin(same, 0.0, spread_of([same])).p == 0.0
    assert against_margin(same, 1.0, spread_of([same, same])).p == 1.0
    # Beside others, equal values are chance.
    assert 0 < against_margin(same, 0.0, spread_of([same, [1.0, 2.0, 4.0]])).p < 1
    assert spread_of([]).known == 0
