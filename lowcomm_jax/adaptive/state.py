"""What a run with several trainers and growing batches carries from round to round."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lowcomm_jax.state import TrainState


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One model instance, in all regions.

    Attributes:
      state: its ordinary training state.
      batch: samples per region and step that it asks for in this round.
      request: those it will ask for in the next one.
      used_R: int64 `[R]`, samples of its streams that the regions have trained on: the following
        step takes the samples from there on.
      policy: what the batch policy remembers, JSON-able.
    """

    state: TrainState
    batch: int
    request: int
    used_R: np.ndarray
    policy: Any

    def replace(self, **changes) -> Trainer:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """The whole state of an `AdaptiveEngine`'s run.

    Attributes:
      trainers: by number, ascending; a number is also that of the trainer's data stream.
      samples: consumed by all trainers of all regions so far.
      retired_sent, retired_received: int64 `[R]`, bytes of trainers that are gone.
    """

    trainers: dict[int, Trainer]
    samples: int
    retired_sent: np.ndarray
    retired_received: np.ndarray

    def replace(self, **changes) -> AdaptiveState:
        return dataclasses.replace(self, **changes)

    @property
    def step(self) -> int:
        """Inner steps done; the same for every trainer."""
        return int(self.first.state.clock.step)

    @property
    def first(self) -> Trainer:
        """The trainer of the lowest number."""
        return next(iter(self.trainers.values()))

    @property
    def requests(self) -> dict[int, int]:
        """What every trainer asks for in the next round."""
        return {number: trainer.request for number, trainer in self.trainers.items()}

    @property
    def bytes_sent(self) -> np.ndarray:
        """Bytes each region has sent so far, int64 `[R]`."""
        own = [trainer.state.clock.bytes_sent for trainer in self.trainers.values()]
        return sum(own, self.retired_sent)

    @property
    def bytes_received(self) -> np.ndarray:
        """Bytes each region has received so far, int64 `[R]`."""
        own = [trainer.state.clock.bytes_received for trainer in self.trainers.values()]
        return sum(own, self.retired_received)

    def with_trainer(self, number: int, trainer: Trainer) -> AdaptiveState:
        """The same state with one trainer replaced."""
        return self.replace(trainers={**self.trainers, number: trainer})
