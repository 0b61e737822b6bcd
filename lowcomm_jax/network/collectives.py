"""How each exchange travels: its flows, its bytes per link, its duration.

Routes (n members, b_i payload bytes of member i, b when all are equal):

| route | bytes each member sends | a member has the result once |
| --- | --- | --- |
| ring | 2 (n - 1) / n b, in 2 (n - 1) hops to the next member | the last hop is in |
| two_shot | (n - 1) / n b as slices to owners, as much of reduced slices back | all slices are in |
| gather | (n - 1) b_i, its whole payload to each other member | all payloads are in |
| tree | b up to its parent (binary heap), b down to each child | its parent's message is in |
| star | b to the server (member 0), which sends b back to each | the server's message is in |
| pair | as gather, inside small groups | its partners' payloads are in |

A ring, two_shot, tree and star carry values that can be added on the way, so all members' payloads
have one size; the second leg of two_shot carries re-encoded slices of the same size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.errors import raise_all
from lowcomm_jax.network.flows import Flow, simulate
from lowcomm_jax.network.links import Network

ROUTES = ("ring", "two_shot", "gather", "tree", "star", "pair")
EQUAL_SIZE = frozenset({"ring", "two_shot", "tree", "star"})


@dataclass(frozen=True)
class Profile:
    """A collective running alone.

    Attributes:
        members: region ids, in order.
        duration_s: until the last member has the result, without per-sync constants.
        latency_s: the same with payloads of zero bytes: the part that bandwidth cannot shorten.
        ready_M: seconds until each member has the result.
        sources, targets, bytes_L: the directed links used and the bytes on each.
        peak_L: fastest rate in bytes per second seen on each of these links.
        ready_links: per member the positions of the links its result depends on (for jitter).
    """

    members: tuple[int, ...]
    duration_s: float
    latency_s: float
    ready_M: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    bytes_L: np.ndarray
    peak_L: np.ndarray
    ready_links: tuple[np.ndarray, ...]


def check(route: str, nbytes_M: Sequence[float], members: Sequence[int], size: int) -> None:
    """Refuse a collective that cannot run.

    Raises:
        ValueError: all violations in one message.
    """
    found = []
    if route not in ROUTES:
        found.append(f"route {route!r} is unknown: use one of {', '.join(ROUTES)}")
    if len(nbytes_M) != len(members):
        found.append(f"{len(nbytes_M)} payload sizes for {len(members)} members: give one a member")
    if len(set(members)) != len(members):
        found.append(f"members {tuple(members)} repeat a region: name each once")
    outside = [m for m in members if not 0 <= m < size]
    if outside:
        found.append(f"members {outside} are no regions: use ids 0 to {size - 1}")
    if any(b < 0 for b in nbytes_M):
        found.append(f"payload sizes {list(nbytes_M)} must not be negative")
    if route in EQUAL_SIZE and len(set(nbytes_M)) > 1:
        found.append(
            f"route {route!r} needs equal payload sizes, got {sorted(set(nbytes_M))}: use gather"
        )
    raise_all(f"collective {route!r}", found)


def flows_of(
    route: str, nbytes_M: Sequence[float], members: Sequence[int]
) -> tuple[list[Flow], list[list[int]]]:
    """Write a collective as flows.

    Returns:
        The flows, and per member the indices of the flows after whose arrival it has the result.
    """
    builders = {
        "two_shot": _two_shot,
        "gather": _gather,
        "pair": _gather,
        "tree": _tree,
        "star": _star,
        "ring": _ring,
    }
    return builders[route](list(nbytes_M), list(members))


def _gather(nbytes_M, members):
    flows, waits = [], [[] for _ in members]
    for i, source in enumerate(members):
        for j, target in enumerate(members):
            if i != j:
                waits[j].append(len(flows))
                flows.append(Flow(source, target, nbytes_M[i]))
    return flows, waits


def _two_shot(nbytes_M, members):
    slice_bytes = nbytes_M[0] / len(members)
    flows, first = _gather([slice_bytes] * len(members), members)
    waits = [list(indices) for indices in first]  # the owner also waits for the slices it reduces
    for i, source in enumerate(members):
        for j, target in enumerate(members):
            if i != j:
                waits[j].append(len(flows))
                flows.append(Flow(source, target, slice_bytes, after=tuple(first[i])))
    return flows, waits


def _tree(nbytes_M, members):
    count, size = len(members), nbytes_M[0]
    flows: list[Flow] = []
    up: dict[int, int] = {}
    for i in range(count - 1, 0, -1):  # children have larger heap positions than their parents
        after = tuple(up[c] for c in (2 * i + 1, 2 * i + 2) if c < count)
        up[i] = len(flows)
        flows.append(Flow(members[i], members[(i - 1) // 2], size, after))
    root = [up[c] for c in (1, 2) if c < count]
    waits = [root]
    for i in range(1, count):
        parent = (i - 1) // 2
        after = tuple(waits[parent])
        waits.append([len(flows)])
        flows.append(Flow(members[parent], members[i], size, after))
    return flows, waits


def _star(nbytes_M, members):
    size, server = nbytes_M[0], members[0]
    flows = [Flow(member, server, size) for member in members[1:]]
    up = list(range(len(flows)))
    waits = [up]
    for member in members[1:]:
        waits.append([len(flows)])
        flows.append(Flow(server, member, size, tuple(up)))
    return flows, waits


def _ring(nbytes_M, members):
    """Hop k of member i waits until hop k - 1 of the member before it has arrived."""
    count = len(members)
    hop_bytes, hops = nbytes_M[0] / count, 2 * (count - 1)
    flows: list[Flow] = []
    for k in range(hops):
        for i in range(count):
            after = () if k == 0 else ((k - 1) * count + (i - 1) % count,)
            flows.append(Flow(members[i], members[(i + 1) % count], hop_bytes, after))
    waits = [[(hops - 1) * count + (i - 1) % count] for i in range(count)]
    return flows, waits


def _ring_times(
    network: Network, nbytes: float, members: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Solve the ring's recurrence exactly: every member sends over one link and receives over one.

    Returns:
        Seconds until each member has the result, and each link's rate.
    """
    source = np.array(members)
    target = np.roll(source, -1)
    rate_M = np.minimum(
        network.rate_RxR[source, target],
        np.minimum(network.egress_rate_R[source], network.ingress_rate_R[target]),
    )
    hop_M = nbytes / len(source) / rate_M
    delay_M = network.delay_RxR[source, target]
    free_M, arrival_M = np.zeros(len(source)), np.zeros(len(source))
    for _ in range(2 * (len(source) - 1)):
        free_M = np.maximum(free_M, arrival_M) + hop_M
        arrival_M = np.roll(free_M + delay_M, 1)
    return arrival_M, rate_M


