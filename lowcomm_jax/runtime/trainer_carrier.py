"""`TrainerCarrier`: the carrier of one trainer in a job that is one region of several (AdLoCo).

Every trainer exchanges for itself: trainer i of a region with trainer i of the others, under names
that begin with its number. After the last step of a round all trainers send before the first one
lands (`holds`), so that a region waits for the slowest exchange and not for their sum.

With a payload travel the region's own gradient statistics. The batch of the next round, and which
trainers merge, follow from those of the regions that were counted: from what the commit record
names, which is the same in every region.

So nothing is put off while the store is away: a region waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.runtime.job_carrier import JobCarrier
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.runtime.participation import Participation
from lowcomm_jax.runtime.slicing import Slicing
from lowcomm_jax.schedule.base import Send, Stage
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import EventLoop


class TrainerDelivery(JobDelivery):
    """`JobDelivery` of one trainer, with names of its own."""

    def __init__(
        self,
        exchange: JobExchange,
        trainer: int,
        slicings: dict[tuple[int, int], Slicing],
        participation: Participation,
    ):
        """`slicings`: of all trainers, so that each is compiled once; so is `participation`."""
        super().__init__(exchange, shared=True)
        self.participation = participation
        self.prefix, self._slicings, self.never_defers = f"{trainer}.", slicings, True

    @property
    def flying(self) -> list[str]:
        """Names of the exchanges under way."""
        return [one.name for one in self._pending.values() if not one.listens_only]


class TrainerCarrier(JobCarrier):
    """`JobCarrier` of one trainer, whose payloads carry statistics.

    The region's progress and its state are told for all trainers together, elsewhere.

    Attributes:
      measured: this region's statistics of the round, float32 `[1]` by name; they travel with its
        next payload.
      heard: of the last exchange, (statistics `[N]` by name, bool `[N]` who was counted).
      holds: whether what was sent waits: nothing lands.
    """

    def __init__(self, delivery: JobDelivery, measured: dict[str, Any], holds: bool = True):
        super().__init__(delivery)
        self.measured, self.holds = measured, holds
        self.heard: tuple[dict[str, np.ndarray], np.ndarray] | None = None

    def alone(self) -> TrainerCarrier:
        return TrainerCarrier(self.delivery.loopback(), self.measured, holds=False)

    def running(self, loop: EventLoop, state: TrainState) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def comes_to(self, loop: EventLoop, state: TrainState, step: int) -> None:
        """Nothing: no act was put off by an outage."""

    def reach(self, loop: EventLoop, state: TrainState, stage: Stage, begun: bool) -> bool:
        return not self.holds or isinstance(stage[0], Send)

    def done(self, loop: EventLoop, state: TrainState, in_time: bool) -> None:
        """Nothing."""

    def header(self) -> dict[str, Any]:
        return dict(self.measured)

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        return super().traffic(exchange, like, mask, groups, header + 4 * len(self.measured))

    def collect(
        self, loop: EventLoop, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        state, collected = super().collect(loop, state, key, last, adopts)
        flight = collected.flight
        self.heard = dict(flight.header), np.asarray(flight.takes_part)
        return state, collected

    @contextlib.contextmanager
    def landing(self) -> Iterator[None]:
        """Lets what was sent land."""
        held, self.holds = self.holds, False
        try:
            yield
        finally:
            self.holds = held

    patiently = landing

    def close(self, loop: EventLoop, state: TrainState) -> None:
        """Nothing: anchors are compared when all trainers are one (`compare_at_the_end`)."""

    def compare_at_the_end(self, loop: EventLoop, state: TrainState) -> None:
        """Compare the anchor of the trainer that is left with those of the other jobs.

        Raises:
          Parted: another region's anchor is another.
        """
        super().close(loop, state)
