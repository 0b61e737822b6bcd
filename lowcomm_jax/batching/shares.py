"""How regions of uneven hardware share a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def counts(accumulate: int, shares: Sequence[float] | None, regions: int) -> tuple[int, ...]:
    """Microbatches of each region's step.

    Shares are rounded to whole microbatches, at least 1, so that a step of one microbatch a region
    cannot be shared unevenly.

    Args:
      accumulate: microbatches of a region's step, on average over regions.
      shares: R positive numbers in any unit; None = equal.
      regions: R.
    """
    if shares is None:
        return (accumulate,) * regions
    part_R = np.asarray(shares, np.float64) / np.sum(np.asarray(shares, np.float64))
    return tuple(max(1, round(float(x))) for x in part_R * accumulate * regions)
