"""Every fragment every H steps, the K fragments evenly staggered (arXiv 2501.18512, Alg. 2).

Fragment p of K (0-based) is first sent after inner step floor((p+1) H / K), then every H steps
exactly. K = 1 is DiLoCo's round (arXiv 2311.08105); H = 1 is synchronisation at every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set

import numpy as np

from lowcomm_jax.schedule.base import Schedule, common_violations
from lowcomm_jax.state import Clock


@dataclasses.dataclass(frozen=True)
class Staggered(Schedule):
    """See `Schedule` for the fields."""

    period: int
    fragments: int = 1
    delay: int | tuple[int, ...] = 0
    land_after_send: bool = False

    def first(self, fragment: int) -> int:
        return (fragment + 1) * self.period // self.fragments

    def next_send(self, step: int, clock: Clock) -> int:
        del clock

        def upcoming(first: int) -> int:
            rounds = max(0, -(-(step + 1 - first) // self.period))
            return first + rounds * self.period

        return min(upcoming(self.first(p)) for p in range(self.fragments))

    def sends(
        self, step: int, clock: Clock, in_flight: Set[int], rates: Callable[[], np.ndarray]
    ) -> tuple[int, ...]:
        del clock, rates
        return tuple(
            p
            for p in range(self.fragments)
            if step >= self.first(p)
            and (step - self.first(p)) % self.period == 0
            and p not in in_flight
        )

    def violations(self, regions: int) -> list[str]:
        return common_violations(self, regions, "overlap")
