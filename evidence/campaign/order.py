"""The next runs of a campaign: those that give the next verdict for the fewest core-hours.

A step is every cell that one claim still lacks at one rung: its seeds of both arms, and the tuning
of these arms at that size. Stages come one after another. Within a stage the cheapest step comes
first. Cells that claims share run once, so that a step makes others cheaper.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from evidence.campaign import tuning
from evidence.campaign.cells import Cell
from evidence.campaign.estimate import Seconds
from evidence.campaign.ledger import Records
from evidence.campaign.plan import Claim, Rung

UNKNOWN = ""  # the point of a cell whose arm is not tuned yet


@dataclasses.dataclass(frozen=True)
class Step:
    """The cells that one claim lacks at one rung.

    Attributes:
      tunes: cells that settle learning rates; of later rungs with any points.
      cells: that are reported; their point is `UNKNOWN` while their arm is not tuned.
      seconds: core-seconds of both.
    """

    stage: str
    claim: str
    rung: Rung
    tunes: tuple[Cell, ...]
    cells: tuple[Cell, ...]
    seconds: float

    @property
    def runs(self) -> tuple[Cell, ...]:
        """All of its cells."""
        return *self.tunes, *self.cells


class Points:
    """The settled learning rates of every (arm, size); looked up once."""

    def __init__(self, ledger: Records):
        self._ledger = ledger
        self._known: dict[tuple[str, str], str] = {}
        self.hopeless: dict[tuple[str, str], str] = {}

    def of(self, arm: str, size: str) -> str:
        """The point's name, `UNKNOWN` if tuning is not complete or found none (`hopeless`)."""
        arm = self._ledger.campaign.arms[arm].tuned_as
        key = arm, size
        if self._known.get(key, UNKNOWN) == UNKNOWN and key not in self.hopeless:
            try:
                found = tuning.settled(self._ledger, arm, size)
                self._known[key] = UNKNOWN if found is None else found
            except ValueError as error:
                self.hopeless[key] = str(error)
        return self._known.get(key, UNKNOWN)


def cells_of(claim: Claim, rung: Rung, seeds: tuple[int, ...], points: Points) -> list[Cell]:
    """The cells behind a claim at a rung, a seed after the other."""
    return [
        Cell(rung.size, arm, rung.rounds, rung.regions, rung.split, seed, points.of(arm, rung.size))
        for seed in seeds
        for arm in (claim.here, claim.there)
    ]


def ordered(ledger: Records, seconds: Seconds) -> Iterator[Step]:
    """Steps in the order in which they should run, each with what the steps before it leave."""
    points, tunes, planned = Points(ledger), {}, set()
    price = functools.cache(seconds)
    for stage in ledger.campaign.stages:
        waiting = []
        for claim in ledger.campaign.claims.values():
            for rung, seeds in claim.ladder.get(stage, {}).items():
                lacks = _lacking(ledger, points, tunes, claim, rung, seeds)
                waiting.append((claim.name, rung, lacks))
        while True:
            left = [
                (*of, [cell for cell in lacks if cell not in planned]) for *of, lacks in waiting
            ]
            waiting = [one for one in left if one[2]]
            if not waiting:
                break
            best = min(waiting, key=lambda one: sum(map(price, one[2])))
            name, rung, cells = best
            planned |= set(cells)
            parts = ([cell for cell in cells if cell.tunes is kind] for kind in (True, False))
            yield Step(stage, name, rung, *map(tuple, parts), sum(map(price, cells)))


def _lacking(ledger, points, tunes, claim: Claim, rung: Rung, seeds) -> list[Cell]:
    """The cells that a claim lacks at a rung, each once; `tunes` collects those of the tuning."""
    found, arms = [], ledger.campaign.arms
    for arm in dict.fromkeys(arms[name].tuned_as for name in (claim.here, claim.there)):
        key = arm, rung.size
        if points.of(*key) == UNKNOWN and key not in tunes:
            tunes[key] = tuning.left(ledger, *key)
        if key in points.hopeless:
            return []
        found += tunes.get(key, [])
    cells = cells_of(claim, rung, seeds, points)
    found += [cell for cell in cells if cell.point == UNKNOWN or not ledger.done(cell)]
    return list(dict.fromkeys(found))


def runnable(ledger: Records, step: Step) -> Iterator[Cell]:
    """The cells of a step that can run now; those of untuned arms follow once they are tuned."""
    for arm, size in dict.fromkeys((cell.arm, cell.size) for cell in step.tunes):
        yield from tuning.missing(ledger, arm, size)
    yield from (cell for cell in step.cells if cell.point != UNKNOWN)
