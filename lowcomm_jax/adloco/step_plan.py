"""Turns the batch a policy asks for into microbatches that fit into memory (AdLoCo's switch mode).

In: a requested batch, samples a region and step. Out: a `Plan`, the microbatch and how many of them
a step of each region accumulates; regions of uneven hardware may have different numbers. `find_cap`
finds the largest microbatch for a memory budget, by the compiler's analysis of a step.

Below the cap the microbatch grows in buckets, each of which compiles once. Requests between the cap
and n caps are cut to the cap, since two or three accumulated microbatches would cost as much time
as they save noise. Larger requests are accumulated from microbatches of the cap.

Differs from the published code: the microbatch is never the requested batch itself, and the number
of trainers changes nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.offload import HOST
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.planner.memory import compiled_memory
from lowcomm_jax.refusals import UNFIT, microbatch_problems
from lowcomm_jax.refused import refuse
from lowcomm_jax.state.train_state import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """An inner step.

    Attributes:
      batch: samples per region that were asked for.
      microbatch: samples in memory at once.
      counts_R: microbatches of every region, whose gradients are averaged.
    """

    batch: int
    microbatch: int
    counts_R: tuple[int, ...]

    @property
    def samples_R(self) -> np.ndarray:
        """Samples of every region, int64 `[R]`; not as asked for, where a plan rounds or cuts."""
        return np.asarray(self.counts_R, np.int64) * self.microbatch

    @property
    def read(self) -> int:
        """Samples of a region that are read: those of the region that takes the most."""
        return max(self.counts_R) * self.microbatch

    @property
    def total(self) -> int:
        """Samples of all regions."""
        return sum(self.counts_R) * self.microbatch

    @property
    def mean(self) -> float:
        """Samples of a region, the mean over regions."""
        return self.total / len(self.counts_R)

    def of(self, regions: Sequence[int]) -> Plan:
        """The step of these regions."""
        return dataclasses.replace(self, counts_R=tuple(self.counts_R[r] for r in regions))


@dataclasses.dataclass(frozen=True)
class Switch:
    """Plans inner steps; a pure function of the requested batch, the same in every region.

    Attributes:
      cap: largest microbatch that fits into memory (`find_cap`), at least `start`.
      start: smallest microbatch; the buckets are its doublings below the cap, and the cap.
      threshold: n >= 1; requests above n caps are accumulated.
      shares: R positive numbers in any unit, how regions of uneven hardware share a step; None =
        equally. They are rounded to whole microbatches, at least 1, so that a step of one
        microbatch a region cannot be shared unevenly.
      regions: R.
    """

    cap: int
    start: int = 1
    threshold: float = 2.0
    shares: Sequence[float] | None = None
    regions: int = 1

    def buckets(self) -> tuple[int, ...]:
        """Every microbatch that a plan may have, ascending."""
        sizes = []
        size = self.start
        while size < self.cap:
            sizes.append(size)
            size *= 2
        return (*sizes, self.cap)

    def plan(self, requested: int) -> Plan:
        """Plan steps for a requested batch (samples a region and step)."""
        if requested > self.threshold * self.cap:
            return Plan(requested, self.cap, self._counts(math.ceil(requested / self.cap)))
        bucket = min(b for b in self.buckets() if b >= min(requested, self.cap))
        return Plan(requested, bucket, self._counts(1))

    def most(self, requested: int) -> int:
        """Most microbatches of a region's step, of all batches up to this one."""
        return max(self._counts(math.ceil(requested / self.cap)))

    def _counts(self, accumulate: int) -> tuple[int, ...]:
        """Microbatches of each region's step, of so many on average."""
        if self.shares is None:
            return (accumulate,) * self.regions
        part_R = np.asarray(self.shares, np.float64) / np.sum(np.asarray(self.shares, np.float64))
        return tuple(max(1, round(float(x))) for x in part_R * accumulate * self.regions)


def find_cap(nbytes: Callable[[int], int], budget: int, start: int, limit: int) -> int:
    """Find the largest microbatch whose step fits into a memory budget, by bisection.

    Args:
      nbytes: microbatch -> bytes of a device (`step_bytes`); must grow with the microbatch. It is
        called about log2(limit / start) times.
      budget: bytes of a device that may be used.
      start: the smallest; the answer is a multiple of it.
      limit: the largest to ask for, at least `start`.

    Raises:
      ValueError: not even `start` fits.
    """
    multiples = range(start, limit + 1, start)
    fitting = bisect.bisect_right(multiples, budget, key=nbytes)
    if fitting == 0:
        raise ValueError(
            f"a microbatch of {start} needs {nbytes(start)} bytes of a device and the budget is "
            f"{budget}: give more memory, a smaller model, or a smaller start batch"
        )
    return multiples[fitting - 1]


def step_bytes(engine: Engine, state: TrainState, batch: PyTree, microbatch: int) -> int:
    """Bytes on the fullest device while inner steps of one microbatch size run.

    The compiler's sum of arguments, results and temporaries; the arguments are the inner state of
    the regions that a device holds, and the staged buffer. The state that only sends and landings
    touch comes on top. What sends and landings need themselves, while no activations are alive, is
    not counted. Each call compiles a step and keeps nothing of it.

    Args:
      batch: host batch `[R, b, ...]`; its shapes and dtypes count, its b does not.
      microbatch: m.

    Raises:
      ValueError: microbatches the engine cannot run.
    """
    refuse(UNFIT, microbatch_problems(engine.setup, [microbatch]))
    programs, regions = engine.sync_loop(state).programs, engine.regions
    placed = None if regions.mesh.size == 1 else regions.sharding(REGION, None, "fsdp")

    def staged(x: Any) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        shape = (regions.count, engine.block, microbatch, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=placed)

    active = jax.ShapeDtypeStruct((regions.count, engine.block), bool)
    whole = jax.ShapeDtypeStruct((), np.int32)
    needed = compiled_memory(
        programs.microbatch_program,
        *jax.tree.map(_abstract, (state.inner, state.frozen)),
        jax.tree.map(staged, batch),
        _abstract(engine.runner.region_keys),
        active if engine.method.schedule.uneven else None,
        jax.ShapeDtypeStruct((regions.count,), np.int32),
        whole,
        whole,
    )
    beside = (state.anchor, state.received, state.outer, state.codec, state.landing)
    return needed["total"] + device_bytes(beside)


def device_bytes(tree: PyTree) -> int:
    """Bytes of a tree of arrays on one device; what is offloaded to the host does not count."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in arrays
        if x.sharding.memory_kind != HOST
    )


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
