"""Regions of different speed arrive when they are done, and wait for nobody (arXiv 2401.09135).

One step of the run is one tick: an inner step of the fastest region. A region of speed v makes
floor(t v / max v) inner steps in t ticks and arrives after every n_v of them. n_v is H, or with
dynamic local updates (eq. 6 there) max(1, floor(v / max v H)), so that all arrive about together.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from fractions import Fraction
from typing import ClassVar

import numpy as np

from lowcomm_jax.schedule.base import (
    Admission,
    Adopt,
    Drop,
    Move,
    Paced,
    Send,
    Stage,
    View,
    Wait,
)
from lowcomm_jax.state.train_state import SyncCounters


@dataclasses.dataclass(frozen=True)
class Arrivals(Paced):
    """One fragment that each region sends at steps of its own. See `Schedule` for other fields.

    Attributes:
      period: H, inner steps of the fastest region between two arrivals.
      speeds: inner steps per second of each region, in any unit, `[R]`.
      dynamic: dynamic local updates; without them every region makes H steps between arrivals.
    """

    period: int
    speeds: tuple[float, ...]
    dynamic: bool = True
    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    admission: ClassVar[Admission] = Admission(quorum=1, grace=0.0, weights="given")
    most: ClassVar[int | None] = 1

    def local_steps(self) -> list[int]:
        """Inner steps of each region between two arrivals, at least 1."""
        if not self.dynamic:
            return [self.period] * len(self.speeds)
        return [max(1, int(share * self.period)) for share in shares(self.speeds)]

    def made(self, step: int, regions: int) -> np.ndarray:
        del regions
        return np.array([int(step * share) for share in shares(self.speeds)])

    def senders(self, step: int, regions: int) -> np.ndarray:
        del regions
        each = zip(shares(self.speeds), self.local_steps())
        made = [(int((step - 1) * share), int(step * share), n) for share, n in each]
        return np.array([before < now and now % n == 0 for before, now, n in made])

    def rounds_by(self, step: int) -> int:
        """How many arrivals there are until a tick, itself included."""
        each = zip(shares(self.speeds), self.local_steps())
        return sum(int(step * share) // n for share, n in each)

    def opens(self, number: int) -> int:
        """The tick of arrival `number`, from 0; -1 = before all of them."""
        slowest = max(n / share for share, n in zip(shares(self.speeds), self.local_steps()))
        ticks = range(math.ceil((number + 1) * slowest) + 1)
        return bisect.bisect_right(ticks, number, key=self.rounds_by)

    def due(self, step: int, counters: SyncCounters) -> tuple[int, ...]:
        del counters
        return (0,) if self.senders(step, len(self.speeds)).any() else ()

    def acts_by_rounds(self, step: int, view: View) -> Stage:
        """Each round is one arrival; see `methods.async_local_sgd`.

        It moves the anchor of all; whose it is adopts that. A region that has arrived stands still
        until then. Who has no round before the run's last one takes its payload back, and those
        steps travel with the last synchronisation.
        """
        agreed = view.agreed
        if agreed.over:
            return tuple(Drop(key) for key, _ in view.flights)
        if agreed.arrived:
            key = agreed.key(0, step, view.flights if agreed.ours else [])
            return Move(key), Adopt(0, key, np.array([agreed.ours]))
        if view.flights:
            return (Wait(),)
        steps = step - max(0, int(view.counters.last_landed[0, 0]))
        arrives = steps >= self.local_steps()[agreed.region] and not view.away
        return (Send((0,)),) if arrives else ()

    def sends(self, step: int, view: View) -> Stage:
        sends = super().sends(step, view)
        return tuple(s._replace(admitted=self.senders(step, view.regions)) for s in sends)

    def violations(self, regions: int) -> list[str]:
        return pace_violations(self.period, self.speeds, regions)


def pace_violations(period: int, speeds: tuple[float, ...], regions: int) -> list[str]:
    """What is wrong with a period and the speeds of regions, one line with its fix each."""
    problems = []
    if not np.issubdtype(np.asarray(period).dtype, np.integer):
        problems.append(f"period={period}: must be a whole number of inner steps")
    elif period < 1:
        problems.append(f"period={period}: at least 1 inner step is needed")
    if len(speeds) != regions:
        problems.append(f"speeds: {len(speeds)} values for {regions} regions; give {regions}")
    if not speeds or min(speeds) <= 0:
        problems.append(f"speeds={speeds}: every region needs a positive speed")
    return problems


@functools.lru_cache(maxsize=16)
def shares(speeds: tuple[float, ...]) -> tuple[Fraction, ...]:
    """v / max v, exact, so that every region agrees on when another one steps."""
    exact = [Fraction(str(v)) for v in speeds]
    fastest = max(exact)
    return tuple(v / fastest for v in exact)
