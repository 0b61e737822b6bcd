"""Exchanges inside small groups: means over each region's group, traffic between partners only.

In: every region's payload and anchor, the weights of a round, and the round's groups
(`GroupExchange.draw`). Out: for every region the mean payload and the mean anchor of its group.

Regions may lie on several slots of the mesh. The partitions that a round may draw are then branches
of one program (`lax.switch`), each with the `ppermute`s of its groups. A new round then compiles
nothing, and no collective of all regions occurs. On one slot the groups are an array of indices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.exchange.mesh import MeshExchange
from lowcomm_jax.exchange.shares import run_on_shares
from lowcomm_jax.mesh.regions import REGION, Regions
from lowcomm_jax.rules.topology import Gossip, member_table

PyTree = Any
MOST_PERMUTES = 4096  # in one program: some minutes of compilation


class Draw(NamedTuple):
    """A round's groups, as a landing program takes them.

    Attributes:
      members: result of `GroupExchange.draw`.
      anchors: fp32 leaves `[n, ...]`, anchors of the members of this region's group, for separate
        jobs; None = the program holds all anchors.
      row: int32, where this region stands among those members; None with `anchors`.
    """

    members: Any
    anchors: PyTree = None
    row: Any = None


@dataclasses.dataclass(frozen=True)
class GroupExchange:
    """Reduces payloads and anchors over the groups of a round.

    Attributes:
      exchange: encodes the payloads. Anchors always travel in fp32: a rounded anchor would put a
        floor under how close the regions can come to one another.
      topology: draws the groups.
    """

    exchange: MeshExchange
    topology: Gossip

    @property
    def regions(self) -> Regions:
        return self.exchange.regions

    def draw(self, round: int) -> np.ndarray:
        """A round's groups, as the compiled program takes them.

        Returns:
          On one slot the members of each region's group, int32 `[R, n]`; else the partition's
          number, int32.
        """
        count = self.regions.count
        number = self.topology.draw(round, count)
        if self.regions.slots > 1:
            return np.asarray(number, np.int32)
        return self._table(number)

    def violations(self) -> list[str]:
        """Partitions that would take too long to compile, with the fix.

        Call it where `topology` has no violations of its own.
        """

        count, slots = self.regions.count, self.regions.slots
        others = self.topology.group_size - 1
        permutes = self.topology.count(count) * count // slots * others
        if slots == 1 or permutes <= MOST_PERMUTES:
            return []
        return [
            f"{count} regions in groups of {others + 1} on {slots} region slots of the mesh make a "
            f"program of {permutes} transfers, more than {MOST_PERMUTES}: use a mesh of one region "
            "slot"
        ]

    def means(
        self,
        payload_R: PyTree,
        anchor_R: PyTree,
        weight_R: jax.Array,
        draw: jax.Array,
        like: PyTree,
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Weighted means over each region's group, summed in order of the regions (traced).

        Bit-identical on every mesh when the weights are equal. A region of weight 0 contributes
        nothing, even when its values are not finite; one without a partner gets its own values
        exactly.

        Args:
          payload_R: leaves `[R, ...]`.
          anchor_R: fp32 leaves `[R, ...]`.
          weight_R: float32 `[R]`, not negative, not normalised.
          draw: see `draw`.
          like: shapes of one region's fragment.

        Returns:
          (mean of the decoded payloads, mean of the anchors, bool `[R]`: whether a member of the
          region's group has a weight above 0); fp32 leaves `[R, ...]`, 0 where none has.
        """
        specs, codec = self.exchange.specs_of(like), self.exchange.codec
        dense = {"anchor": anchor_R, "weight": weight_R}
        dense_specs = {"anchor": specs, "weight": P()}
        if codec is None:
            dense["payload"], dense_specs["payload"] = payload_R, specs
        members = self._members(dense, draw, dense_specs)
        weight_RxN = jnp.stack([m["weight"] for m in members], axis=1)
        weight_RxN = _relative(jnp.where(self._present(draw), weight_RxN, 0.0))
        counts_R = jnp.max(weight_RxN, axis=1) > 0
        anchor = _weighted_mean([m["anchor"] for m in members], weight_RxN)
        if codec is None:
            delta = _weighted_mean([m["payload"] for m in members], weight_RxN)
            return delta, anchor, counts_R
        coded = self._members(payload_R, draw, self.exchange.payload_specs(like))
        together = jax.tree.map(lambda *rows: jnp.stack(rows, axis=1), *coded)
        mean = self.exchange.group_mean(together, weight_RxN, like)
        return mean, anchor, counts_R

    def _table(self, number: int) -> np.ndarray:
        partition = self.topology.partition(number, self.regions.count)
        return member_table(partition, self.topology.group_size)

    def _tables(self) -> np.ndarray:
        """The members in every partition, int32 `[partitions, R, n]`."""
        return np.stack([self._table(i) for i in range(self.topology.count(self.regions.count))])

    def _present(self, draw) -> jax.Array:
        """Bool `[R, n]`: whether a region has a k-th member in its group."""
        table_RxN = draw if self.regions.slots == 1 else jnp.asarray(self._tables())[draw]
        return table_RxN >= 0

    def _members(self, tree_R: PyTree, draw, specs: PyTree) -> list[PyTree]:
        """The k-th member's rows for every region: n trees of leaves `[R, ...]`.

        A region without a k-th member gets its own row in its place.
        """
        size = self.topology.group_size
        if self.regions.slots > 1:
            plans = [plan_permutes(table, self.regions.slots) for table in self._tables()]
            branches = [lambda buffers, p=p: _fetch(p, buffers) for p in plans]

            def fetch(buffers, number):
                return jax.lax.switch(number, branches, buffers)

            return run_on_shares(self.regions, tree_R, specs, fetch, draw)
        own = jnp.arange(self.regions.count, dtype=draw.dtype)[:, None]
        index_RxN = jnp.where(draw < 0, own, draw)
        columns = [index_RxN[:, k] for k in range(size)]
        return [jax.tree.map(lambda x, i=i: x[i], tree_R) for i in columns]


