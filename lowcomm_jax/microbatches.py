"""Steps whose batch is cut into microbatches of one size: checks, running, warming up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.checks import counting_problems
from lowcomm_jax.methods.base import Method
from lowcomm_jax.programs import Recipe

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Cut:
    """How batches are cut.

    Attributes:
      size: samples of a microbatch.
      counts_R: microbatches each region trains on at a step; None = all of its batch.
    """

    size: int
    counts_R: tuple[int, ...] | None = None

    def counts(self, stride: int, regions: int) -> np.ndarray:
        """int32 `[R]`, microbatches of a step of each region; `stride` are in the batch.

        Raises:
          ValueError: a region is to train on more microbatches than there are.
        """
        if self.counts_R is None:
            return np.full(regions, stride, np.int32)
        if max(self.counts_R) > stride:
            raise ValueError(
                f"counts_R={list(self.counts_R)}: the batch has {stride} microbatches of "
                f"{self.size}; give larger batches"
            )
        return np.asarray(self.counts_R, np.int32)


def cut(recipe: Recipe, size: int | None, counts_R: Sequence[int] | None) -> Cut | None:
    """Check how batches are to be cut; None when they are not.

    Raises:
      ValueError: listing everything that cannot work.
    """
    if size is None:
        if counts_R is None:
            return None
        raise ValueError("counts_R counts microbatches: give their size, microbatch=")
    problems = size_problems(recipe, [size])
    count = recipe.regions.count
    if counts_R is not None:
        given = list(counts_R)
        if len(given) != count or any(counting_problems(n=n) for n in map(_plain, given)):
            problems.append(f"counts_R={given}: give {count} whole numbers, at least 1")
        counts_R = tuple(map(_plain, given))
    refuse(problems)
    return Cut(size, counts_R)


def refuse(problems: Sequence[str]) -> None:
    """Raise one error that lists them all, if there are any."""
    if problems:
        raise ValueError("these microbatches cannot work:\n- " + "\n- ".join(problems))


def size_problems(recipe: Recipe, sizes: Sequence[int]) -> list[str]:
    """Why steps cannot run on microbatches of these sizes, one line with its fix each."""
    problems = [p for size in sizes for p in counting_problems(microbatch=size)]
    fsdp, method = recipe.regions.mesh.shape["fsdp"], recipe.method
    if not problems:
        uneven = [size for size in sizes if size % fsdp]
        problems += [
            f"microbatch={size} does not divide over fsdp={fsdp} devices: use a multiple of {fsdp}"
            for size in uneven
        ]
    if recipe.accumulate > 1:
        problems.append(
            f"accumulate={recipe.accumulate} cuts batches too: leave it out of the engine"
        )
    if recipe.routed:
        problems.append(
            "hops: regions that route microbatches to one another need as many of them; cut the "
            "batch with Engine(accumulate=)"
        )
    return problems + _unfit(method, recipe.network is not None)


def _unfit(method: Method, has_network: bool) -> list[str]:
    problems = []
    if method.signal == "gradient":
        problems.append(
            f"{method.name} exchanges a gradient at every step and takes a fixed batch: leave "
            "microbatch= out, or cut it with Engine(accumulate=)"
        )
    if has_network:
        problems.append(
            "network: its seconds of a step are those of a fixed batch; cut it with "
            "Engine(accumulate=), or leave the network out"
        )
    return problems


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, np.integer) else number


@jax.jit
def first_step(metrics: PyTree) -> PyTree:
    """Metrics `[R]` of the first step of a block."""
    return jax.tree.map(lambda x: x[:, 0], metrics)


def repeated(batch: PyTree, samples: int) -> PyTree:
    """The first sample of a host batch `[R, b, ...]`, `samples` times."""
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[:, :1], samples, axis=1), batch)
