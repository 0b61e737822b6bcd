"""Goodput beside the published table: the closed form, what is fitted to it, and the simulation."""

import json
from pathlib import Path

import numpy as np
import pytest

from evidence.published.goodput import (
    DILOCO_REGIONS,
    PUBLISHED,
    goodput_table,
    published_fleet,
)
from lowcomm_jax.planner.goodput import (
    DECOUPLED,
    DP,
    ELASTIC_DP,
    FITTED,
    METHODS,
    YEAR_S,
    closed_form,
)
from lowcomm_jax.planner.goodput_simulation import plan_goodput

ELASTIC_COLUMNS = (ELASTIC_DP, 2, 4, 8, 16)


def closed(chips, column):
    """Of a job on its own, which a learner is on its share of the chips."""
    stop = FITTED["dp" if column == DP else "elastic"]
    share = column if isinstance(column, int) else 1
    return closed_form(YEAR_S * share / chips, stop.stop_s, stop.overhead)


def largest_error(ours, columns):
    """The largest distance to `PUBLISHED` in percentage points."""
    return max(abs(100 * row[c] - PUBLISHED[n][c]) for n, row in ours.items() for c in columns)


def test_the_closed_form_is_within_three_points_of_every_published_cell():
    ours = {chips: {c: closed(chips, c) for c in row} for chips, row in PUBLISHED.items()}
    for chips, row in PUBLISHED.items():
        for column, published in row.items():
            assert abs(100 * ours[chips][column] - published) < 3.0, (chips, column)
    assert largest_error(ours, ELASTIC_COLUMNS) == pytest.approx(2.64, abs=0.01)
    assert largest_error(ours, (DP,)) == pytest.approx(2.68, abs=0.01)


@pytest.mark.parametrize(
    ("name", "columns", "points"), [("elastic", ELASTIC_COLUMNS, 2.65), ("dp", (DP,), 2.68)]
)
def test_the_fitted_values_have_the_smallest_largest_error(name, columns, points):
    """A grid of both values finds none that is better by more than its own width."""
    cells = [(chips, c, PUBLISHED[chips][c]) for chips in PUBLISHED for c in columns]
    mtbf = np.array([(c if isinstance(c, int) else 1) * YEAR_S / chips for chips, c, _ in cells])
    published = np.array([value for _, _, value in cells])
    overhead, stop = np.meshgrid(np.arange(0, 0.2, 5e-4), np.arange(0, 100, 0.1), indexing="ij")
    goodput = 100 * (1 - overhead[..., None]) / (1 + stop[..., None] / mtbf)
    errors = np.abs(goodput - published).max(axis=-1)
    best = np.unravel_index(errors.argmin(), errors.shape)
    assert errors.min() == pytest.approx(points, abs=0.02)
    assert overhead[best] == pytest.approx(FITTED[name].overhead, abs=2e-3)
    assert stop[best] == pytest.approx(FITTED[name].stop_s, abs=0.5)


def test_every_figure_is_within_three_points():
    for figure in goodput_table():
        assert abs(figure.ours - figure.published[0]) < 3.0, figure.what


def test_all_methods_as_written():
    """`goodput.json`: what the simulation gives with six digits, DiLoCo and Streaming included."""
    written = json.loads(Path(__file__).with_name("goodput.json").read_text())["rows"]
    for row in written:
        of = published_fleet(row["chips"], row["regions"])
        (found,) = plan_goodput(of, [row["method"]])
        for name in ("goodput", "uptime"):
            assert float(f"{getattr(found, name):.6g}") == row[name], row
    decoupled = {row["regions"] for row in written if row["method"] == DECOUPLED}
    others = {row["method"] for row in written if row["regions"] == DILOCO_REGIONS}
    assert decoupled == {2, 4, 8, 16} and others == set(METHODS)
