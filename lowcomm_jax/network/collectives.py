"""How long an exchange takes alone on the network, and what a link can carry.

`profile` simulates the flows of a route and gives the seconds of every member; `sync_seconds` (T_s)
and `step_seconds` (T_c) are the two numbers a schedule needs. `derive_tau` gives the overlap that
hides a transfer.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.flows import arrivals
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.routes import check, flows_of, link_bytes
from lowcomm_jax.network.transfers import Resource


@dataclass(frozen=True)
class Profile:
    """A collective running alone.

    Attributes:
        network: on which it runs.
        members: region ids, in order: those that send, then those that only listen.
        ready_M: seconds until each member has the result, without per-sync constants.
        latency_M: the same with payloads of zero bytes: the part that bandwidth cannot shorten.
        sources, targets, bytes_L: the directed links used and the bytes on each.
        ready_links: per member the positions of the links its result depends on (for jitter).
    """

    network: Network
    members: tuple[int, ...]
    ready_M: np.ndarray
    latency_M: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    bytes_L: np.ndarray
    ready_links: tuple[np.ndarray, ...]

    @functools.cached_property
    def volume_M(self) -> np.ndarray:
        """Give the seconds of each member's wait that bandwidth can shorten."""
        return np.maximum(self.ready_M - self.latency_M, 0.0)

    @functools.cached_property
    def volume_s(self) -> float:
        """Give the largest of them."""
        return float(self.volume_M.max())

    @functools.cached_property
    def usage(self) -> dict[Resource, float]:
        """Give the share of every link, and of every limited egress and ingress, that it uses."""
        if self.volume_s <= 0:
            return {}
        shares = {}
        pairs = zip(self.sources.tolist(), self.targets.tolist(), strict=True)
        for (source, target), nbytes in zip(pairs, self.bytes_L, strict=True):
            rate = nbytes / self.volume_s
            shares["link", source, target] = rate / self.network.rate_RxR[source, target]
        for label, rate_R, limit_R in (
            ("out", self._rates(self.sources), self.network.egress_rate_R),
            ("in", self._rates(self.targets), self.network.ingress_rate_R),
        ):
            for region in self.members:
                if np.isfinite(limit_R[region]):
                    shares[label, region, 0] = rate_R[region] / limit_R[region]
        return {resource: min(1.0, float(share)) for resource, share in shares.items()}

    def _rates(self, ends_L: np.ndarray) -> np.ndarray:
        """Bytes per second of each region at one end of the links."""
        rate_R = np.zeros(self.network.size)
        if self.volume_s > 0:
            np.add.at(rate_R, ends_L, self.bytes_L / self.volume_s)
        return rate_R


def profile(
    network: Network,
    route: str,
    nbytes_M: Sequence[float],
    members: Sequence[int],
    listeners: Sequence[int] = (),
) -> Profile:
    """Run one collective alone on the network.

    Args:
        network: links and limits.
        route: one of `routes.ROUTES`.
        nbytes_M: payload bytes of each member.
        members: ids of the regions that send.
        listeners: ids of the regions that only receive, see `routes`.

    Returns:
        Durations and bytes; one member alone needs nothing.

    Raises:
        ValueError: see `routes.check`.
    """
    check(route, nbytes_M, members, network.size, listeners)
    members, listeners = tuple(int(m) for m in members), tuple(int(m) for m in listeners)
    sizes = tuple(float(b) for b in nbytes_M)
    links = link_bytes(route, sizes, members, listeners)
    pairs = sorted(links)
    return Profile(
        network,
        members + listeners,
        _ready(network, route, sizes, members, listeners),
        _ready(network, route, (0.0,) * len(members), members, listeners),
        np.array([source for source, _ in pairs], int),
        np.array([target for _, target in pairs], int),
        np.array([links[pair] for pair in pairs]),
        _dependence(route, pairs, members, listeners),
    )


STORE_TRIPS = 10
"""Requests one after the other until a round of learners can land (`rounds.paced_rounds`): payload
written (1), announced (2); seen (1), read (1); the record checked and created (4), and read (1)."""

