"""The state of a run with several trainers and growing batches, carried from round to round.

`AdaptiveState` is a list of `Trainer`s: an ordinary training state each, its place in its data
stream, and its batch. `mix` is the weighted mean that merging and evaluation use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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

LOOKED = "looked"
"""1 where a region has measured in this round, and 0 where it was absent, or came in later."""


class KeptTrainer(msgspec.Struct, frozen=True):
    """What checkpoints and other regions are given of a trainer, beside its training state.

    Attributes:
      request: samples per region and step that it asked for, before the round or, between rounds,
        for the next one.
      used: samples of each of its streams, one a region, that it has trained on; the next step
        takes those that follow.
      policy: the batch policy's state.
      measured: until a round's end: statistics of the regions here, `[R]` by name, and which of
        them have `LOOKED`; else None.
    """

    request: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    used: Size
    policy: dict[str, float]
    measured: dict[str, list[float]] | None = None


class KeptTrainers(msgspec.Struct, frozen=True):
    """All living trainers' by number, and the samples that all have consumed."""

    samples: Size
    live: dict[Size, KeptTrainer]

    @classmethod
    def of(cls, document: Any) -> KeptTrainers:
        """Read what `AdaptiveState.as_document` gives.

        Raises:
          msgspec.ValidationError: it is damaged.
        """
        return msgspec.convert(document, cls, str_keys=True)


class Trainer(KeptTrainer, frozen=True, kw_only=True):
    """One model instance, in all regions: its ordinary training state, and `KeptTrainer`.

    Attributes:
      measured: arrays `[R]`, which nobody has waited for yet, or what was restored of them.
    """

    state: TrainState
    measured: Any = None

    @classmethod
    def of(cls, state: TrainState, kept: KeptTrainer) -> Trainer:
        return cls(state=state, **msgspec.structs.asdict(kept))

    def replace(self, **changes: Any) -> Trainer:
        return msgspec.structs.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """The whole state of an `AdaptiveEngine`'s run.

    Attributes:
      trainers: by number, ascending; a number is also that of the trainer's data stream.
      samples: consumed by all trainers of all regions so far.
    """

    trainers: dict[int, Trainer]
    samples: int

    @classmethod
    def of(cls, parts: Mapping[str, TrainState], document: Any) -> AdaptiveState:
        """The state with these `parts` that `as_document` describes."""
        kept = KeptTrainers.of(document)
        trainers = {i: Trainer.of(parts[trainer_prefix(i)], one) for i, one in kept.live.items()}
        return cls(trainers, kept.samples)

    def replace(self, **changes: Any) -> AdaptiveState:
        return dataclasses.replace(self, **changes)

    def with_trainer(self, number: int, trainer: Trainer) -> AdaptiveState:
        """The same state with one trainer replaced."""
        return self.replace(trainers={**self.trainers, number: trainer})

    def without(self, number: int) -> AdaptiveState:
        """The state without a trainer; its bytes count as those of the first that is left."""
        left = {i: trainer for i, trainer in self.trainers.items() if i != number}
        gone = self.trainers[number].state.counters
        counted = self.replace(trainers=left)
        return counted.with_more_bytes(gone.bytes_sent, gone.bytes_received)

    def without_measurements(self) -> AdaptiveState:
        """The state as if nothing had been measured in this round, or once it has decided."""
        trainers = {i: t.replace(measured=None) for i, t in self.trainers.items()}
        return self.replace(trainers=trainers)

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

    def as_document(self) -> dict[str, Any]:
        """The host-side values beside the training states, as JSON values."""
        live = {}
        for number, trainer in self.trainers.items():
            kept = {name: getattr(trainer, name) for name in KeptTrainer.__struct_fields__}
            if trainer.measured is not None:
                kept["measured"] = {k: np.asarray(x).tolist() for k, x in trainer.measured.items()}
            live[str(number)] = kept
        return {"samples": self.samples, "live": live}

    def whole(self) -> TrainState:
        """All trainers as one state to look at, weighted by their requests; it shares arrays.

        Merged are anchors, the regions' values and buffers; the rest is the first trainer's.
        """
        first, *others = self.trainers.values()
        if not others:
            return first.state
        mean, total = seen(first.state), first.request
        for other in others:
            total += other.request
            mean = mix(mean, seen(other.state), other.request / total)
        state = with_inner(first.state, params=mean["params"], buffers=mean["buffers"])
        return state.replace(anchor=mean["anchor"])


def of_counted(measured: Mapping[str, Any], counts_R: np.ndarray) -> dict[str, np.ndarray] | None:
    """Statistics of the regions that count and have `LOOKED`; None = there is none."""
    values = {name: np.asarray(x) for name, x in measured.items()}
    counts_R = counts_R & (values.pop(LOOKED) > 0)
    return {name: x[counts_R] for name, x in values.items()} if counts_R.any() else None


def seen(state: TrainState) -> dict[str, PyTree]:
    """The arrays that merging and evaluation read."""
    inner = state.inner
    return {"anchor": state.anchor, "params": inner.params, "buffers": inner.buffers}


def mix(kept: PyTree, retired: PyTree, share: float) -> PyTree:
    """kept + share (retired - kept), fp32 arithmetic; equal leaves stay bit for bit.

    Leaves that are not floating-point numbers are those of `kept`. The result lies where `kept`
    does.
    """
    mixed = _mixed(kept, retired, np.float32(share))
    return jax.device_put(mixed, jax.tree.map(lambda x: x.sharding, kept))


@jax.jit
def _mixed(kept: PyTree, retired: PyTree, share: jax.Array) -> PyTree:
    def one(a, b):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        wide = a.astype(jnp.float32)
        return (wide + share * (b.astype(jnp.float32) - wide)).astype(a.dtype)

    return jax.tree.map(one, unstow(kept), unstow(retired))
