"""The bytes that an exchange puts on each link.

Routes (n members, b_i payload bytes of member i, b when all are equal):

| route | bytes each member sends | a member has the result once |
| --- | --- | --- |
| two_shot | (n - 1) / n b as slices to owners, as much of reduced slices back | all slices are in |
| all_gather | (n - 1) b_i, its whole payload to each other member | all payloads are in |
| pair | as all_gather, inside small groups | its partners' payloads are in |
| pass | b_i, to the next member, the last to the first | the payload of the member before is in |

A two_shot carries values that can be added on the way, so all members' payloads have one size. Its
second leg carries re-encoded slices of the same size.

Listeners contribute nothing but receive the same as members: every payload of an all_gather, every
reduced slice of a two_shot. One member with listeners is a one-to-all send: its whole payload to
each of them.
"""

import functools
from collections.abc import Sequence

from lowcomm_jax.network.flows import Flow
from lowcomm_jax.refused import refuse

HEARD = ("two_shot", "all_gather")  # routes that may have listeners
ROUTES = (*HEARD, "pair", "pass")


def check(
    route: str,
    nbytes_M: Sequence[float],
    members: Sequence[int],
    size: int,
    listeners: Sequence[int] = (),
) -> None:
    """Refuse a collective that cannot run.

    Raises:
        ValueError: all violations in one message.
    """
    found, everyone = [], (*members, *listeners)
    if route not in ROUTES:
        found.append(f"route {route!r} is unknown: use one of {', '.join(ROUTES)}")
    if not members:
        found.append("there are no members: name at least one region that sends")
    if len(nbytes_M) != len(members):
        found.append(f"{len(nbytes_M)} payload sizes for {len(members)} members: give one a member")
    if len(set(everyone)) != len(everyone):
        found.append(f"members {everyone} repeat a region: name each once")
    outside = [m for m in everyone if not 0 <= m < size]
    if outside:
        found.append(f"members {outside} are no regions: use ids 0 to {size - 1}")
    if any(b < 0 for b in nbytes_M):
        found.append(f"payload sizes {list(nbytes_M)} must not be negative")
    if route == "two_shot" and len(set(nbytes_M)) > 1:
        sizes = sorted(set(nbytes_M))
        found.append(f"route {route!r} needs equal payload sizes, got {sizes}: use all_gather")
    if listeners and route not in HEARD:
        known = ", ".join(HEARD)
        found.append(f"route {route!r} has no listeners: use {known}, or leave them out")
    refuse(f"collective {route!r}", found)


def flows_of(
    route: str,
    nbytes_M: Sequence[float],
    members: Sequence[int],
    listeners: Sequence[int] = (),
) -> tuple[list[Flow], list[list[int]]]:
    """Write a collective as flows.

    Returns:
        The flows, and per member, then per listener, the indices of the flows after whose arrival
        it has the result.
    """
    if route == "two_shot":
        return _two_shot(nbytes_M[0], members, listeners)
    if route == "pass":
        return _pass(nbytes_M, members)
    return _all_gather(nbytes_M, members, listeners)


def _all_gather(nbytes_M, members, listeners):
    everyone = (*members, *listeners)
    flows, waits = [], [[] for _ in everyone]
    for i, source in enumerate(members):
        for j, target in enumerate(everyone):
            if i != j:
                waits[j].append(len(flows))
                flows.append(Flow(source, target, nbytes_M[i]))
    return flows, waits


def _pass(nbytes_M, members):
    after = (*members[1:], members[0])
    flows = [Flow(*flow) for flow in zip(members, after, nbytes_M, strict=True)]
    return flows, [[(i - 1) % len(members)] for i in range(len(members))]


def _two_shot(nbytes, members, listeners):
    everyone, share = (*members, *listeners), nbytes / len(members)
    flows, first = _all_gather([share] * len(members), members, ())
    # The owner also waits for the slices it reduces.
    waits = [list(indices) for indices in first] + [[] for _ in listeners]
    for i, source in enumerate(members):
        for j, target in enumerate(everyone):
            if i != j:
                waits[j].append(len(flows))
                flows.append(Flow(source, target, share, after=tuple(first[i])))
    return flows, waits


@functools.lru_cache(maxsize=4096)
def link_bytes(
    route: str,
    nbytes_M: tuple[float, ...],
    members: tuple[int, ...],
    listeners: tuple[int, ...] = (),
) -> dict[tuple[int, int], float]:
    """Give the bytes on each directed link of one collective, without a network.

    Raises:
        ValueError: see `check`.
    """
    check(route, nbytes_M, members, max((*members, *listeners), default=0) + 1, listeners)
    if len(members) + len(listeners) == 1:
        return {}
    links: dict[tuple[int, int], float] = {}
    for flow in flows_of(route, nbytes_M, members, listeners)[0]:
        links[flow.source, flow.target] = links.get((flow.source, flow.target), 0.0) + flow.nbytes
    return links
