"""The state of a run with several trainers and growing batches, carried from round to round.

`AdaptiveState` is a list of `Trainer`s: an ordinary training state each, its place in its data
stream, and its batch. `mean` is what merging and evaluation use.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.state.leaves import trainer_prefix
from lowcomm_jax.state.train_state import SyncCounters, TrainState, with_inner
from lowcomm_jax.store.records import Size

PyTree = Any

Noise = tuple[float, float, float, float]
"""A region's gradient noise: the three numbers of `rules.batching.pooled`, and 1 where they count.
0 = the region was absent in this round, or came in later."""


class Trainer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model instance, in all regions: its ordinary training state, and its place in the run.

    Attributes:
      request: samples per region and step that it asked for, before the round or, between rounds,
        for the next one.
      used: samples of each of its streams, one a region, that it has trained on; the next step
        takes those that follow.
      policy: the batch policy's state.
      measured: until a round's end: the `Noise` of the regions here, or a float32 array `[R, 4]` of
        it that nobody has waited for yet; else None.
      state: a `TrainState`; None in what a document tells of a trainer.
    """

    request: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    used: Size
    policy: dict[str, float]
    measured: list[Noise] | None = None
    state: Any = None

    def replace(self, **changes: Any) -> Trainer:
        return msgspec.structs.replace(self, **changes)


class AdaptiveState(msgspec.Struct, frozen=True, rename={"trainers": "live"}):
    """The whole state of an `AdaptiveEngine`'s run.

    Attributes:
      trainers: by number, ascending; a number is also that of the trainer's data stream.
      samples: consumed by all trainers of all regions so far.
    """

    trainers: dict[Size, Trainer]
    samples: Size

    @classmethod
    def of_document(cls, document: Any) -> AdaptiveState:
        """What `document` tells of trainers, read back, without training states.

        Raises:
          msgspec.ValidationError: it is damaged.
        """
        found = msgspec.convert(document, cls, str_keys=True)
        return found.replace(trainers=dict(sorted(found.trainers.items())))

    def replace(self, **changes: Any) -> AdaptiveState:
        return msgspec.structs.replace(self, **changes)

    def each(self, changed: Callable[[int, Trainer], Trainer]) -> AdaptiveState:
        """The same state with every trainer changed, one after the other: number, trainer."""
        return self.replace(trainers={i: changed(i, one) for i, one in self.trainers.items()})

    def with_trainer(self, number: int, trainer: Trainer) -> AdaptiveState:
        """The same state with one trainer replaced."""
        return self.replace(trainers={**self.trainers, number: trainer})

    def without(self, *numbers: int) -> AdaptiveState:
        """The state without trainers; their bytes count as those of the first that is left."""
        left = {i: trainer for i, trainer in self.trainers.items() if i not in numbers}
        state, all_ = self.replace(trainers=left), self.counters
        sent, received = state.counters.bytes_sent, state.counters.bytes_received
        return state.with_more_bytes(all_.bytes_sent - sent, all_.bytes_received - received)

    def with_more_bytes(self, sent: np.ndarray, received: np.ndarray) -> AdaptiveState:
        """The state after each region has sent and received so much more, int64 `[R]`."""
        number, first = next(iter(self.trainers.items()))
        more = first.state.with_more_bytes(sent, received)
        return self.with_trainer(number, first.replace(state=more))

    def refuse_donated(self) -> None:
        """Check that no trainer's state was taken away before (`TrainState.refuse_donated`)."""
        for trainer in self.trainers.values():
            trainer.state.refuse_donated()

    @property
    def first(self) -> Trainer:
        """The trainer of the lowest number."""
        return next(iter(self.trainers.values()))

    @property
    def counters(self) -> SyncCounters:
        """Of every trainer; bytes are those of all."""
        each = [trainer.state.counters for trainer in self.trainers.values()]
        sent, received = (one.bytes_sent for one in each), (one.bytes_received for one in each)
        return dataclasses.replace(each[0], bytes_sent=sum(sent), bytes_received=sum(received))

    @property
    def step(self) -> int:
        """Inner steps done; the same for every trainer."""
        return int(self.first.state.counters.step)

    @property
    def paused(self) -> bool:
        """Whether it stands within its step, before the payloads of other jobs have landed."""
        return bool(self.counters.behind)

    @property
    def requests(self) -> dict[int, int]:
        """Every trainer's requested batch."""
        return {number: trainer.request for number, trainer in self.trainers.items()}

    @property
    def parts(self) -> dict[str, TrainState]:
        """The training states by the prefix of their arrays' names."""
        return {trainer_prefix(i): trainer.state for i, trainer in self.trainers.items()}

    def document(self) -> dict[str, Any]:
        """What checkpoints and other regions are given beside the training states, as JSON."""
        fetched = operator.methodcaller("tolist")
        given = self.each(lambda _, trainer: trainer.replace(state=None))
        return {"trainers": msgspec.to_builtins(given, str_keys=True, enc_hook=fetched)}

    def whole(self) -> TrainState:
        """All trainers as one state to look at, weighted by their requests; it shares arrays.

        Merged are anchors, the regions' values and buffers; the rest is the first trainer's.
        """
        merged = mean((seen(trainer.state), trainer.request) for trainer in self.trainers.values())
        state = with_inner(self.first.state, params=merged["params"], buffers=merged["buffers"])
        return state.replace(anchor=merged["anchor"])


def seen(state: TrainState) -> dict[str, PyTree]:
    """The arrays that merging and evaluation read."""
    inner = state.inner
    return {"anchor": state.anchor, "params": inner.params, "buffers": inner.buffers}


def mean(weighed: Iterable[tuple[PyTree, int]]) -> PyTree:
    """The mean of (tree, weight) in their order, fp32 arithmetic; equal leaves stay bit for bit.

    Leaves that are not floating-point numbers are those of the first. The result lies where that
    does. Any number of trees takes one program, and one after the other is asked for.
    """
    rest = iter(weighed)
    mixed, total = next(rest)
    places = jax.tree.map(lambda x: x.sharding, mixed)
    for other, weight in rest:
        total += weight
        mixed = jax.device_put(_mixed(mixed, other, np.float32(weight / total)), places)
    return mixed


@jax.jit
def _mixed(kept: PyTree, retired: PyTree, share: jax.Array) -> PyTree:
    """kept + share (retired - kept)."""

    def one(a, b):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        wide = a.astype(jnp.float32)
        return (wide + share * (b.astype(jnp.float32) - wide)).astype(a.dtype)

    return jax.tree.map(one, unstow(kept), unstow(retired))
