"""Random pipeline routing: the one place where activations cross regions within a step.

Between two stages a permutation of the regions says which region continues the microbatch of which.
It is drawn for every microbatch and every boundary between stages. Gradients take the same way
back; labels travel with the activations. Source: NoLoCo, arXiv 2506.10911, section 3, and its code.

Differs from the paper in that a compiled program holds every transfer it may make. Microbatch m
passes boundary s in tick t = m + s. A tick is one transfer over all boundaries at once and draws
one row of a fixed table, which has a permutation for each boundary (`table`):

- Rows of different ticks are independent. So are the permutations along a microbatch's path, and
  those of all microbatches at one boundary. Only microbatch m at boundary s and m - k at s + k
  share a row. Where the table holds all combinations these are independent too; else they are the
  combinations that the table happens to hold.
- Up to 4 regions a permutation is any of all R!, equally likely, as in the paper. From 5 regions
  on it is one of some random ones and their cyclic shifts. Any two replicas of neighbouring stages
  are equally likely to meet, but most permutations are never drawn.

A table has at most 24 rows for up to 12 regions, 2 R above. Of S stages a program holds at most
2 S - 3 transfers a row, and as many backward; it runs one of them a tick.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.mesh.stages import STAGE, index

LABEL_BYTES = 8  # of a token: int32 target and fp32 weight
ROWS = 24  # of a table, about
PATHS = 4  # what a stream of random numbers is for; `rules.topology` has 1 to 3

PyTree = Any
Way = tuple[int, ...]  # region r sends to region way[r]; to itself: nothing


class Hop(NamedTuple):
    """Transfers between regions at one time: along each way every region sends `nbytes`."""

    ways: tuple[Way, ...]
    nbytes: int


@functools.lru_cache(maxsize=64)
def table(regions: int, boundaries: int, seed: int) -> np.ndarray:
    """What ticks draw from, int32 `[P, B, R]`: a permutation of the regions for each boundary.

    At every boundary a region hands on to each region in equally many of the P rows.
    """
    stream = np.random.PCG64(np.random.SeedSequence((int(seed), regions, PATHS)))
    columns = [_permutations(regions, stream) for _ in range(boundaries)]
    if math.prod(map(len, columns)) <= ROWS:
        rows = list(itertools.product(*columns))
    else:
        longer = [np.tile(column, (max(1, ROWS // len(column)), 1)) for column in columns]
        rows = list(zip(*(column[_order(len(column), stream)] for column in longer), strict=True))
    found = np.array(rows, np.int32).reshape(len(rows), boundaries, regions)
    found.flags.writeable = False
    return found


def _permutations(regions: int, stream: np.random.PCG64) -> np.ndarray:
    """All permutations where they are few, else random ones and their shifts, `[N, R]`."""
    if math.factorial(regions) <= ROWS:
        return np.array(list(itertools.permutations(range(regions))))
    some = np.stack([_order(regions, stream) for _ in range(max(2, ROWS // regions))])
    shifted = (some[:, None] + np.arange(regions)[:, None]) % regions
    return shifted.reshape(-1, regions)


def _order(count: int, stream: np.random.PCG64) -> np.ndarray:
    """A random order of 0 ... count - 1."""
    return np.argsort(stream.random_raw(count), kind="stable")


def label(target_MxN: jax.Array, weight_MxN: jax.Array) -> jax.Array:
    """int32 targets and fp32 weights `[M, N]` as the one array that travels, int32 `[M, 2, N]`."""
    bits_MxN = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(weight_MxN), jnp.int32)
    return jnp.stack([target_MxN, bits_MxN], axis=1)


def read_labels(came_Mx2xN: jax.Array, stages: int) -> tuple[jax.Array, jax.Array]:
    """(targets int32, weights fp32), `[M, N]`, of the last stage, given to all stages."""
    came_Mx2xN = jnp.where(index() == stages - 1, came_Mx2xN, 0)
    target_MxN, bits_MxN = jnp.moveaxis(jax.lax.psum(came_Mx2xN, STAGE), 1, 0)
    return target_MxN, jax.lax.bitcast_convert_type(bits_MxN, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Paths:
    """Ways of M microbatches through S stages of R regions, in M + S - 1 ticks.

    Microbatch m leaves stage s after tick m + s. What idle stages compute goes to no region.

    Attributes:
      regions, stages, microbatches: R, S, M.
      seed: of the table.
    """

    regions: int
    stages: int
    microbatches: int
    seed: int = 0

    @property
    def ticks(self) -> int:
        return self.microbatches + self.stages - 1

    @property
    def table(self) -> np.ndarray:
        return table(self.regions, self.stages - 1, self.seed)

    def leaving(self, tick: int) -> range:
        """Stages that pass their result of this tick on to the next stage."""
        return range(max(0, tick - self.microbatches + 1), min(tick, self.stages - 2) + 1)

    def draw(self, key_data: jax.Array) -> jax.Array:
        """Row of the table that each tick takes, int32 `[T]`."""
        key = jax.random.wrap_key_data(key_data)
        return jax.random.randint(key, (self.ticks,), 0, len(self.table))

    def agreed(self, key_data: jax.Array) -> jax.Array:
        """`draw` by region 0's key in all regions; the 8 bytes a device receives are not booked."""
        return self.draw(jax.lax.all_gather(key_data, REGION)[0])

    def hand_on(self, held: PyTree, tick: jax.Array, row_T: jax.Array) -> PyTree:
        """Move results one stage on, between regions as the row says (traced).

        Args:
          held: this stage's results.
          tick: int32 scalar.
          row_T: int32 `[T]`, of `draw`.

        Returns:
          What the stage before sent here, like `held`; zeros where nothing was sent. Its gradients
          take the same way back.
        """
        transfers, number_TxP = _transfers(self)
        moves = [functools.partial(_move, pairs) for pairs in transfers]
        return jax.lax.switch(jnp.asarray(number_TxP)[tick, row_T[tick]], moves, held)

    def hops(self, row_T: np.ndarray, activation: int, labels: int) -> list[Hop]:
        """Every transfer of a gradient step, in order: forward, then backward.

        Args:
          row_T: int32 `[T]`, as drawn, on the host.
          activation, labels: bytes of one microbatch's activations and labels.
        """
        ways_T = [_between_regions(self, self.leaving(t), int(row_T[t])) for t in range(self.ticks)]
        there = [Hop(ways, activation + labels) for ways, _ in ways_T if ways]
        return there + [Hop(back, activation) for _, back in reversed(ways_T) if back]