def _pair_times(network: Network, nbytes_M, members: tuple[int, int]):
    """Solve two opposite messages, which share nothing (NoLoCo makes thousands of them)."""
    links = {}
    ready_M = np.zeros(2)
    for i, (source, target) in enumerate((members, members[::-1])):
        limits = network.egress_rate_R[source], network.ingress_rate_R[target]
        rate = float(min(network.rate_RxR[source, target], *limits))
        ready_M[1 - i] = nbytes_M[i] / rate + network.delay_RxR[source, target]
        links[source, target] = (nbytes_M[i], rate)
    return ready_M, links


def profile(
    network: Network, route: str, nbytes_M: Sequence[float], members: Sequence[int]
) -> Profile:
    """Run one collective alone on the network.

    Args:
        network: links and limits.
        route: one of `ROUTES`.
        nbytes_M: payload bytes of each member.
        members: region ids.

    Returns:
        Durations, bytes and peak rates; one member alone needs nothing.

    Raises:
        ValueError: see `check`.
    """
    check(route, nbytes_M, members, network.size)
    members = tuple(int(m) for m in members)
    if len(members) == 1:
        empty = np.zeros(0, int)
        return Profile(
            members, 0.0, 0.0, np.zeros(1), empty, empty, np.zeros(0), np.zeros(0), (empty,)
        )
    ready_M, links = _timed(network, route, tuple(float(b) for b in nbytes_M), members)
    latency_M, _ = _timed(network, route, (0.0,) * len(members), members)
    pairs = sorted(links)
    position = {pair: k for k, pair in enumerate(pairs)}
    if route in ("gather", "pair"):
        depends = tuple(np.array([position[p] for p in pairs if p[1] == m], int) for m in members)
    else:
        depends = (np.arange(len(pairs)),) * len(members)
    return Profile(
        members=members,
        duration_s=float(ready_M.max()),
        latency_s=float(latency_M.max()),
        ready_M=ready_M,
        sources=np.array([p[0] for p in pairs], int),
        targets=np.array([p[1] for p in pairs], int),
        bytes_L=np.array([links[p][0] for p in pairs]),
        peak_L=np.array([links[p][1] for p in pairs]),
        ready_links=depends,
    )


