"""Volumes that move at the same time, and share links, egress and ingress fairly (max-min).

`max_min` gives fair speeds. `stretches` moves volumes at the speeds they get, which change when one
starts or ends; so it is exact for fluid traffic, and deterministic. Both serve flows within one
collective (`arrivals`) and collectives beside one another (`transfers`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowcomm_jax.network.links import Network

EDGE = 1e-12  # relative slack for float comparisons


def max_min(
    item_E: np.ndarray,
    resource_E: np.ndarray,
    use_E: np.ndarray,
    room_Q: np.ndarray,
    count: int,
    most: float = np.inf,
) -> np.ndarray:
    """Give max-min fair speeds, float64 `[count]`: nothing can be faster without slowing what is
    not faster than itself.

    Args:
        item_E, resource_E, use_E: entry e says that an item uses so much of a resource for each
            unit of its speed.
        room_Q: how much there is of each resource.
        count: of items.
        most: highest speed.
    """
    speed_T, free_T = np.zeros(count), np.ones(count, bool)
    while free_T.any():
        load_Q = np.bincount(resource_E, use_E * free_T[item_E], len(room_Q))
        level_Q = np.where(load_Q > EDGE, room_Q / np.maximum(load_Q, EDGE), np.inf)
        level = min(most, float(level_Q.min(initial=np.inf)))
        stuck_T = free_T.copy()
        if level < most:
            full_E = (level_Q <= level * (1 + EDGE))[resource_E] & (use_E > EDGE)
            stuck_T &= np.bincount(item_E, full_E, count) > 0
        speed_T[stuck_T] = level
        room_Q = room_Q - level * np.bincount(resource_E, use_E * stuck_T[item_E], len(room_Q))
        room_Q = np.maximum(room_Q, 0.0)
        free_T &= ~stuck_T
    return speed_T


class Stretch(NamedTuple):
    """A time in which nothing starts or ends.

    Attributes:
        begin_s, end_s: from when to when.
        moving: numbers of what moves.
        speed: of each of these.
        ended: numbers of what is through at its end.
    """

    begin_s: float
    end_s: float
    moving: np.ndarray
    speed: np.ndarray
    ended: np.ndarray


def stretches(
    volume_T: np.ndarray, ready_T: np.ndarray, speeds: Callable[[np.ndarray], np.ndarray]
) -> Iterator[Stretch]:
    """Move volumes until all are through that ever start.

    Args:
        volume_T: in units of speed times seconds.
        ready_T: when each starts. The caller may set entries that are inf after any stretch.
        speeds: of what moves at the same time, by its numbers.
    """
    left_T, open_T = volume_T.astype(float), np.ones(len(volume_T), bool)
    now = float(ready_T.min(initial=np.inf))
    while open_T.any():
        moving = np.flatnonzero(open_T & (ready_T <= now))
        speed = speeds(moving)
        through = now + left_T[moving] / speed
        later = ready_T[open_T & (ready_T > now)].min(initial=np.inf)
        until = float(min(later, through.min(initial=np.inf)))
        if until == np.inf:
            return
        left_T[moving] -= (until - now) * speed
        ended = moving[through <= until + EDGE * abs(until)]
        open_T[ended] = False
        yield Stretch(now, until, moving, speed, ended)
        now = until


@dataclass(frozen=True)
class Flow:
    """Bytes from one region to another.

    Attributes:
        source, target: region ids.
        nbytes: payload bytes.
        after: indices of the flows that must have arrived first; so the phases of a collective are
            written down.
    """

    source: int
    target: int
    nbytes: float
    after: tuple[int, ...] = ()


def fair_rates(network: Network, source_F: np.ndarray, target_F: np.ndarray) -> np.ndarray:
    """Give fair rates in bytes per second of flows that run at the same time.

    Args:
        network: links and limits.
        source_F, target_F: region ids of each running flow.
    """
    count, size = len(source_F), network.size
    resource_E = np.concatenate(
        [source_F * size + target_F, size * size + source_F, size * size + size + target_F]
    )
    room_Q = np.concatenate(
        [network.rate_RxR.ravel(), network.egress_rate_R, network.ingress_rate_R]
    )
    return max_min(np.tile(np.arange(count), 3), resource_E, np.ones(3 * count), room_Q, count)


def arrivals(network: Network, flows: Sequence[Flow]) -> np.ndarray:
    """Run flows to the end; give the seconds at which each has arrived (end + one-way delay)."""
    source_F = np.array([flow.source for flow in flows], int)
    target_F = np.array([flow.target for flow in flows], int)
    ready_F = np.array([np.inf if flow.after else 0.0 for flow in flows])
    arrival_F = np.full(len(flows), np.inf)
    followers: dict[int, list[int]] = {}
    for i, flow in enumerate(flows):
        for k in flow.after:
            followers.setdefault(k, []).append(i)

    def rates(moving: np.ndarray) -> np.ndarray:
        return fair_rates(network, source_F[moving], target_F[moving])

    for stretch in stretches(np.array([flow.nbytes for flow in flows]), ready_F, rates):
        for k in stretch.ended.tolist():
            arrival_F[k] = stretch.end_s + network.delay_RxR[source_F[k], target_F[k]]
        for i in {i for k in stretch.ended.tolist() for i in followers.get(k, ())}:
            ready_F[i] = max(arrival_F[k] for k in flows[i].after)
    return arrival_F
