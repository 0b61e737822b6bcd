"""The goodput simulation of Decoupled DiLoCo (arXiv 2604.21428) beside the planner's.

The table is second-hand: two notes that agree. Published are the chips and one interrupt of a chip
a year. What an interrupt costs is not: it is fitted to the table (`planner.goodput.FITTED`).
"""

from collections.abc import Mapping

from evidence.published.figures import PublishedFigure
from lowcomm_jax.planner.goodput import DECOUPLED, DP, ELASTIC_DP, FITTED, METHODS, Fleet
from lowcomm_jax.planner.goodput_simulation import plan_goodput

SOURCE = "arXiv 2604.21428, goodput simulation (two notes that agree)"
# Goodput in per cent by chips; a number is M of Decoupled DiLoCo.
PUBLISHED: Mapping[int, Mapping[str | int, float]] = {
    150_000: {DP: 72, ELASTIC_DP: 88, 2: 94, 4: 96, 8: 98, 16: 99},
    300_000: {DP: 57, ELASTIC_DP: 80, 2: 88, 4: 93, 8: 96, 16: 98},
    600_000: {DP: 38, ELASTIC_DP: 69, 2: 80, 4: 89, 8: 94, 16: 96},
    1_200_000: {DP: 27, ELASTIC_DP: 58, 2: 70, 4: 82, 8: 88, 16: 93},
    2_400_000: {DP: 18, ELASTIC_DP: 40, 2: 54, 4: 73, 8: 80, 16: 86},
}
DILOCO_REGIONS = 8  # of columns without M


def published_fleet(chips: int, regions: int) -> Fleet:
    """A fleet of the published simulation: one interrupt of a chip a year, costs as fitted."""
    elastic, restart = FITTED["elastic"], FITTED["dp"]
    return Fleet(
        regions=even_regions(chips, regions),
        stop_s=elastic.stop_s,
        restart_s=restart.stop_s,
        overhead=elastic.overhead,
        restart_overhead=restart.overhead,
    )


def goodput_table() -> list[PublishedFigure]:
    """Compare every published figure, by our simulation."""
    found = []
    for chips, row in PUBLISHED.items():
        for column, theirs in row.items():
            method = column if column in METHODS else DECOUPLED
            regions = DILOCO_REGIONS if column in METHODS else column
            (ours,) = plan_goodput(published_fleet(chips, regions), [method])
            what = f"{chips:,} chips, {METHODS[method].title}"
            what += "" if column in METHODS else f", M = {column}"
            given = 100 * ours.goodput, (theirs, theirs), SOURCE, "second-hand"
            found.append(PublishedFigure(what, "%", *given))
    return found


def even_regions(chips: int, regions: int) -> tuple[int, ...]:
    """Cut a number of chips into regions that differ by one chip at most."""
    return tuple(chips * (i + 1) // regions - chips * i // regions for i in range(regions))
