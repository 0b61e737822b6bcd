"""Blocks of host batches: as many steps as fit before the next send or landing.

`BlockStager` takes a stream of batches and gives `BatchBlock`s of one fixed capacity, so that the
inner program never recompiles, also where batches of changing size are cut into microbatches.
`DispatchLimit` limits how far the host runs ahead of the device.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class BatchBlock(NamedTuple):
    """Batches of consecutive steps, staged for one call of the inner program.

    Attributes:
      batches: leaves `[R, capacity, per-region batch, ...]`; only the first `steps` are real. Cut
        into microbatches of m: `[R, capacity, m, ...]`, the first `steps * stride` real.
      steps: number of real steps.
      capacity: S, the fixed length of the staged buffer, in steps or microbatches.
      stride: microbatches of a step; None when batches are not cut.
    """

    batches: PyTree
    steps: int
    capacity: int
    stride: int | None = None


class BlockStager:
    """Groups batches `[R, b, ...]` into blocks of at most `capacity` steps.

    A block ends where the shape or dtype of a leaf changes. With `microbatch` m a batch b is cut
    into b / m microbatches, of which a block holds at most `capacity`: another b compiles nothing.
    A batch is copied before the next one is asked for, so that a stream may reuse its arrays.
    """

    def __init__(self, batches: Iterable[PyTree], capacity: int, microbatch: int | None = None):
        self._stream = iter(batches)
        self._waiting: list[PyTree] = []  # a batch that did not fit into the last block
        self.capacity = capacity
        self.microbatch = microbatch

    def take(self, steps_to_event: int, room: int | None = None) -> BatchBlock | None:
        """The next steps, none of them past the event; None when the stream has ended.

        Args:
          steps_to_event: most steps, at least 1.
          room: steps (with `microbatch`: microbatches) that the block may hold, at least one step;
            None = the capacity.

        Raises:
          ValueError: a batch that is not a whole number of microbatches, or is more of them than
            the capacity.
        """
        stride, most = None, self.capacity if room is None else min(room, self.capacity)
        room = min(most, steps_to_event)
        if self.microbatch is not None:
            first = self._next()
            if first is None:
                return None
            self._waiting.append(first)
            stride = self._stride(first)
            room = min(max(most // stride, 1), steps_to_event)
        steps, kinds, staged = 0, None, None
        while steps < room and (batch := self._next()) is not None:
            if staged is not None and _kinds(batch) != kinds:
                self._waiting.append(batch)
                break
            if staged is None:
                kinds, staged = _kinds(batch), jax.tree.map(self._room_for, batch)
            _write(staged, batch, steps, stride or 1)
            steps += 1
        if staged is None:
            return None
        for out in jax.tree.leaves(staged):  # unread padding, but never uninitialised
            out[:, steps * (stride or 1) :] = out[:, :1]
        return BatchBlock(staged, steps, self.capacity, stride)

    def _next(self) -> PyTree | None:
        return self._waiting.pop() if self._waiting else next(self._stream, None)

    def _room_for(self, leaf: Any) -> np.ndarray:
        """An array for the leaf in all batches of a block."""
        regions, *shape = np.shape(leaf)
        if self.microbatch is not None:
            shape[0] = self.microbatch
        return np.empty((regions, self.capacity, *shape), leaf.dtype)

    def _stride(self, batch: PyTree) -> int:
        size, m = batch_size(batch), self.microbatch
        if size % m or size < m:
            raise ValueError(
                f"a per-region batch of {size} is not a whole number of microbatches of {m}: use "
                f"a multiple of microbatch={m}"
            )
        if size // m > self.capacity:
            raise ValueError(
                f"a per-region batch of {size} is {size // m} microbatches of {m}, more than the "
                f"{self.capacity} that are staged at once: use Engine(block={size // m}), or a "
                "larger microbatch"
            )
        return size // m


def _kinds(batch: PyTree) -> tuple[Any, list[tuple[tuple[int, ...], Any]]]:
    """The structure of a batch, and shape and dtype of its leaves: one block has one of each."""
    leaves, treedef = jax.tree_util.tree_flatten(batch)
    return treedef, [(np.shape(x), x.dtype) for x in leaves]


class DispatchLimit:
    """Keeps at most about two seconds of steps queued on the device, by the time steps took so far.

    A run that is to stop must wait for the queued steps. Within that limit blocks are as long as
    possible, since every call of a program moves the state into and out of its loop.

    Args:
      seconds: most seconds of queued work; a step that takes longer is queued by itself.
    """

    def __init__(self, seconds: float = 2.0):
        self.seconds = seconds
        self._each: float | None = None  # seconds of a step; unknown before the first
        self._under_way: collections.deque[tuple[int, jax.Array, float]] = collections.deque()
        self._ended: float | None = None  # when the last block ended, if we have seen it
        self._begun = 0.0

    def room(self, capacity: int) -> int:
        """Steps that the next block may hold, 1 to `capacity`; waits until they fit."""
        if self._each is None:
            return 1
        steps = min(capacity, max(1, int(self.seconds / max(self._each, 1e-9))))
        while self._under_way and self._each * (self._waiting() + steps) > self.seconds:
            self._wait()
        self._begun = time.perf_counter()
        return steps

    def handed_over(self, steps: int, result: jax.Array) -> None:
        """Note a block that was queued; waits for the very first one.

        Args:
          steps: of the block, at least 1.
          result: any array that the block computes.
        """
        if self._each is None:
            self._begun = time.perf_counter()  # it was compiled before
            self._under_way.append((steps, result, self._begun))
            self._wait()
            return
        self._under_way.append((steps, result, self._begun))
        while self._under_way and self._under_way[0][1].is_ready():
            alone = len(self._under_way) == 1
            steps, _, started = self._under_way.popleft()
            at_most = (time.perf_counter() - started) / steps
            self._each = at_most if alone else min(self._each, at_most)
            self._ended = None

    def _waiting(self) -> int:
        return sum(steps for steps, _, _ in self._under_way)

    def _wait(self) -> None:
        """Wait until the oldest queued block has ended."""
        steps, result, started = self._under_way.popleft()
        jax.block_until_ready(result)
        now = time.perf_counter()
        # Known is when it began: where the one before it ended, or where nothing was before it.
        if self._ended is not None:
            self._each = (now - max(self._ended, started)) / steps
        elif self._each is None:
            self._each = (now - started) / steps
        self._ended = now


def batch_size(batch: PyTree) -> int:
    """Samples a region in a batch `[R, b, ...]`."""
    return np.shape(jax.tree.leaves(batch)[0])[1]


def _write(staged: PyTree, batch: PyTree, step: int, stride: int) -> None:
    """Copy the batch of a step into its place."""

    def write(out, leaf):
        regions, _, *shape = out.shape
        parts = np.asarray(leaf).reshape(regions, stride, *shape)
        out[:, step * stride : (step + 1) * stride] = parts

    jax.tree.map(write, staged, batch)


def repeated(batch: PyTree, samples: int) -> PyTree:
    """The first sample of a host batch `[R, b, ...]`, `samples` times."""
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[:, :1], samples, axis=1), batch)


def checked(batches: Iterable[PyTree], regions: int) -> Iterator[PyTree]:
    """The batches; each is checked by `check_leaves` as it is taken."""
    if isinstance(batches, Mapping | np.ndarray | jax.Array):
        raise ValueError("run() takes a stream of batches, not one: give [batch], or use step()")
    for batch in batches:
        check_leaves(batch, regions)
        yield batch


def check_leaves(batch: PyTree, regions: int) -> None:
    """Refuse a batch that is not arrays `[R, per-region batch, ...]`; cheap enough for every step.

    Raises:
      ValueError: names a leaf and its shape, or says that there is none.
    """
    leaves = jax.tree_util.tree_leaves(batch)
    if leaves and all(np.ndim(x) >= 2 and np.shape(x)[0] == regions for x in leaves):
        _refuse_text(batch, leaves)
        return
    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    shown = ", ".join(f"{jax.tree_util.keystr(p)} {list(np.shape(x))}" for p, x in named[:4])
    raise ValueError(
        f"a batch's leaves are arrays [{regions} regions, per-region batch, ...]; this one has "
        + (shown or "no leaf")
    )


def _refuse_text(batch: PyTree, leaves: list[Any]) -> None:
    """Refuse entries that are text or Python objects, which no device takes."""
    if not any(isinstance(x, np.ndarray) and x.dtype.kind in "USO" for x in leaves):
        return
    dtypes = [
        (jax.tree_util.keystr(p), x.dtype)
        for p, x in jax.tree_util.tree_flatten_with_path(batch)[0]
    ]
    shown = ", ".join(f"{name} has dtype {dtype}" for name, dtype in dtypes if dtype.kind in "USO")
    raise ValueError(f"a batch's leaves are arrays of numbers; {shown}")


def check_batch(shape: tuple[int, ...], count: int, cut: int, accumulate: int) -> None:
    """Refuse staged batch leaves that do not fit; cheap enough for every call.

    Args:
      shape: of a leaf, `[R, S, b, ...]`.
      count: R.
      cut: devices that a region's samples are cut over.
      accumulate: microbatches of a step.

    Raises:
      ValueError: wrong number of regions, or a batch that does not divide.
    """
    if len(shape) < 3 or shape[0] != count:
        raise ValueError(f"batch leaves must be [{count} regions, per-region batch, ...]")
    if shape[2] % accumulate or (shape[2] // accumulate) % cut:
        raise ValueError(
            f"a per-region batch of {shape[2]} does not divide into accumulate={accumulate} "
            f"microbatches over fsdp={cut} devices: use a multiple of {accumulate * cut}, or "
            f"another mesh"
        )
