"""Transfers that are on the network at the same time, and the speeds they get.

A `Transfer` is one collective. It has a latency and a volume, and moves all its links together, at
the pace of the slowest, as collectives in lock-step do. `Fabric` takes transfers and says when each
ends. Transfers that overlap in time get speeds in (0, 1], relative to running alone. They share
every link, and every region's egress and ingress, as `flows` says: two equal rings over the same
links run at half speed each.

`Fabric` simulates together only transfers that may share a resource at the same time. So the cost
does not grow with the number of disjoint pairs in flight. A new transfer may delay those it meets.
These may then meet others, which begin after their old end. All of them are worked out anew, so
that answers do not depend on the order of asking.

`Fabric` never revises an answer it has given. A transfer may be sent later in program order and
start earlier in virtual time. It then slows the transfers that are still to be answered, not those
whose end was read.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from lowcomm_jax.network.flows import max_min, stretches

Resource = tuple[str, int, int]  # ("link", source, target), ("out", region, 0), ("in", region, 0)


@dataclass
class Transfer:
    """One collective in flight.

    Attributes:
        number: order of sending; breaks ties and keeps runs deterministic.
        members: region ids.
        flow_s: when its volume starts to move (start + latency + constants).
        volume_s: seconds its volume takes alone.
        usage: share of each resource it uses while running alone, in (0, 1].
        begin_s, speed: piecewise-constant speed: from begin_s[k] on it moves at speed[k].
        end_s: when its volume is through; None until resolved.
    """

    number: int
    members: tuple[int, ...]
    flow_s: float
    volume_s: float
    usage: dict[Resource, float]
    begin_s: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    end_s: float | None = None

    def run_alone(self) -> None:
        """Write the course of a transfer that meets no other."""
        self.begin_s, self.speed, self.end_s = [self.flow_s], [1.0], self.flow_s + self.volume_s

    def crossings(self, share_M: np.ndarray) -> np.ndarray:
        """Give the times at which shares in [0, 1] of the volume are through (once resolved)."""
        if len(self.speed) == 1:
            return self.begin_s[0] + share_M * (self.volume_s / self.speed[0])
        times = np.array([*self.begin_s, self.end_s])
        done = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array(self.speed))])
        return np.interp(share_M * done[-1], done, times)


class Fabric:
    """The set of transfers that may still influence one another."""

    def __init__(self) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._by_region: dict[int, set[int]] = {}
        # Transfers whose course must be worked out before it is read, and all that these may meet.
        self._open: set[int] = set()
        self._busy_until_s = -np.inf

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: Transfer) -> None:
        """Put a transfer on the network.

        Those it may meet, directly or through others, are resolved anew when next asked for. One
        whose end is open may meet every later transfer on its resources.
        """
        self._transfers[transfer.number] = transfer
        for region in transfer.members:
            self._by_region.setdefault(region, set()).add(transfer.number)
        if not self._open and transfer.flow_s >= self._busy_until_s:  # the usual case, kept cheap
            self._close(transfer)
            return
        self._reopen(transfer)

    def resolve(self, number: int) -> Transfer:
        """Give the transfer with its course known, given all transfers added so far."""
        transfer = self._transfers[number]
        if number in self._open:
            component = [self._transfers[k] for k in sorted(self._component(number))]
            if len(component) == 1:
                self._close(transfer)
            else:
                run_together(component)
                self._busy_until_s = max(self._busy_until_s, *(t.end_s for t in component))
                self._open.difference_update(t.number for t in component)
        return transfer

    def _close(self, transfer: Transfer) -> None:
        transfer.run_alone()
        self._open.discard(transfer.number)
        self._busy_until_s = max(self._busy_until_s, transfer.end_s)

    def forget_before(self, time_s: float, keep: Collection[int]) -> None:
        """Drop transfers that ended by `time_s` and are not in `keep`."""
        gone = [
            t
            for t in self.transfers()
            if t.number not in keep and self.resolve(t.number).end_s <= time_s
        ]
        for transfer in gone:
            del self._transfers[transfer.number]
            for region in transfer.members:
                self._by_region[region].discard(transfer.number)

    def transfers(self) -> list[Transfer]:
        """List the remembered transfers in sending order."""
        return list(self._transfers.values())

    def _reopen(self, transfer: Transfer) -> None:
        """Open a transfer and those it may meet, directly or through others.

        One that was open before is not followed: all that it may meet are open already.
        """
        transfer.end_s = None
        self._open.add(transfer.number)
        frontier = [transfer]
        while frontier:
            this = frontier.pop()
            for number in self._near(this) - self._open:
                other = self._transfers[number]
                if _meet(this, other):
                    other.end_s = None
                    self._open.add(number)
                    frontier.append(other)

    def _component(self, number: int) -> set[int]:
        """Give the open transfers that may meet `number`, directly or through others."""
        seen, frontier = {number}, [number]
        while frontier:
            this = self._transfers[frontier.pop()]
            near = (self._near(this) & self._open) - seen
            met = [other for other in near if _meet(this, self._transfers[other])]
            seen.update(met)
            frontier += met
        return seen

    def _near(self, transfer: Transfer) -> set[int]:
        """Give the transfers that have a member in common with this one."""
        return set().union(*(self._by_region[region] for region in transfer.members))


def run_together(transfers: list[Transfer]) -> None:
    """Write the course of transfers that share resources: new speeds at each start and end."""
    for transfer in transfers:
        transfer.begin_s, transfer.speed, transfer.end_s = [], [], None

    def speeds(moving: np.ndarray) -> np.ndarray:
        return fair_speeds([transfers[i].usage for i in moving])

    volume_T = np.array([t.volume_s for t in transfers])
    flow_T = np.array([t.flow_s for t in transfers])
    for stretch in stretches(volume_T, flow_T, speeds):
        for i, speed in zip(stretch.moving, stretch.speed.tolist(), strict=True):
            transfer = transfers[i]
            if not transfer.speed or transfer.speed[-1] != speed:
                transfer.begin_s.append(stretch.begin_s)
                transfer.speed.append(speed)
        for i in stretch.ended:
            transfers[i].end_s = stretch.end_s


def fair_speeds(usages: list[dict[Resource, float]]) -> np.ndarray:
    """Give fair speeds in (0, 1], relative to running alone, of transfers that move together.

    Args:
        usages: per transfer the share of each resource it uses at speed 1.
    """
    number: dict[Resource, int] = {}
    entries = [
        (t, number.setdefault(resource, len(number)), share)
        for t, usage in enumerate(usages)
        for resource, share in usage.items()
    ]
    columns = [np.array(c) for c in zip(*entries, strict=True)] or [np.zeros(0, int)] * 3
    return max_min(*columns, np.ones(len(number)), len(usages), most=1.0)


def _meet(one: Transfer, two: Transfer) -> bool:
    apart = (one.end_s is not None and one.end_s <= two.flow_s) or (
        two.end_s is not None and two.end_s <= one.flow_s
    )
    return not apart and not one.usage.keys().isdisjoint(two.usage)
