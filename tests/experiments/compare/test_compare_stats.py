"""Intervals, interpolation and pairing, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from experiments.compare.costs import mean_costs
from experiments.compare.stats import (
    against_margin,
    crossing,
    effect_size,
    estimate,
    holm,
    paired,
    paired_share,
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


def test_a_group_much_noisier_than_the_others_is_not_called_sure_too_often():
    """15 groups without any effect, one of them ten times as noisy: with the degrees of freedom of
    all, that one would have p < 0.05 in a sixth of the draws."""
    draw, sure, tries = np.random.default_rng(0), 0, 300
    for _ in range(tries):
        groups = {i: draw.standard_normal(3) * (10 if i == 0 else 1) for i in range(15)}
        sure += against_margin(groups, 0.0)[0].p < 0.05
    assert sure / tries < 0.09


def test_groups_lend_each_other_their_spread():
    groups = {"quiet": [1.0, 1.2, 0.8], "loud": [5.0, 7.0, 3.0], "one": [9.0]}
    found = against_margin(groups, margin=0.5)
    # Squares about the means: 0.08 and 8; pooled over 2 + 2 degrees of freedom: 2.02.
    # t(97.5 %) for 4 degrees of freedom: 2.776445. The loud group has its own variance, 4, a
    # hundred times the other's, and its own 2 degrees of freedom: 4.302653.
    assert found["quiet"].half == pytest.approx(2.776445 * math.sqrt(2.02 / 3), rel=1e-6)
    assert found["loud"].half == pytest.approx(4.302653 * math.sqrt(4 / 3), rel=1e-6)
    t = (5.0 - 0.5) / math.sqrt(4 / 3)  # for 2 degrees of freedom, in closed form
    assert found["loud"].p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert found["loud"].mean == 5.0 and "one" not in found
    # Of variances 0.04 and 0.09 neither is clearly larger: F = 2.25 has p = 0.31.
    found = against_margin({"quiet": [1.0, 1.2, 0.8], "other": [5.0, 5.3, 4.7]}, margin=0.5)
    assert found["other"].half == pytest.approx(2.776445 * math.sqrt(0.09 / 3), rel=1e-6)
    assert against_margin({"one": [9.0]}, 0.0) == {}
    assert against_margin({"same": [1.0, 1.0]}, 0.0)["same"].p == 0.0


def test_one_group_is_an_ordinary_t_test():
    values = [0.3, 0.1, 0.2, 0.5]
    found, usual = against_margin({"a": values}, 0.0)["a"], estimate(values)
    assert (found.mean, found.half) == pytest.approx((usual.mean, usual.half))
    stats = pytest.importorskip("scipy.stats")
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)


def test_a_true_margin_is_rejected_in_five_of_a_hundred_cases():
    """Also where spreads differ by a factor of three, which the pool does not assume away."""
    rng, spread = np.random.default_rng(0), np.array([1.0, 1.0, 3.0, 1.0])
    draws = 0.7 + spread[:, None] * rng.standard_normal((1500, 4, 3))
    p = [
        [test.p for test in against_margin(dict(enumerate(groups)), 0.7).values()]
        for groups in draws
    ]
    assert (np.array(p) < 0.05).mean() < 0.055
