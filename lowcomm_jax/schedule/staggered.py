"""Every fragment every H steps, the K fragments evenly staggered (arXiv 2501.18512, Alg. 2).

Fragment p of K (0-based) is first sent after inner step floor((p+1) H / K), then every H steps
exactly. K = 1 is DiLoCo's round (arXiv 2311.08105); H = 1 is synchronisation at every step.
"""

from __future__ import annotations

import dataclasses

from lowcomm_jax.schedule.base import (
    FirstRound,
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

    def due(self, step: int, counters: SyncCounters) -> tuple[int, ...]:
        del counters
        since = ((p, step - self.first(p)) for p in range(self.fragments))
        return tuple(p for p, t in since if t >= 0 and t % self.period == 0)

    def violations(self, regions: int) -> list[str]:
        problems = common_violations(self, regions, "overlap")
        return problems or overlap_violations(self.travel or 0, self.period)
