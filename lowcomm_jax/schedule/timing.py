"""What a schedule reads off a network: T_c, and T_s of every payload."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from lowcomm_jax.network.collectives import derive_tau


def syncs_per_period(
    period: int,
    fragments: int,
    gamma: float,
    step_seconds: float,
    sync_seconds: float,
) -> int:
    """N = min(H, max(K, floor(gamma H T_c / T_s))), slots per period.

    Args:
      period: H, inner steps.
      fragments: K.
      gamma: share of the link that may be used, in (0, 1].
      step_seconds: T_c, seconds of one inner step.
      sync_seconds: T_s, seconds to synchronise one fragment.
    """
    # A product that is whole in decimals may fall just below in binary: 0.29 * 100.
    capacity = math.floor(gamma * period * step_seconds / sync_seconds + 1e-9)
    return min(period, max(fragments, capacity))


@dataclasses.dataclass(frozen=True)
class NetworkTiming:
    """Seconds of a step and of a synchronisation on a network, without jitter.

    Attributes:
      step_seconds: T_c, seconds of an inner step of the slowest region.
      sync_seconds: (fragment, level of the codec) -> T_s, seconds to synchronise that fragment.
    """

    step_seconds: float
    sync_seconds: Callable[[int, int], float]

    def slowest(self, fragments: int, level: int = 0) -> float:
        """T_s of the fragment that needs longest."""
        return max(self.sync_seconds(p, level) for p in range(fragments))

    def travel(self, fragments: int, level: int) -> int:
        """Inner steps that the payload of any fragment needs at most: ceil(T_s / T_c)."""
        return derive_tau(self.slowest(fragments, level), self.step_seconds)
