"""Cut a stream of host batches into blocks that end where something is sent or lands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class Stage(NamedTuple):
    """Staged steps.

    Attributes:
      batches: leaves `[R, capacity, per-region batch, ...]`; only the first `steps` are real.
      steps: number of real steps.
      capacity: S, the fixed length of the staged buffer.
    """

    batches: PyTree
    steps: int
    capacity: int


class Stager:
    """Groups batches `[R, b, ...]` into stages of at most `capacity` steps."""

    def __init__(self, batches: Iterable[PyTree], capacity: int):
        self._stream = iter(batches)
        self.capacity = capacity

    def take(self, steps_to_event: int) -> Stage | None:
        """The next steps, none of them past the event; None when the stream has ended."""
        room = min(self.capacity, steps_to_event)
        group = [batch for _, batch in zip(range(room), self._stream)]
        return Stage(_stack(group, self.capacity), len(group), self.capacity) if group else None


def _stack(group: list[PyTree], capacity: int) -> PyTree:
    def stack(*leaves):
        first = np.asarray(leaves[0])
        out = np.empty((first.shape[0], capacity, *first.shape[1:]), first.dtype)
        for i, leaf in enumerate(leaves):
            out[:, i] = leaf
        out[:, len(leaves) :] = out[:, :1]  # unread padding, but never uninitialised
        return out

    return jax.tree.map(stack, *group)
