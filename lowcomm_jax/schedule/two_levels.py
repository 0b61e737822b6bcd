"""Workers arrive at their group's server, and servers at a global one (arXiv 2506.04531).

Time is counted in ticks (`pace`). A worker (a region) arrives at its group's server as in
`arrivals`, with dynamic local updates rounded up. A server that has had `every` arrivals since it
last merged sends the change of its model. That arrives at the global server
`travel` ticks later, and the global model is back after as many. The server keeps serving meanwhile
and sends nothing more until it has merged.

The loop (`loops.two_level_loop`) keeps in `SyncCounters.decided`, one number a group:

- `arrivals`: so far; `merged`: at the last merge;
- `up`: the tick at which an update arrives at the global server; `down`: the tick at which its
  answer is back. -1 = nothing is on its way.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from lowcomm_jax.refused import at_least, each_of, is_whole
from lowcomm_jax.schedule.base import Schedule, Send, paced_violations
from lowcomm_jax.state.train_state import Decided, SyncCounters

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class TwoLevels(Schedule):
    """Workers, local servers and a global one. See `Schedule` for the other fields.

    Attributes:
      period: H, inner steps of the fastest worker between two arrivals.
      speeds: inner steps per second of each worker, in any unit, `[R]`.
      dynamic: whether slower workers make fewer steps between arrivals.
      groups: regions of each local server; every region in exactly one.
      every: K, arrivals at a server between its sends.
      travel: ticks one way between a server and the global one; a number, or one per group.
    """

    period: int
    speeds: tuple[float, ...] = dataclasses.field()  # without a default
    dynamic: bool = True
    groups: Groups = ()
    every: int = 32
    travel: int | tuple[int, ...] = 0
    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    local_servers: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def due(self, step: int, counters: SyncCounters) -> tuple[Send, ...]:
        """The workers that arrive."""
        del counters
        steps_R = self.pace.local_steps(self.period, self.dynamic, math.ceil)
        arrives = self.pace.arrives(step, steps_R)
        return (Send((0,), arrives),) if arrives.any() else ()

    def start(self) -> Decided:
        """What the loop remembers before the first step."""
        count = len(self.groups)
        arrivals, nothing = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        return {
            "arrivals": arrivals,
            "merged": arrivals.copy(),
            "up": nothing,
            "down": nothing.copy(),
        }

    def group_of(self, region: int) -> int:
        """Number of a region's group."""
        return next(g for g, members in enumerate(self.groups) if region in members)

    def travels(self, group: int) -> int:
        """Ticks one way between this group's server and the global one."""
        return int(np.broadcast_to(self.travel, len(self.groups))[group])

    def violations(self, regions: int) -> list[str]:
        problems = paced_violations(self, regions)
        fix = f"name each of the {regions} regions (from 0) in one group, none empty"
        unfit = each_of("groups", self.groups, _is_group, fix)
        if unfit is None and sorted(r for group in self.groups for r in group) != [*range(regions)]:
            unfit = f"groups={self.groups}: {fix}"
        problems += filter(None, [unfit, at_least("every", self.every, 1)])
        one = not isinstance(self.travel, tuple | list)
        given = [self.travel] if one else self.travel
        count = len(self.groups) if isinstance(self.groups, tuple | list) else len(given)
        if not one and len(given) != count:
            problems.append(f"travel: {len(given)} values for {count} groups; give 1 or {count}")
        if not all(is_whole(ticks) and ticks >= 0 for ticks in given):
            problems.append(f"travel={self.travel!r}: whole ticks, not negative; use 0 or more")
        return problems


def _is_group(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) > 0 and all(map(is_whole, value))
