"""At which pace regions make inner steps, and when they are down.

One step of the run is one tick: an inner step of the fastest region. A region of speed v that has
been up for u ticks has made floor(u v / max v) inner steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from lowcomm_jax.refused import each_of, is_number, is_whole


class Outage(NamedTuple):
    """A region is down in ticks `first` to `last`, both included; it comes back after `last`."""

    region: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Pace:
    """When regions make inner steps, a pure function of the tick.

    Attributes:
      speeds: inner steps per second of each region, in any unit, `[R]`; () = all equal.
      outages: when regions are down.
    """

    speeds: tuple[float, ...]
    outages: tuple[Outage, ...] = ()

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """v / max v of each region."""
        return _shares(self.speeds)

    def up(self, step: int, regions: int) -> np.ndarray:
        """Bool `[R]`: the regions that are up in this tick."""
        up = np.ones(regions, bool)
        for region, first, last in self.outages:
            up[region] &= not first <= step <= last
        return up

    def returns(self, step: int, regions: int) -> np.ndarray:
        """Bool `[R]`: the regions that come back after this tick."""
        return ~self.up(step, regions) & self.up(step + 1, regions)

    def made(self, step: int, regions: int) -> np.ndarray:
        """Inner steps that each region has made by the end of a tick, int64 `[R]`."""
        up_R = np.full(regions, step)
        for region, first, last in self.outages:
            up_R[region] -= max(0, min(step, last) - first + 1)
        if not self.speeds:
            return up_R
        return np.array([int(int(u) * share) for u, share in zip(up_R, self.shares)], np.int64)

    def made_at(self, step_R: np.ndarray) -> np.ndarray:
        """`made` of each region by the end of a tick of its own, int64 `[R]`."""
        return np.array([self.made(int(t), len(step_R))[r] for r, t in enumerate(step_R)])

    def active(self, step: int, regions: int) -> np.ndarray:
        """Bool `[R]`: the regions that make an inner step at this tick."""
        return self.made(step, regions) > self.made(step - 1, regions)

    def local_steps(
        self, period: int, dynamic: bool, rounded: Callable[[Fraction], int] = math.floor
    ) -> np.ndarray:
        """Inner steps of each region between two of its arrivals, at least 1, int64 `[R]`.

        Args:
          period: H, of the fastest region.
          dynamic: v / max v H, so that all arrive about together (dynamic local updates, eq. 6 of
            arXiv 2401.09135), `rounded` to a whole number; else H for all.
        """
        if not dynamic:
            return np.full(len(self.speeds), period)
        return np.array([max(1, rounded(share * period)) for share in self.shares])

    def arrives(self, step: int, steps_R: np.ndarray) -> np.ndarray:
        """Bool `[R]`: who has made a multiple of `steps_R` inner steps, the last at this tick."""
        before, now = (self.made(t, len(steps_R)) for t in (step - 1, step))
        return (before < now) & (now % steps_R == 0)

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        problems = []
        if isinstance(self.speeds, tuple | list) and len(self.speeds) != regions:
            problems.append(
                f"speeds: {len(self.speeds)} values for {regions} regions; give {regions}"
            )
        fix = f"every region needs a positive speed; give {regions}"
        problems += filter(None, [each_of("speeds", self.speeds, _is_positive, fix)])
        return problems + self._outage_violations(regions)

    def _outage_violations(self, regions: int) -> list[str]:
        fix = "give (region, first tick, last tick) for each time that a region is down"
        if line := each_of("outages", self.outages, _is_outage, fix):
            return [line]
        problems = []
        for region, first, last in self.outages:
            if not 0 <= region < regions:
                problems.append(f"outages: region {region} of {regions}; regions count from 0")
            if not 1 <= first <= last:
                problems.append(f"outages: ({region}, {first}, {last}); give 1 <= first <= last")
        if problems:
            return problems
        return [
            f"outages: nobody is up at tick {step}, so no state is left to copy"
            for step in sorted({first for _, first, _ in self.outages})
            if not self.up(step, regions).any()
        ]


def _is_positive(speed: Any) -> bool:
    return is_number(speed) and speed > 0


def _is_outage(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 3 and all(map(is_whole, value))


@functools.lru_cache(maxsize=16)
def _shares(speeds: tuple[float, ...]) -> tuple[Fraction, ...]:
    """v / max v, exact, so that every region agrees on when another one steps."""
    exact = [Fraction(str(v)) for v in speeds]
    fastest = max(exact)
    return tuple(v / fastest for v in exact)
