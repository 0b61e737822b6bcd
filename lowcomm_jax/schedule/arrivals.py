"""Regions of different speed arrive when they are done, and wait for nobody (arXiv 2401.09135).

Time is counted in ticks (`pace`). A region arrives after every n of its inner steps: H, or with
dynamic local updates as many as fit between two arrivals of the fastest (`Pace.local_steps`).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
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
    paced_violations,
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
    speeds: tuple[float, ...] = dataclasses.field()  # without a default
    dynamic: bool = True
    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    admission: ClassVar[Admission] = Admission(quorum=1, grace=0.0, weights="given")
    most: ClassVar[int | None] = 1

    def local_steps(self) -> np.ndarray:
        """Inner steps of each region between two arrivals, int64 `[R]`."""
        return self.pace.local_steps(self.period, self.dynamic)

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        del counters
        arrives = self.pace.arrives(step, self.local_steps())
        return (Send((0,), arrives),) if arrives.any() else ()

    def rounds_by(self, step: int) -> int:
        """How many arrivals there are until a tick, itself included."""
        return int(np.sum(self.pace.made(step, len(self.speeds)) // self.local_steps()))

    def opens(self, number: int) -> int:
        """The tick of arrival `number`, from 0; -1 = before all of them."""
        slowest = max(int(n) / share for share, n in zip(self.pace.shares, self.local_steps()))
        ticks = range(math.ceil((number + 1) * slowest) + 1)
        return bisect.bisect_right(ticks, number, key=self.rounds_by)

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

    def violations(self, regions: int) -> list[str]:
        return paced_violations(self, regions)