def _relative(weight_RxN: jax.Array) -> jax.Array:
    """Weights as shares of the group's largest: exactly 1 for a region alone."""
    largest = jnp.max(weight_RxN, axis=1, keepdims=True)
    return jnp.where(largest > 0, weight_RxN / jnp.where(largest > 0, largest, 1.0), 0.0)


def _weighted_mean(members: list[PyTree], weight_RxN: jax.Array) -> PyTree:
    """Mean over the n members, one after the other; with weight 0 NaN counts as 0."""
    total_R = functools.reduce(jnp.add, weight_RxN.T)
    scale_R = jnp.where(total_R > 0, 1.0 / jnp.where(total_R > 0, total_R, 1.0), 0.0)

    def wide(x_R, leaf):
        return x_R.reshape(-1, *(1,) * (leaf.ndim - 1))

    def one(*rows):
        weights = [wide(weight_RxN[:, k], row) for k, row in enumerate(rows)]
        terms = [jnp.where(w > 0, row * w, 0.0) for w, row in zip(weights, rows)]
        return functools.reduce(jnp.add, terms) * wide(scale_R, rows[0])

    return jax.tree.map(one, *members)


# Transfers between mesh slots, planned on the host. A slot holds R / S rows, one a region. A row
# travels once to each other slot that needs it, and to no other. The transfers are packed into
# turns in which a slot sends at most one row and receives at most one: each is one `ppermute`.


class Permutes(NamedTuple):
    """The transfers of one partition of the regions.

    Attributes:
      pairs: of each turn the (from, to) slots.
      send: int32 `[turns, S]`, the local row that a slot sends (0 where it sends none).
      take: int32 `[S, R / S, n]`, where the k-th member of a row's group lies among the slot's own
        rows followed by the rows received; the row itself where there is no such member.
    """

    pairs: tuple[tuple[tuple[int, int], ...], ...]
    send: np.ndarray
    take: np.ndarray


def plan_permutes(member_RxN: np.ndarray, slots: int) -> Permutes:
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


def _fetch(permutes: Permutes, rows: list[jax.Array]) -> list[list[jax.Array]]:
    """Move rows `[L, ...]` between slots; the k-th members' rows for each k."""
    slot = jax.lax.axis_index(REGION)
    send, take = jnp.asarray(permutes.send), jnp.asarray(permutes.take)
    pools = []
    for own in rows:
        got = [
            jax.lax.ppermute(jax.lax.dynamic_index_in_dim(own, send[turn, slot]), REGION, pairs)
            for turn, pairs in enumerate(permutes.pairs)
        ]
        pools.append(jnp.concatenate([own, *got]))
    take_LxN = take[slot]
    return [[_rows(pool, take_LxN[:, k]) for pool in pools] for k in range(take_LxN.shape[1])]


def _rows(x: jax.Array, index_L: jax.Array) -> jax.Array:
    """Rows of x. (`x[index]` asks for int64 where a row has more values than int32 counts.)"""
    return jax.vmap(lambda i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False))(index_L)