@functools.lru_cache(maxsize=64)
def _transfers(paths: Paths) -> tuple[list[tuple[tuple[int, int], ...]], np.ndarray]:
    """(all that a program may transfer, which of them a tick does with a row, int32 `[T, P]`).

    A transfer is (from, to) pairs of devices, in the order of the axes (region, stage).
    """
    numbers: dict[tuple[tuple[int, int], ...], int] = {}

    def number(leaving: range, row: np.ndarray) -> int:
        pairs = tuple(
            (r * paths.stages + s, int(row[s, r]) * paths.stages + s + 1)
            for s in leaving
            for r in range(paths.regions)
        )
        return numbers.setdefault(pairs, len(numbers))

    ticks = [paths.leaving(t) for t in range(paths.ticks)]
    rows = {who: [number(who, row) for row in paths.table] for who in dict.fromkeys(ticks)}
    return list(numbers), np.array([rows[who] for who in ticks], np.int32)


def _move(pairs: tuple[tuple[int, int], ...], held: PyTree) -> PyTree:
    if not pairs:
        return jax.tree.map(jnp.zeros_like, held)
    return jax.lax.ppermute(held, (REGION, STAGE), pairs)


@functools.lru_cache(maxsize=4096)
def _between_regions(
    paths: Paths, leaving: range, row: int
) -> tuple[tuple[Way, ...], tuple[Way, ...]]:
    """A row's ways from these stages on, and back, without those where every region stays."""
    ways = [paths.table[row, s] for s in leaving]
    moved = [way for way in ways if (way != np.arange(paths.regions)).any()]
    back = [np.argsort(way) for way in moved]
    return tuple(tuple(way.tolist()) for way in moved), tuple(tuple(way.tolist()) for way in back)
