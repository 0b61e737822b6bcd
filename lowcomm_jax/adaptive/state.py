"""The state of a run with several trainers and growing batches, carried from round to round.

`AdaptiveState` holds the `Trainer`s, and the byte counts of trainers that were merged away.
`merged` gives all trainers as one state; `mix` is its weighted mean, which merging uses, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.mesh.offload import HOST, unstow
from lowcomm_jax.state.leaves import flight_records
from lowcomm_jax.state.train_state import SyncCounters, TrainState, with_inner

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One model instance, in all regions.

    Attributes:
      state: its ordinary training state.
      batch: requested samples per region and step in this round.
      request: the same for the next round.
      used_R: int64 `[R]` of all regions of the run, samples of its streams that they have trained
        on; the next step takes those that follow.
      policy: the batch policy's state, JSON values.
      measured: of a job that is one region, in the middle of a round: this region's statistics,
        which travel with the round's payload; else None.
    """

    state: TrainState
    batch: int
    request: int
    used_R: np.ndarray
    policy: Any
    measured: dict[str, float] | None = None

    def replace(self, **changes: Any) -> Trainer:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """The whole state of an `AdaptiveEngine`'s run.

    Attributes:
      trainers: by number, ascending; a number is also that of the trainer's data stream.
      samples: consumed by all trainers of all regions so far.
      retired_sent, retired_received: int64 `[R]` of this job's regions, bytes of trainers that are
        gone.
    """

    trainers: dict[int, Trainer]
    samples: int
    retired_sent: np.ndarray
    retired_received: np.ndarray

    def replace(self, **changes: Any) -> AdaptiveState:
        return dataclasses.replace(self, **changes)

    def whole(self) -> TrainState:
        """All trainers as one state to look at (`merged`)."""
        return merged(list(self.trainers.values()))

    def refuse_donated(self) -> None:
        """Check that no trainer's state was taken away before (`TrainState.refuse_donated`)."""
        for trainer in self.trainers.values():
            trainer.state.refuse_donated()

    @property
    def counters(self) -> SyncCounters:
        """Of the first trainer; steps and sends are those of every trainer, bytes are not."""
        return self.first.state.counters

    @property
    def step(self) -> int:
        """Inner steps done; the same for every trainer."""
        return int(self.counters.step)

    @property
    def first(self) -> Trainer:
        """The trainer of the lowest number."""
        return next(iter(self.trainers.values()))

    @property
    def requests(self) -> dict[int, int]:
        """Every trainer's requested batch for the next round."""
        return {number: trainer.request for number, trainer in self.trainers.items()}

    @property
    def bytes_sent(self) -> np.ndarray:
        """Bytes each region has sent so far, int64 `[R]`."""
        own = [trainer.state.counters.bytes_sent for trainer in self.trainers.values()]
        return sum(own, self.retired_sent)

    @property
    def bytes_received(self) -> np.ndarray:
        """Bytes each region has received so far, int64 `[R]`."""
        own = [trainer.state.counters.bytes_received for trainer in self.trainers.values()]
        return sum(own, self.retired_received)

    def with_trainer(self, number: int, trainer: Trainer) -> AdaptiveState:
        """The same state with one trainer replaced."""
        return self.replace(trainers={**self.trainers, number: trainer})

    def as_document(self) -> dict[str, Any]:
        """The host-side values beside the training states, as JSON values."""
        return {
            "samples": self.samples,
            "retired_sent": self.retired_sent.tolist(),
            "retired_received": self.retired_received.tolist(),
            "live": {
                str(number): {
                    "batch": trainer.batch,
                    "request": trainer.request,
                    "used": trainer.used_R.tolist(),
                    "policy": trainer.policy,
                    "measured": trainer.measured,
                    "in_flight": flight_records(trainer.state),
                }
                for number, trainer in self.trainers.items()
            },
        }


def merged(trainers: Sequence[Trainer]) -> TrainState:
    """All trainers as one state to look at, weighted by their requests; it shares arrays with them.

    Merged are anchors, the regions' values and buffers; the rest is the first trainer's.
    """
    first, *others = trainers
    if not others:
        return first.state
    mean, total = seen(first.state), first.request
    for other in others:
        total += other.request
        mean = mix(mean, seen(other.state), other.request / total)
    state = with_inner(first.state, params=mean["params"], buffers=mean["buffers"])
    return state.replace(anchor=mean["anchor"])


def seen(state: TrainState) -> dict[str, PyTree]:
    """The arrays that merging and evaluation read."""
    return {
        "anchor": state.anchor,
        "params": state.inner.params,
        "buffers": state.inner.buffers,
    }


def mix(kept: PyTree, retired: PyTree, share: float) -> PyTree:
    """kept + share (retired - kept), fp32 arithmetic; equal leaves stay bit for bit.

    Leaves that are not floating-point numbers are those of `kept`. The result lies where `kept`
    does.
    """
    leaves, treedef = jax.tree.flatten(kept)
    places = tuple(leaf.sharding for leaf in leaves)
    if any(place.memory_kind == HOST for place in places):
        mixed = _mixer(treedef, None)(unstow(kept), unstow(retired), np.float32(share))
        return jax.device_put(mixed, jax.tree.unflatten(treedef, places))
    return _mixer(treedef, places)(kept, retired, np.float32(share))


@functools.cache
def _mixer(treedef, places: tuple | None):
    """`mix`, compiled for results that lie in these places."""
    if places is None:
        return jax.jit(_mixed)
    return jax.jit(_mixed, out_shardings=jax.tree.unflatten(treedef, places))


def _mixed(kept: PyTree, retired: PyTree, share: jax.Array) -> PyTree:
    def one(a, b):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        wide = a.astype(jnp.float32)
        return (wide + share * (b.astype(jnp.float32) - wide)).astype(a.dtype)

    return jax.tree.map(one, kept, retired)