STORE_LOOK_S = 0.05
"""Shortest pause between two looks at a store that is no folder (`store.kv.POLL_FAR_S`)."""


def store_seconds(network: Network, nbytes: float) -> float:
    """Give the seconds to write, commit and fetch one fragment through a store, without jitter.

    The store is taken to be as far away as the two regions that are furthest apart, and as fast as
    the slowest message between two, egress and ingress limits included. A region writes its payload
    and reads all others', one after the other.

    Args:
        nbytes: of one region's payload.
    """
    apart = np.nonzero(~np.eye(network.size, dtype=bool))
    trip_s = 2 * float(network.delay_RxR[apart].max(initial=0.0))
    moved_s = network.size * nbytes / float(_lone_rate(network, *apart).min(initial=np.inf))
    return STORE_TRIPS * trip_s + 2 * STORE_LOOK_S + moved_s + network.sync_constant_s


@functools.lru_cache(maxsize=4096)
def sync_seconds(network: Network, nbytes: float, route: str) -> float:
    """Give T_s: the seconds of one exchange alone, without jitter and first-use constant.

    Args:
        network: links, limits and the per-sync constant. All its regions take part; with `pair`,
            it is the exchange of the slowest of all pairs.
        nbytes: payload bytes of every region.
        route: one of `routes.ROUTES`, as `exchange.Traffic` names them.

    Raises:
        ValueError: see `routes.check`.
    """
    members = range(network.size)
    check(route, [nbytes] * len(members), members, network.size)
    if len(members) == 1:
        return 0.0
    if route == "pair":
        apart = np.nonzero(~np.eye(network.size, dtype=bool))
        alone = float(_message_seconds(network, nbytes, *apart).max())
    else:
        alone = float(profile(network, route, [nbytes] * len(members), members).ready_M.max())
    return alone + network.sync_constant_s


def step_seconds(network: Network) -> float:
    """Give T_c: the mean seconds of one inner step in the slowest region, jitter included."""
    return float(network.compute_R.max()) * network.compute_jitter.mean


def derive_tau(transfer_s: float, compute_s: float, margin: int = 0) -> int:
    """Give the overlap in inner steps that hides a transfer: ceil(T_s / T_c) + margin.

    Raises:
        ValueError: `compute_s` is not positive.
    """
    if compute_s <= 0:
        raise ValueError(f"compute seconds {compute_s} must be above 0")
    return math.ceil(transfer_s / compute_s - 1e-9) + margin


# -- the flows of a route ----------------------------------------------------------------------


def _ready(network: Network, route: str, nbytes_M, members, listeners) -> np.ndarray:
    """Give the seconds until each member, then each listener, has the result."""
    if len(members) + len(listeners) == 1:
        return np.zeros(1)
    if len(members) == 2 and not listeners and route in ("all_gather", "pair"):
        # Two opposite messages share nothing (NoLoCo makes thousands of them).
        there, back = list(members), list(members[::-1])
        return _message_seconds(network, np.array(nbytes_M)[::-1], back, there)
    flows, waits = flows_of(route, nbytes_M, members, listeners)
    arrival_F = arrivals(network, flows)
    return np.array([max((arrival_F[i] for i in w), default=0.0) for w in waits])


def _dependence(route, pairs, members, listeners) -> tuple[np.ndarray, ...]:
    """Give the links each member's result depends on: those into it where nothing is relayed."""
    if route in ("all_gather", "pair", "pass") or len(members) == 1:
        targets = np.array([p[1] for p in pairs])
        return tuple(np.flatnonzero(targets == m) for m in (*members, *listeners))
    return (np.arange(len(pairs)),) * (len(members) + len(listeners))


def _message_seconds(network: Network, nbytes, source, target):
    """Give the seconds of messages that share neither their links nor their ends."""
    return nbytes / _lone_rate(network, source, target) + network.delay_RxR[source, target]


def _lone_rate(network: Network, source, target):
    """Give the bytes per second of such a message."""
    limit = np.minimum(network.egress_rate_R[source], network.ingress_rate_R[target])
    return np.minimum(network.rate_RxR[source, target], limit)
