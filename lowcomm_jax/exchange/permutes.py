"""Which row travels between which mesh slots, when regions fetch rows of one another (host side).

A slot holds R / S rows. A row travels once to each other slot that needs it, and to no other. The
transfers are packed into rounds in which a slot sends at most one row and receives at most one:
each is then one `ppermute`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Permutes(NamedTuple):
    """The transfers of one partition of the regions.

    Attributes:
      pairs: per round the (from, to) slots.
      send: int32 `[rounds, S]`, the local row that a slot sends (0 where it sends none).
      take: int32 `[S, R / S, n]`, where the k-th member of a row's group lies among the slot's own
        rows followed by the rows received; the row itself where there is no such member.
    """

    pairs: tuple[tuple[tuple[int, int], ...], ...]
    send: np.ndarray
    take: np.ndarray


def plan(member_RxN: np.ndarray, slots: int) -> Permutes:
    """Plan the transfers that bring every row those of its group.

    Args:
      member_RxN: int32, regions each region needs (`topology.member_table`); -1 = none.
      slots: S; region r is row r % (R / S) of slot r // (R / S).
    """
    regions, size = member_RxN.shape
    rows = regions // slots
    pairs: list[list[tuple[int, int]]] = []
    send: list[np.ndarray] = []
    position = {}  # (source region, slot) -> where that slot finds it
    for region in range(regions):
        position[region, region // rows] = region % rows
    for source, target in _transfers(member_RxN, rows):
        start = source // rows
        turn = next((i for i, used in enumerate(pairs) if _free(used, start, target)), len(pairs))
        if turn == len(pairs):
            pairs.append([])
            send.append(np.zeros(slots, np.int32))
        pairs[turn].append((start, target))
        send[turn][start] = source % rows
        position[source, target] = rows + turn
    take = np.zeros((regions, size), np.int32)
    for region, members in enumerate(member_RxN):
        for k, member in enumerate(members):
            found = region if member < 0 else int(member)
            take[region, k] = position[found, region // rows]
    return Permutes(
        pairs=tuple(map(tuple, pairs)),
        send=np.array(send, np.int32).reshape(-1, slots),
        take=take.reshape(slots, rows, size),
    )


def _transfers(member_RxN: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """(source region, slot that needs it), each once, without those already there."""
    found = {
        (int(member), region // rows)
        for region, members in enumerate(member_RxN)
        for member in members
        if member >= 0 and member // rows != region // rows
    }
    return sorted(found)


def _free(used: list[tuple[int, int]], start: int, target: int) -> bool:
    return all(start != a and target != b for a, b in used)
