"""Every fragment every H steps, the K fragments evenly staggered (arXiv 2501.18512, Alg. 2).

Fragment p of K (0-based) is first sent after inner step floor((p+1) H / K), then every H steps
exactly. K = 1 is DiLoCo's round (arXiv 2311.08105); H = 1 is synchronisation at every step.
"""

from __future__ import annotations

import dataclasses

from lowcomm_jax.schedule.base import (
    FirstRound,
    Schedule,
    Send,
    common_violations,
    overlap_violations,
)
from lowcomm_jax.state.train_state import SyncCounters


@dataclasses.dataclass(frozen=True)
class Staggered(Schedule):
    """Every fragment every H steps. See `Schedule` for the other fields.

    Attributes:
      travel: inner steps that a payload needs to travel, which must not be more than a period; None
        = as the network says, if there is one; () = as long as it likes.
    """

    period: int
    fragments: int = 1
    delay: int | tuple[int, ...] = 0
    land_after_send: bool = False
    travel: tuple[int, ...] | None = ()
    first_round: FirstRound = "empty"
    by_steps = True

    def first(self, fragment: int) -> int:
        """Inner step (1-based) after which a fragment leaves for the first time."""
        return (fragment + 1) * self.period // self.fragments

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        del counters
        since = ((p, step - self.first(p)) for p in range(self.fragments))
        return tuple(Send((p,)) for p, t in since if t >= 0 and t % self.period == 0)

    def violations(self, regions: int) -> list[str]:
        return common_violations(self, regions, "overlap") + overlap_violations(self)
