"""Workers arrive at their group's server, and servers at a global one (arXiv 2506.04531).

Time is counted in ticks, as in `arrivals`. A worker arrives after ceil(v / max v H) own steps. A
server that has had `every` arrivals since it last merged sends what has changed since; after
`travel` ticks that arrives at the global server, whose model is back after as many. The server
serves on meanwhile, and sends nothing more until it has merged.

What has to be remembered is `SyncCounters.decided`: for each group the arrivals so far
(`arrivals`), those at its last merge (`merged`), and the ticks at which something arrives at the
global server (`up`) or comes back (`down`); -1 = nothing is on its way.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from lowcomm_jax.schedule.arrivals import Arrivals
from lowcomm_jax.state.train_state import Decided, SyncCounters

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class TwoLevels(Arrivals):
    """See `Arrivals` for the other fields.

    Attributes:
      groups: regions of each server.
      every: K, arrivals at a server between its sends.
      travel: ticks one way between a server and the global one; a number, or one per group.
    """

    groups: Groups = ()
    every: int = 32
    travel: int | tuple[int, ...] = 0

    def local_steps(self) -> list[int]:
        if not self.dynamic:
            return [self.period] * len(self.speeds)
        return [math.ceil(share * self.period) for share in self._shares()]

    def start(self) -> Decided:
        count = len(self.groups)
        arrivals, nothing = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        return {
            "arrivals": arrivals,
            "merged": arrivals.copy(),
            "up": nothing,
            "down": nothing.copy(),
        }

    def group_of(self, region: int) -> int:
        return next(g for g, members in enumerate(self.groups) if region in members)

    def travels(self, group: int) -> int:
        """Ticks one way between this group's server and the global one."""
        return int(np.broadcast_to(self.travel, len(self.groups))[group])

    def next_send(self, step: int, counters: SyncCounters) -> int:
        """The next tick at which a worker arrives, or something between the servers."""
        ways = [*counters.decided["up"], *counters.decided["down"]]
        return min([super().next_send(step, counters), *(int(t) for t in ways if t > step)])

    def violations(self, regions: int) -> list[str]:
        problems = super().violations(regions)
        members = sorted(r for group in self.groups for r in group)
        if members != list(range(regions)):
            problems.append(
                f"groups={self.groups}: every one of the {regions} regions (from 0) in one group"
            )
        if self.every < 1:
            problems.append(f"every={self.every}: a server sends after at least 1 arrival")
        if np.ndim(self.travel) and len(self.travel) != len(self.groups):
            problems.append(f"travel: {len(self.travel)} values for {len(self.groups)} groups")
        if np.min(self.travel) < 0:
            problems.append(f"travel={self.travel}: ticks, not negative")
        return problems
