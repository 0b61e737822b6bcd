"""Every fragment every H steps, the K fragments evenly staggered (arXiv 2501.18512, Alg. 2).

Fragment p of K (0-based) is first sent after inner step floor((p+1) H / K), then every H steps
exactly. K = 1 is DiLoCo's round (arXiv 2311.08105); H = 1 is synchronisation at every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from lowcomm_jax.schedule.base import (
    FirstRound,
    Rates,
    Schedule,
    Timing,
    common_violations,
    overlap_violations,
    steps_to_travel,
)
from lowcomm_jax.state.train_state import SyncCounters


@dataclasses.dataclass(frozen=True)
class Staggered(Schedule):
    """Every fragment every H steps. See `Schedule` for the other fields.

    Attributes:
      hidden: whether to refuse a network on which a payload travels longer than a period (K = 1).
      travel: inner steps that a payload needs to travel; None = as the network says, if `hidden`.
    """

    period: int
    fragments: int = 1
    delay: int | tuple[int, ...] = 0
    land_after_send: bool = False
    hidden: bool = False
    travel: int | None = None
    first_round: FirstRound = "empty"
    by_steps = True

    def settle(self, timing: Timing) -> Staggered:
        if not self.hidden or self.travel is not None:
            return self
        return dataclasses.replace(self, travel=steps_to_travel(timing, 0))

    def first(self, fragment: int) -> int:
        """Inner step (1-based) after which a fragment leaves for the first time."""
        return (fragment + 1) * self.period // self.fragments

    def next_send(self, step: int, counters: SyncCounters) -> int:
        # The same rule as `sends`, solved for the step: the two must agree.
        del counters

        def upcoming(first: int) -> int:
            rounds = max(0, -(-(step + 1 - first) // self.period))
            return first + rounds * self.period

        return min(upcoming(self.first(p)) for p in range(self.fragments))

    def sends(
        self, step: int, counters: SyncCounters, in_flight: Set[int], rates: Rates
    ) -> tuple[int, ...]:
        del counters, rates
        return tuple(
            p
            for p in range(self.fragments)
            if step >= self.first(p)
            and (step - self.first(p)) % self.period == 0
            and p not in in_flight
        )

    def violations(self, regions: int) -> list[str]:
        problems = common_violations(self, regions, "overlap")
        return problems or overlap_violations(self.travel or 0, self.period)
