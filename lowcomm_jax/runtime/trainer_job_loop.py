"""`TrainerJobLoop`: the loop of one trainer in a job that is one region of several (AdLoCo).

Every trainer exchanges for itself: trainer i of a region with trainer i of the others, under names
that begin with its number. After the last step of a round all trainers send before the first one
lands (`land_sent`), so that a region waits for the slowest exchange and not for their sum.

With a payload travel the region's own gradient statistics. The batch of the next round, and which
trainers merge, follow from those of the regions that were counted: from what the commit record
names, which is the same in every region.

So nothing can be deferred: while the store is away, a region waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.params.fragments import Fragments
from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.runtime.job_loop import JobLoop
from lowcomm_jax.runtime.slicing import Slicing
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import as_of


class TrainerDelivery(JobDelivery):
    """`JobDelivery` of one trainer: names of its own, and events that are never deferred.

    The region's progress and its state are told for all trainers together, elsewhere.
    """

    def __init__(
        self,
        exchange: JobExchange,
        trainer: int,
        slicings: dict[tuple[int, int], Slicing],
    ):
        """`slicings`: of all trainers, so that each is compiled once."""
        super().__init__(exchange, shared=True)
        self.prefix, self._slicings = f"{trainer}.", slicings

    @property
    def flying(self) -> list[str]:
        """Names of the exchanges under way."""
        return [one.name for one in self._pending.values() if not one.listens_only]

    def reachable(self) -> bool:
        return True

    def arrives(self, state: TrainState, keys: list[str]) -> bool:
        return True

    def publish_progress(self, state: TrainState, fragments: Fragments) -> None:
        """Nothing."""


class TrainerJobLoop(JobLoop):
    """`JobLoop` of one trainer, whose payloads carry statistics.

    Attributes:
      measured: this region's statistics of the round, float32 `[1]` by name; they travel with its
        next payload.
      heard: of the last exchange, (statistics `[N]` by name, bool `[N]` who was counted).
      holds: what is sent lands when `land_sent` is called; False = at once.
    """

    def __init__(
        self,
        programs: RoundPrograms,
        weights: str | np.ndarray,
        delivery: JobDelivery,
        measured: dict[str, Any],
    ):
        super().__init__(programs, weights, delivery)
        self.measured = measured
        self.heard: tuple[dict[str, np.ndarray], np.ndarray] | None = None
        self.holds = True

    def loopback(self, weights: str | np.ndarray) -> TrainerJobLoop:
        alone = TrainerJobLoop(self.programs, weights, self.delivery.loopback(), self.measured)
        alone.holds = False
        return alone

    def run_due(self, state: TrainState, mask: np.ndarray, events: list[Event]) -> TrainState:
        """Send what is due at the counters' step; `land_sent` does the rest."""
        now = int(state.counters.step)
        if not self.holds:
            return super().run_due(state, mask, events)
        if self.upcoming(state) > now:
            return as_of(state, now, behind=0)
        return self.send_due(as_of(state, now, behind=1), mask, events)[0]

    def land_sent(self, state: TrainState, events: list[Event]) -> TrainState:
        """Land what `run_due` has sent, if it has; waits for the other regions."""
        return super().run_due(state, np.ones(1, bool), events) if state.counters.behind else state

    def run_all(self, state: TrainState, events: list[Event]) -> TrainState:
        everyone = np.ones(1, bool)
        return self.land_sent(self.run_due(state, everyone, events), events)

    def header(self, state: TrainState, step: int) -> dict[str, Any]:
        return dict(self.measured)

    def traffic(self, exchange, like, mask: np.ndarray, groups, header: int) -> Traffic:
        return super().traffic(exchange, like, mask, groups, header + 4 * len(self.measured))

    def collect(
        self, state: TrainState, key: str, last: bool = False, adopted: bool = True
    ) -> tuple[TrainState, InFlight]:
        state, flight = super().collect(state, key, last, adopted)
        self.heard = dict(flight.header), np.asarray(flight.takes_part)
        return state, flight

    def ended(self, state: TrainState) -> None:
        """Nothing: anchors are compared when all trainers are one (`compare_at_the_end`)."""

    def compare_at_the_end(self, state: TrainState) -> None:
        """Compare the anchor of the trainer that is left with those of the other jobs.

        Raises:
          Parted: another region's anchor is another.
        """
        super().ended(state)