def _timed(network, route, nbytes_M, members):
    """Give the ready times per member and {link: (bytes, peak rate)}."""
    if route == "ring":
        ready_M, rate_M = _ring_times(network, nbytes_M[0], members)
        sent = nbytes_M[0] * 2 * (len(members) - 1) / len(members)
        pairs = zip(members, members[1:] + members[:1], strict=True)
        return ready_M, {
            pair: (sent, float(rate)) for pair, rate in zip(pairs, rate_M, strict=True)
        }
    if len(members) == 2 and route in ("gather", "pair"):
        return _pair_times(network, nbytes_M, members)
    flows, waits = flows_of(route, nbytes_M, members)
    times = simulate(network, flows)
    ready_M = np.array([max(times.arrival_F[i] for i in indices) for indices in waits])
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for flow, peak in zip(flows, times.peak_rate_F, strict=True):
        nbytes, fastest = links.get((flow.source, flow.target), (0.0, 0.0))
        links[flow.source, flow.target] = (nbytes + flow.nbytes, max(fastest, float(peak)))
    return ready_M, links


def seconds(
    network: Network, route: str, nbytes: float, members: Sequence[int] | None = None
) -> float:
    """Give the seconds of one collective alone, with the network's per-sync constant (T_s).

    Args:
        network: links and limits.
        route: one of `ROUTES`.
        nbytes: payload bytes of every member.
        members: region ids; None = all (for `pair`: the slowest of all pairs).

    Raises:
        ValueError: see `check`.
    """
    if route == "pair" and members is None:
        count = network.size
        pairs = [(i, j) for i in range(count) for j in range(i + 1, count)] or [(0,)]
        return max(seconds(network, route, nbytes, pair) for pair in pairs)
    members = tuple(range(network.size)) if members is None else tuple(members)
    alone = len(members) == 1
    return profile(
        network, route, [nbytes] * len(members), members
    ).duration_s + network.sync_constant_s * (not alone)


@functools.lru_cache(maxsize=4096)
def link_bytes(
    route: str, nbytes_M: tuple[float, ...], members: tuple[int, ...]
) -> dict[tuple[int, int], float]:
    """Give the bytes on each directed link of one collective, without a network.

    Raises:
        ValueError: see `check`.
    """
    check(route, nbytes_M, members, max(members) + 1)
    if len(members) == 1:
        return {}
    if route == "ring":
        sent = nbytes_M[0] * 2 * (len(members) - 1) / len(members)
        return {pair: sent for pair in zip(members, members[1:] + members[:1], strict=True)}
    links: dict[tuple[int, int], float] = {}
    for flow in flows_of(route, nbytes_M, members)[0]:
        links[flow.source, flow.target] = links.get((flow.source, flow.target), 0.0) + flow.nbytes
    return links


def sent_bytes(route: str, nbytes: float, members: int) -> float:
    """Give the closed-form mean of the bytes one member sends (equal payloads): the analytic
    figure.
    """
    if members == 1:
        return 0.0
    factors = {
        "ring": 2 * (members - 1) / members,
        "two_shot": 2 * (members - 1) / members,
        "gather": members - 1,
        "pair": members - 1,
        "tree": 2 * (members - 1) / members,
        "star": 2 * (members - 1) / members,
    }
    return nbytes * factors[route]
