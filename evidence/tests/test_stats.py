"""Moderated t-tests against numbers worked out by hand, and their errors on drawn groups."""

import math

import numpy as np
import pytest

from evidence.results.stats import Spread, against_margin, effect_size, spread_of
from experiments.report.stats import estimate


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
