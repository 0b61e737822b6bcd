"""Transfers in flight that share the network.

A transfer is one collective: it has a latency and a volume, and moves all its links together, at
the pace of its slowest one, as lock-step collectives do. When several are in flight, each gets a
speed in (0, 1] relative to running alone; speeds are max-min fair over every link and every
region's egress and ingress. Two equal rings over the same links therefore run at half speed each.
Only transfers that share a resource at the same time are simulated together, so the cost does not
grow with the number of disjoint pairs in flight.

An answer once given (a landing) is not revised: a transfer that is sent later in program order but
starts earlier in virtual time slows those that are still to be answered, not the one that was.
"""

from collections.abc import Collection

import numpy as np

from lowcomm_jax.network.sharing import Transfer, run_together


class Fabric:
    """The set of transfers that may still influence one another."""

    def __init__(self) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._by_region: dict[int, set[int]] = {}
        self._open: set[int] = set()  # transfers whose course must be worked out before it is read
        self._busy_until_s = -np.inf

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: Transfer) -> None:
        """Put a transfer on the network; those it meets are resolved anew when next asked for."""
        self._transfers[transfer.number] = transfer
        for region in transfer.members:
            self._by_region.setdefault(region, set()).add(transfer.number)
        if not self._open and transfer.flow_s >= self._busy_until_s:  # the usual case, kept cheap
            self._close(transfer)
            return
        for number in self._component(transfer.number):
            self._transfers[number].end_s = None
            self._open.add(number)

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

    def forget_before(self, time_s: float, keep: Collection[int]) -> list[Transfer]:
        """Drop transfers that ended by `time_s` and are not in `keep`; give them back."""
        gone = [
            t
            for t in self.transfers()
            if t.number not in keep and self.resolve(t.number).end_s <= time_s
        ]
        for transfer in gone:
            del self._transfers[transfer.number]
            for region in transfer.members:
                self._by_region[region].discard(transfer.number)
        return gone

    def transfers(self) -> list[Transfer]:
        """List the remembered transfers in sending order."""
        return list(self._transfers.values())

    def _component(self, number: int) -> set[int]:
        """Give the transfers that share resources with `number` at the same time, directly or
        through others.
        """
        seen, frontier = {number}, [number]
        while frontier:
            this = self._transfers[frontier.pop()]
            near = set().union(*(self._by_region[region] for region in this.members)) - seen
            met = [other for other in near if _meet(this, self._transfers[other])]
            seen.update(met)
            frontier += met
        return seen


def _meet(one: Transfer, two: Transfer) -> bool:
    apart = (one.end_s is not None and one.end_s <= two.flow_s) or (
        two.end_s is not None and two.end_s <= one.flow_s
    )
    return not apart and not one.usage.keys().isdisjoint(two.usage)


def note_peaks(peak_R: np.ndarray, transfers: list[Transfer]) -> None:
    """Raise each region's largest sending rate (bytes per second) in place."""
    cluster: list[Transfer] = []
    until = -np.inf
    for transfer in sorted((t for t in transfers if t.volume_s > 0), key=lambda t: t.flow_s):
        if transfer.flow_s >= until:
            _sweep(peak_R, cluster)
            cluster = []
        cluster.append(transfer)
        until = max(until, transfer.end_s)
    _sweep(peak_R, cluster)


def _sweep(peak_R: np.ndarray, cluster: list[Transfer]) -> None:
    """Add up the rates of transfers that overlap in time."""
    if len(cluster) == 1:
        members = list(cluster[0].members)
        peak_R[members] = np.maximum(peak_R[members], cluster[0].rate_M * max(cluster[0].speed))
        return
    changes: dict[int, list[tuple[float, float]]] = {}
    for transfer in cluster:
        edges = [*transfer.begin_s, transfer.end_s]
        steps = np.diff([0.0, *transfer.speed, 0.0]).tolist()
        for region, rate in zip(transfer.members, transfer.rate_M.tolist(), strict=True):
            changes.setdefault(region, []).extend(
                (t, rate * step) for t, step in zip(edges, steps, strict=True)
            )
    for region, moments in changes.items():
        level = peak = 0.0
        for _, change in sorted(moments):  # falls sort before rises at one moment
            level += change
            peak = max(peak, level)
        peak_R[region] = max(peak_R[region], peak)
