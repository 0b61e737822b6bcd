"""How long an exchange takes alone on the network, and what a link can carry.

`profile` simulates the flows of a route and gives the seconds of every member; `sync_seconds` (T_s)
and `step_seconds` (T_c) are the two numbers a schedule needs. `derive_tau` gives the overlap that
hides a transfer. `catch_up_violations` finds schedules whose bytes never catch up.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.flows import simulate
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.routes import check, flows_of


@dataclass(frozen=True)
class Profile:
    """A collective running alone.

    Attributes:
        members: region ids, in order: those that send, then those that only listen.
        ready_M: seconds until each member has the result, without per-sync constants.
        latency_M: the same with payloads of zero bytes: the part that bandwidth cannot shorten.
        sources, targets, bytes_L: the directed links used and the bytes on each.
        ready_links: per member the positions of the links its result depends on (for jitter).
    """

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
    everyone = members + listeners
    if len(everyone) == 1:
        empty = np.zeros(0, int)
        return Profile(everyone, np.zeros(1), np.zeros(1), empty, empty, np.zeros(0), (empty,))
    sizes = tuple(float(b) for b in nbytes_M)
    ready_M, links = _timed(network, route, sizes, members, listeners)
    latency_M, _ = _timed(network, route, (0.0,) * len(members), members, listeners)
    pairs = sorted(links)
    return Profile(
        members=everyone,
        ready_M=ready_M,
        latency_M=latency_M,
        sources=np.array([p[0] for p in pairs], int),
        targets=np.array([p[1] for p in pairs], int),
        bytes_L=np.array([links[p] for p in pairs]),
        ready_links=_dependence(route, pairs, members, listeners),
    )


STORE_TRIPS = 10
"""Requests one after the other until a round of learners can land (`rounds.paced_rounds`): payload
written (1), announced (2); seen (1), read (1); the record checked and created (4), and read (1)."""

STORE_LOOK_S = 0.05
"""Shortest pause between two looks at a store that is no folder (`store.kv.POLL_FAR_S`)."""


def store_seconds(network: Network, nbytes: float) -> float:
    """Give the seconds to write, commit and fetch one fragment through a store, without jitter.

    The store is taken to be as far away as the two regions that are furthest apart, and as fast as
    the slowest link. A region writes its payload and reads all others'.

    Args:
        nbytes: of one region's payload.
    """
    trip_s = 2 * float(network.delay_RxR[~np.eye(network.size, dtype=bool)].max(initial=0.0))
    moved_s = network.size * nbytes * 8e-9 / network.slowest_gbps
    return STORE_TRIPS * trip_s + 2 * STORE_LOOK_S + moved_s + network.sync_constant_s


def sync_seconds(
    network: Network, nbytes: float, route: str, regions: Sequence[int] | None = None
) -> float:
    """Give T_s: the seconds of one exchange alone, without jitter and first-use constant.

    Args:
        network: links, limits and the per-sync constant.
        nbytes: payload bytes of every region that takes part.
        route: one of `routes.ROUTES`, as `exchange.Traffic` names them.
        regions: ids of those that take part; None = all (for `pair`: the slowest of all pairs).

    Raises:
        ValueError: see `routes.check`.
    """
    members = tuple(range(network.size)) if regions is None else tuple(regions)
    if len(members) == 1:
        check(route, [nbytes], members, network.size)
        return 0.0
    if route == "pair" and regions is None:
        check(route, [nbytes] * len(members), members, network.size)
        source, target = np.nonzero(~np.eye(network.size, dtype=bool))
        volume_P = nbytes / _lone_rate(network, source, target)
        alone = float((volume_P + network.delay_RxR[source, target]).max())
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


def catch_up_violations(network: Network, volume_s: float, period: int, label: str) -> list[str]:
    """Say whether the bytes of one period take longer on the link than the period computes.

    Args:
        network: a period computes `period * step_seconds`.
        volume_s: link seconds of all bytes of one period, latency left out.
        period: inner steps.
        label: named in the message.

    Returns:
        Nothing, or one sentence with the smallest changes that would work.
    """
    room = period * step_seconds(network)
    if volume_s <= room:
        return []
    factor, gbps = volume_s / room, network.slowest_gbps
    return [
        f"{label}: the bytes of one period need {volume_s:.3g} s of link time but a period "
        f"computes only {room:.3g} s, so fragments never catch up: raise the bandwidth "
        f"x{factor:.3g} (slowest link {gbps:.3g} -> {gbps * factor:.3g} Gbit/s), or the period to "
        f"{math.ceil(period * factor - 1e-9)}, or compress x{factor:.3g} more"
    ]


# -- the flows of a route ----------------------------------------------------------------------


def _timed(network, route, nbytes_M, members, listeners):
    """Give the ready times per member, then per listener, and {link: bytes}."""
    if route == "ring":
        sent = nbytes_M[0] * 2 * (len(members) - 1) / len(members)
        pairs = zip(members, members[1:] + members[:1], strict=True)
        return _ring_times(network, nbytes_M[0], members), dict.fromkeys(pairs, sent)
    if len(members) == 2 and not listeners and route in ("all_gather", "pair"):
        return _pair_times(network, nbytes_M, members)
    flows, waits = flows_of(route, nbytes_M, members, listeners)
    times = simulate(network, flows)
    ready_M = np.array([max((times.arrival_F[i] for i in w), default=0.0) for w in waits])
    links: dict[tuple[int, int], float] = {}
    for flow in flows:
        links[flow.source, flow.target] = links.get((flow.source, flow.target), 0.0) + flow.nbytes
    return ready_M, links


def _dependence(route, pairs, members, listeners) -> tuple[np.ndarray, ...]:
    """Give the links each member's result depends on: those into it where nothing is relayed."""
    if route in ("all_gather", "pair", "pass") or len(members) == 1:
        targets = np.array([p[1] for p in pairs])
        return tuple(np.flatnonzero(targets == m) for m in (*members, *listeners))
    return (np.arange(len(pairs)),) * (len(members) + len(listeners))


def _ring_times(network: Network, nbytes: float, members: Sequence[int]) -> np.ndarray:
    """Solve the ring's recurrence exactly: every member sends over one link and receives over one.

    Returns:
        Seconds until each member has the result.
    """
    source = np.array(members)
    target = np.roll(source, -1)
    hop_M = nbytes / len(source) / _lone_rate(network, source, target)
    delay_M = network.delay_RxR[source, target]
    free_M, arrival_M = np.zeros(len(source)), np.zeros(len(source))
    for _ in range(2 * (len(source) - 1)):
        free_M = np.maximum(free_M, arrival_M) + hop_M
        arrival_M = np.roll(free_M + delay_M, 1)
    return arrival_M


def _pair_times(network: Network, nbytes_M, members: tuple[int, int]):
    """Solve two opposite messages, which share nothing (NoLoCo makes thousands of them)."""
    links = {}
    ready_M = np.zeros(2)
    for i, (source, target) in enumerate((members, members[::-1])):
        rate = float(_lone_rate(network, source, target))
        ready_M[1 - i] = nbytes_M[i] / rate + network.delay_RxR[source, target]
        links[source, target] = nbytes_M[i]
    return ready_M, links


def _lone_rate(network: Network, source, target):
    """Give the bytes per second of a message that shares neither its link nor its ends."""
    limit = np.minimum(network.egress_rate_R[source], network.ingress_rate_R[target])
    return np.minimum(network.rate_RxR[source, target], limit)
