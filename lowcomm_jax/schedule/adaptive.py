"""CoCoDC's adaptive transmission (arXiv 2504.17672): send the fragment that changes most.

A slot comes every h = floor(H / N) steps. At a slot leaves, among the fragments not in flight: an
overdue one (H steps or more since its last send), else one never sent, else the one of the largest
change rate ||mean Delta_p||_2 / sqrt(numel_p) / I_p, with I_p the steps between its last two
sends. Ties go to the fragment sent longest ago.

Differs from the paper: the rate is normalised by sqrt(numel) (else the embedding always wins), a
fragment in flight is never sent again (the authors' code would overwrite its snapshot), and of
several overdue fragments the one waiting longest goes first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Set
from typing import ClassVar

import numpy as np

from lowcomm_jax.schedule.base import Schedule, common_violations
from lowcomm_jax.state import Clock


def syncs_per_period(
    period: int,
    fragments: int,
    gamma: float,
    step_seconds: float,
    sync_seconds: float,
) -> int:
    """N = min(H, max(K, floor(gamma H T_c / T_s))).

    Args:
      gamma: share of the link that may be used, in (0, 1].
      step_seconds: T_c, seconds of one inner step.
      sync_seconds: T_s, seconds to synchronise one fragment.
    """
    # A product that is whole in decimals may fall just below in binary: 0.29 * 100.
    capacity = math.floor(gamma * period * step_seconds / sync_seconds + 1e-9)
    return min(period, max(fragments, capacity))


@dataclasses.dataclass(frozen=True)
class Adaptive(Schedule):
    """See `Schedule` for the fields; `syncs` is N, the slots per period."""

    period: int
    fragments: int
    syncs: int
    delay: int | tuple[int, ...] = 0
    statistic: ClassVar[str] = "rate"

    @property
    def spacing(self) -> int:
        """h: inner steps between two slots."""
        return max(1, self.period // self.syncs)

    def next_send(self, step: int, clock: Clock) -> int:
        del clock
        return (step // self.spacing + 1) * self.spacing

    def sends(
        self, step: int, clock: Clock, in_flight: Set[int], rates: Callable[[], np.ndarray]
    ) -> tuple[int, ...]:
        if step % self.spacing:
            return ()
        ready = [p for p in range(self.fragments) if p not in in_flight]
        if not ready:
            return ()
        oldest = min(ready, key=lambda p: (clock.last_sent[p], p))
        # A never-sent fragment (last_sent = -1) is the oldest; it only yields to an overdue one.
        sent = [p for p in ready if clock.last_sent[p] >= 0]
        overdue = [p for p in sent if step - clock.last_sent[p] >= self.period]
        if overdue:
            return (min(overdue, key=lambda p: (clock.last_sent[p], p)),)
        if clock.last_sent[oldest] < 0:
            return (oldest,)
        rate = rates()
        return (max(ready, key=lambda p: (rate[p], -clock.last_sent[p], -p)),)

    def longest_wait(self) -> int:
        """Upper bound on the steps between two sends of a fragment: ceil(H/h) h + (K-1) h.

        Holds for every tau < H: an overdue fragment was sent H steps ago, so it has landed.
        """
        h = self.spacing
        return -(-self.period // h) * h + (self.fragments - 1) * h

    def violations(self, regions: int) -> list[str]:
        problems = common_violations(self, regions, "overlap")
        if not self.fragments <= self.syncs <= self.period:
            problems.append(
                f"syncs_per_period={self.syncs}: must lie between fragments={self.fragments} (or a "
                f"fragment could starve) and period={self.period} (at most one a step)"
            )
        return problems
