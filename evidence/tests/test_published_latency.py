"""Pair exchange against tree all-reduce."""

import math

import pytest

from evidence.published.figures import noloco_table
from evidence.published.latency import latency_table


def test_latency_table_of_the_reference():
    """Means of skewed draws: trees and pairs within 3 %, the slowest of many pairs within 6 %."""
    for entry in noloco_table():
        assert abs(entry.error) < (0.06 if "slowest" in entry.what else 0.03), entry.what


def test_without_spread_everything_is_exact():
    row = latency_table(256, 0.0, rounds=1)
    assert (row.tree, row.mean_pair, row.slowest_pair) == (16.0, 1.0, 1.0)


def test_a_pair_takes_what_the_published_formula_says():
    """E max(T1, T2) = exp(sigma**2 / 2) (1 + erf(sigma / 2))."""
    for sigma in (0.3, 1.0):
        expected = math.exp(sigma**2 / 2) * (1 + math.erf(sigma / 2))
        found = latency_table(128, sigma, rounds=4000).mean_pair
        assert found == pytest.approx(expected, rel=0.01)


def test_bad_input():
    with pytest.raises(ValueError, match="100 is no power of two: use 64 or 128"):
        latency_table(100, -1.0, rounds=0)
