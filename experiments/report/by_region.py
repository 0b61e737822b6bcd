"""Each region of a run of jobs: participation, liveness, progress, and real waiting time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from rich import box
from rich.table import Table

from experiments.printing import right
from experiments.runlog import RunLog


@dataclasses.dataclass(frozen=True)
class RegionRun:
    """One region of a run.

    Attributes:
      participation: share of the run's landings that counted its payload.
      liveness: share of the run's steps so far that this region has made itself.
      progress: its last step as a share of the run's steps.
      waited_s: seconds that it waited for bytes.
      travel_s: median seconds from its payload being computed to the arrival of the last payload;
        nan where the region saw no exchange.
    """

    participation: float
    liveness: float
    progress: float
    waited_s: float
    travel_s: float


def by_region(run: RunLog) -> list[RegionRun]:
    """The regions of a run of jobs, in order.

    Empty for a run of one process, whose regions start and end together, and for the log of a
    single job, which does not hold the others.
    """
    landings = [e for step in run.steps for e in step["events"] if "travel_seconds" in e]
    if not landings or "present" not in run.steps[0]:
        return []
    counted_LxR = np.array([e["participants"] for e in landings], bool)
    travel_LxR = np.array([e["travel_seconds"] for e in landings], float)
    waited_LxR = np.array([e["waited_seconds"] for e in landings], float)
    made_SxR = np.array([step["present"] for step in run.steps], bool)
    numbers_S = np.array([step["step"] for step in run.steps])
    found = []
    for r in range(made_SxR.shape[1]):
        seen = travel_LxR[~np.isnan(travel_LxR[:, r]), r]
        found.append(
            RegionRun(
                participation=float(counted_LxR[:, r].mean()),
                liveness=float(made_SxR[:, r].mean()),
                progress=float((numbers_S * made_SxR[:, r]).max() / run.header["steps"]),
                waited_s=float(np.nansum(waited_LxR[:, r])),
                travel_s=float(np.median(seen)) if seen.size else math.nan,
            )
        )
    return found


def table(run: RunLog, regions: list[RegionRun]) -> Table:
    """A row a region."""
    headings = ("region", "participation", "liveness", "progress", "waited", "an exchange")
    out = Table(*right(headings), box=box.SIMPLE_HEAD, title=f"regions of {run.name}")
    for number, region in enumerate(regions):
        shares = [region.participation, region.liveness, region.progress]
        cells = [f"{share:.0%}" for share in shares]
        seconds = [f"{region.waited_s:.1f} s", f"{1e3 * region.travel_s:.0f} ms"]
        out.add_row(str(number), *cells, *seconds)
    return out
