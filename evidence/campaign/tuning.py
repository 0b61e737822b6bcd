"""Learning rates of an arm at a size: successive halving (arXiv 1502.07943) on seeds of their own.

All points of the arm train for the rounds of the first rung. The best of them, by the mean final
loss over the tuning seeds, train from the start for the rounds of the next one, and so on. The best
of the last rung is used for every cell that is reported. A failed run counts as an infinite loss.
Where points next to the best were not tried, as beyond an edge of the grid, they train for the
rounds of the last rung; that is repeated `tuning.widen` times at most.

Differs from the paper: survivors start anew, because a learning-rate schedule has the length of its
run; and grids are widened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evidence.campaign.cells import Cell
from evidence.campaign.ledger import Records
from evidence.campaign.plan import Arm
from lowcomm_jax.checkpoint.load import dotted


def rungs(ledger: Records, arm: str, size: str) -> list[list[Cell]]:
    """The cells of every rung that is known: the last of them may be incomplete.

    Points beyond the grid make rungs of their own, after those of the config.
    """
    arm = ledger.campaign.arms[arm].tuned_as
    tried, found = list(ledger.campaign.arms[arm].grid), []
    alive = list(tried)
    for rounds, kept in ledger.campaign.tuning.rungs:
        found.append(cells(ledger, arm, size, alive[:kept], rounds))
        if not all(ledger.done(cell) for cell in found[-1]):
            return found
        alive = _ranked(ledger, found[-1])
    last = list(found[-1])
    for _ in range(ledger.campaign.tuning.widen):
        new = _untried(ledger.campaign.arms[arm], tried, _ranked(ledger, last)[0])
        if not new:
            break
        found.append(cells(ledger, arm, size, new, rounds))
        if not all(ledger.done(cell) for cell in found[-1]):
            break
        tried, last = tried + new, last + found[-1]
    return found


def _untried(arm: Arm, tried: Sequence[str], best: str) -> list[str]:
    """The points next to the best, on one axis each, that have not been tried."""
    points = {name: dotted(changes) for name, changes in arm.points.items()}
    found = []
    for field, value in points[best].items():
        values = sorted({of[field] for of in points.values()})
        at = values.index(value)
        for near in (values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)):
            found += [n for n, of in points.items() if of == {**points[best], field: near}]
    return [name for name in found if name not in tried]


def cells(ledger: Records, arm: str, size: str, points: Sequence[str], rounds: int) -> list[Cell]:
    """The runs of some points at a rung."""
    how = ledger.campaign.tuning
    return [
        Cell(size, arm, rounds, how.regions, how.split, seed, point, tunes=True)
        for point in points
        for seed in how.seeds
    ]


def missing(ledger: Records, arm: str, size: str) -> list[Cell]:
    """The cells that can run now; empty once the rates are known."""
    return [c for rung in rungs(ledger, arm, size) for c in rung if not ledger.done(c)]


def settled(ledger: Records, arm: str, size: str) -> str | None:
    """The best point; None while runs are missing.

    Raises:
      ValueError: no point of the last rungs has a finite loss.
    """
    known = rungs(ledger, arm, size)
    if len(known) < len(ledger.campaign.tuning.rungs) or missing(ledger, arm, size):
        return None
    last = [cell for rung in known[len(ledger.campaign.tuning.rungs) - 1 :] for cell in rung]
    best = _ranked(ledger, last)[0]
    if not math.isfinite(_mean_loss(ledger, [c for c in last if c.point == best])):
        raise ValueError(f"{arm} at {size}: no learning rates of its grid train it; widen the grid")
    return best


def left(ledger: Records, arm: str, size: str) -> list[Cell]:
    """The cells that have to run until the rates are known; of later rungs with any points.

    Points beyond the grid are among them once it is known that they run.
    """
    known = rungs(ledger, arm, size)
    found = [cell for rung in known for cell in rung if not ledger.done(cell)]
    for rounds, kept in ledger.campaign.tuning.rungs[len(known) :]:
        found += cells(ledger, arm, size, list(ledger.campaign.arms[arm].grid)[:kept], rounds)
    return found


def _ranked(ledger: Records, rung: Sequence[Cell]) -> list[str]:
    """Points of a complete rung, the best first; equal ones in the order of the grid."""
    names = list(dict.fromkeys(cell.point for cell in rung))
    order = list(ledger.campaign.arms[rung[0].arm].points)
    losses = {n: _mean_loss(ledger, [c for c in rung if c.point == n]) for n in names}
    return sorted(names, key=lambda name: (losses[name], order.index(name)))


def _mean_loss(ledger: Records, runs: Sequence[Cell]) -> float:
    return float(np.mean([ledger.loss(cell) for cell in runs]))
