"""Intervals, interpolation and pairing, against numbers worked out by hand."""

import math

import pytest

from experiments.report.costs import mean_costs
from experiments.report.stats import crossing, estimate, paired, paired_share


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
    row |= {"skipped": 3, "networks": {}, "loss": 2.0, "tokens": 9, "bytes_sent": 1.0}
    rows = [row, {**row, "staleness": 7, "compression": 6.0}]
    found = mean_costs(rows[:seeds], seeds)
    assert found["document_interval"] == expected
    assert found["staleness"] == (2 if seeds == 1 else 7)
    assert found["compression"] == (4.0 if seeds == 1 else 5.0)
    assert found["skipped"] == 3 * seeds and found["loss"]["mean"] == 2.0
    assert mean_costs(rows[:1], 2)["document_interval"] is None  # the other seed is still to come
