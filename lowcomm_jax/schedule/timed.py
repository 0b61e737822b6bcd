"""Rounds of a fixed time, in which regions make different numbers of inner steps.

One step of the run is one tick: an inner step of the fastest region. A region of speed v makes
floor(t v / max v) inner steps in t ticks. All meet after every H ticks. With numbers of steps in
place of speeds, and H the largest of them, every region makes its own number in each round.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from lowcomm_jax.schedule.arrivals import pace_violations, shares
from lowcomm_jax.schedule.base import Schedule, Send, Stage, View
from lowcomm_jax.state.train_state import SyncCounters


@dataclasses.dataclass(frozen=True)
class Timed(Schedule):
    """All parameters every H ticks, from those that have made a step. See `Schedule`.

    Who has made none since it last took part is absent: it neither counts nor adopts.

    Attributes:
      period: H, ticks of a round.
      speeds: inner steps per second of each region, in any unit, `[R]`.
    """

    period: int
    speeds: tuple[float, ...]
    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    uneven: ClassVar[bool] = True
    by_steps: ClassVar[bool] = True

    def made(self, step: int, regions: int) -> np.ndarray:
        del regions
        return np.array([int(step * share) for share in shares(self.speeds)])

    def due(self, step: int, counters: SyncCounters) -> tuple[int, ...]:
        del counters
        return (0,) if step % self.period == 0 else ()

    def sends(self, step: int, view: View) -> Stage:
        steppers = self._with_a_step(step, view.counters)
        return tuple(s._replace(admitted=steppers) for s in super().sends(step, view))

    def at_the_end(self, step: int, fragment: int, counters: SyncCounters) -> Send:
        return Send((fragment,), self._with_a_step(step, counters))

    def _with_a_step(self, step: int, counters: SyncCounters) -> np.ndarray:
        landed_R = np.maximum(counters.last_landed[0], 0)
        return self.made(step, len(landed_R)) > self.made_at(landed_R)

    def violations(self, regions: int) -> list[str]:
        return pace_violations(self.period, self.speeds, regions)
