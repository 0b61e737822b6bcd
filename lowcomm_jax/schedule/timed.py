"""Rounds of a fixed time, in which regions make different numbers of inner steps.

Time is counted in ticks (`pace`), and all regions meet after every H of them. With numbers of steps
in place of speeds, and H the largest of them, every region makes its own number in each round.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lowcomm_jax.schedule.base import Schedule, Send, paced_violations
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
    speeds: tuple[float, ...] = dataclasses.field()  # without a default
    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    by_steps: ClassVar[bool] = True
    needs_step: ClassVar[bool] = True

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        return () if step % self.period else (Send((0,), self.able(step, 0, counters)),)

    def violations(self, regions: int) -> list[str]:
        return paced_violations(self, regions)
