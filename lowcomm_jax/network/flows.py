"""Simulates flows that share links fairly (max-min), within each region's egress and ingress.

`simulate` takes flows and gives their times. A flow moves bytes over one directed link. A flow may
start when other flows have arrived: so the phases of a collective are written down. Rates are
recomputed at every start and end (progressive filling), so a run is exact for fluid traffic and
deterministic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.links import Network


@dataclass(frozen=True)
class Flow:
    """Bytes from one region to another.

    Attributes:
        source, target: region ids.
        nbytes: payload bytes.
        after: indices of the flows that must have arrived first.
        start_s: earliest start in seconds.
    """

    source: int
    target: int
    nbytes: float
    after: tuple[int, ...] = ()
    start_s: float = 0.0


@dataclass(frozen=True)
class FlowTimes:
    """When each flow started, left its link and arrived (end + one-way delay)."""

    start_F: np.ndarray
    end_F: np.ndarray
    arrival_F: np.ndarray


def fair_rates(network: Network, source_F: np.ndarray, target_F: np.ndarray) -> np.ndarray:
    """Give max-min fair rates in bytes per second of flows that run at the same time.

    Args:
        network: links and limits.
        source_F, target_F: region ids of each running flow.

    Returns:
        float64 rates; no flow can be faster without slowing one that is not faster than itself.
    """
    count, size = len(source_F), network.size
    ids_3xF = np.stack(
        [source_F * size + target_F, size * size + source_F, size * size + size + target_F]
    )
    capacity_Q = np.concatenate(
        [network.rate_RxR.ravel(), network.egress_rate_R, network.ingress_rate_R]
    )
    resource_Q, slot_3xF = np.unique(ids_3xF, return_inverse=True)
    slot_3xF = slot_3xF.reshape(3, count)
    room_Q = capacity_Q[resource_Q].astype(float)
    finite_Q = np.isfinite(room_Q)
    rate_F = np.zeros(count)
    free_F = np.ones(count, bool)
    while free_F.any():
        users_Q = np.bincount(slot_3xF[:, free_F].ravel(), minlength=len(resource_Q))
        share_Q = np.where(finite_Q & (users_Q > 0), room_Q / np.maximum(users_Q, 1), np.inf)
        share = share_Q.min()
        tight_Q = share_Q <= share * (1 + 1e-12)
        fixed_F = free_F & tight_Q[slot_3xF].any(axis=0)
        rate_F[fixed_F] = share
        used_Q = np.bincount(slot_3xF[:, fixed_F].ravel(), minlength=len(resource_Q))
        room_Q = np.where(finite_Q, np.maximum(room_Q - used_Q * share, 0.0), room_Q)
        free_F &= ~fixed_F
    return rate_F


def simulate(network: Network, flows: Sequence[Flow]) -> FlowTimes:
    """Run flows to the end.

    Args:
        network: links, delays and limits.
        flows: the transfers; `after` may only name earlier indices.

    Returns:
        Times in seconds, one entry a flow.

    Raises:
        ValueError: a flow waits for a flow with the same or a later index.
    """
    count = len(flows)
    bad = [i for i, flow in enumerate(flows) if any(k >= i for k in flow.after)]
    if bad:
        raise ValueError(
            f"flows {bad} wait for later flows: list a flow after all those it waits for"
        )
    run = _Run(network, flows)
    for _ in range(3 * count + 1):
        if not run.advance():
            break
    return FlowTimes(run.start_F, run.end_F, run.arrival_F)


class _Run:
    """State of one simulation: which flows run, how much each has left."""

    def __init__(self, network: Network, flows: Sequence[Flow]) -> None:
        count = len(flows)
        self.network = network
        self.source_F = np.array([f.source for f in flows], int)
        self.target_F = np.array([f.target for f in flows], int)
        self.left_F = np.array([f.nbytes for f in flows], float)
        self.delay_F = network.delay_RxR[self.source_F, self.target_F]
        self.ready_F = np.array([f.start_s if not f.after else np.inf for f in flows], float)
        self.waits_F = np.array([len(set(f.after)) for f in flows], int)
        self.flows = flows
        self.followers: dict[int, list[int]] = {}
        for i, flow in enumerate(flows):
            for k in set(flow.after):
                self.followers.setdefault(k, []).append(i)
        self.start_F, self.end_F = np.full(count, np.nan), np.full(count, np.nan)
        self.arrival_F = np.full(count, np.nan)
        self.running_F = np.zeros(count, bool)
        self.rate_F = np.zeros(count)
        self.now = 0.0

    def advance(self) -> bool:
        """Go to the next start or end; say whether there was one."""
        run = np.flatnonzero(self.running_F)
        left_s = (
            np.where(self.left_F[run] > 0, self.left_F[run] / self.rate_F[run], 0.0)
            if len(run)
            else run
        )
        end = self.now + left_s.min() if len(run) else np.inf
        pending_F = np.isnan(self.start_F)
        start = self.ready_F[pending_F].min() if pending_F.any() else np.inf
        time = min(end, start)
        if not np.isfinite(time):
            return False
        self.left_F[run] -= self.rate_F[run] * (time - self.now)
        ended = run[left_s <= left_s.min() * (1 + 1e-12)] if end <= time else run[:0]
        self.now = time
        self._end(ended)
        started = pending_F & (self.ready_F <= time)
        self.start_F[started] = time
        self.running_F |= started
        if len(ended) or started.any():
            run = np.flatnonzero(self.running_F)
            if len(run):
                self.rate_F[run] = fair_rates(self.network, self.source_F[run], self.target_F[run])
        return True

    def _end(self, ended: np.ndarray) -> None:
        self.left_F[ended] = 0.0
        self.running_F[ended] = False
        self.end_F[ended] = self.now
        self.arrival_F[ended] = self.now + self.delay_F[ended]
        for k in ended:
            for i in self.followers.get(int(k), ()):
                self.waits_F[i] -= 1
                if self.waits_F[i] == 0:
                    arrived = max(self.arrival_F[j] for j in self.flows[i].after)
                    self.ready_F[i] = max(self.flows[i].start_s, arrived)
