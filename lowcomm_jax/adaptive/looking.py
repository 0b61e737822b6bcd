"""How a trainer's gradient noise is measured at the start of a round, and what it leads to.

The measured microbatches are the first samples of the round, which it then trains on: looking costs
compute (`Probe`), no data. The decision is for the next round, so the scalars travel with the
round's own exchange; with scope `across` the gradient's reduction blocks the round's first step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from lowcomm_jax.adaptive.plans import StepPlan
from lowcomm_jax.adaptive.state import Trainer
from lowcomm_jax.batching import BatchPolicy
from lowcomm_jax.history import Event
from lowcomm_jax.probe import Measurement, Probe
from lowcomm_jax.state import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Looker:
    """Measures for a policy; `probe` is None where the policy needs no measurement.

    Attributes:
      sizes: microbatches that may be measured, ascending.
    """

    policy: BatchPolicy
    probe: Probe | None
    sizes: tuple[int, ...]

    def size(self, plan: StepPlan) -> int:
        """Samples of a measured microbatch: all of them together are about one step's."""
        fitting = [size for size in self.sizes if size * self.probe.count <= plan.read]
        return max(fitting, default=self.sizes[0])

    def warm(self, state: TrainState, example: PyTree) -> None:
        """Compile all sizes; `example`: see `Engine.warm`."""
        if self.probe is not None:
            self.probe.warm(state, example, self.sizes)

    def look(
        self,
        trainer: Trainer,
        plan: StepPlan,
        draw: Callable[[int], PyTree],
        mask_R: np.ndarray | None,
    ) -> Measurement | None:
        """Start a measurement; None when there is nothing to measure, or nobody to.

        Args:
          draw: number of samples -> the round's first ones.
          mask_R: bool `[R]`, who takes part in this round's exchange; None = all.
        """
        if self.probe is None or (mask_R is not None and not np.any(mask_R)):
            return None
        size = self.size(plan)
        batch = draw(size * self.probe.count)
        return self.probe.measure(trainer.state, batch, size, mask_R)

    def work(self, plan: StepPlan) -> int:
        """Samples a region passes through the model for a look at this plan."""
        return 0 if self.probe is None else self.probe.samples(self.size(plan))

    def decide(self, trainer: Trainer, seen: Measurement) -> tuple[Trainer, dict[str, float]]:
        """The trainer with its next request, and what it rests on; waits for the measurement."""
        found = seen.statistics()
        memory, request = self.policy.decide(trainer.policy, found, trainer.batch)
        noted = {
            "request": request,
            "signal": found.signal,
            "gbar2": found.gbar2,
            "variance_along": found.variance_along,
            "variance_across": found.variance_across,
        }
        return trainer.replace(policy=memory, request=request), noted

    def exchange(
        self, state: TrainState, steps: range, period: int, mask_R: np.ndarray | None
    ) -> tuple[TrainState, list[Event]]:
        """What a look sends between regions, if that falls into these steps.

        Args:
          steps: 1-based, of one round of `period` steps.
          mask_R: see `look`.
        """
        if self.probe is None or (mask_R is not None and not np.any(mask_R)):
            return state, []
        step = steps[0] if self.probe.scope == "across" else steps[-1]
        if step % period != (1 % period if self.probe.scope == "across" else 0):
            return state, []
        traffic = self.probe.traffic(state, mask_R)
        if not traffic.sent.any():
            return state, []  # a region alone
        clock = state.clock.copy()
        clock.bytes_sent += traffic.sent
        clock.bytes_received += traffic.received
        found = self.probe.events(state, mask_R)
        events = [dataclasses.replace(e, step=step, key=f"probe@{step}") for e in found]
        return state.replace(clock=clock), events
