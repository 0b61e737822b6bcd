"""The inner steps of several trainers, one trainer after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from lowcomm_jax.adaptive.plans import StepPlan
from lowcomm_jax.engine import Engine
from lowcomm_jax.history import History
from lowcomm_jax.stage_runner import Participants
from lowcomm_jax.state import TrainState
from lowcomm_jax.step_memory import device_bytes, step_bytes

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """What one trainer does in a segment.

    Attributes:
      state: before it; is donated.
      batches: host batches `[R, b, ...]` of its steps, all of one size.
      steps: how many; those of all trainers are equal.
      plan: of every step.
    """

    state: TrainState
    batches: Iterator[PyTree]
    steps: int
    plan: StepPlan


class InTurn:
    """Every trainer through `Engine.run`: all share the program of a microbatch size."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._warm = False

    def ready(self, trainers: int) -> bool:
        """Whether everything that so many trainers need is compiled."""
        del trainers
        return self._warm

    def warm(
        self, states: Sequence[TrainState], batch: PyTree, sizes: Sequence[int]
    ) -> list[TrainState]:
        """Compile for microbatches of `sizes`, without training; see `Engine.warm`.

        Args:
          states: of all living trainers; are donated, use the returned ones.
        """
        first, *others = states
        self._warm = True
        return [self.engine.warm(first, batch, sizes), *others]

    def run(
        self, tasks: dict[int, Task], participants: Participants
    ) -> dict[int, tuple[TrainState, History]]:
        """Train every trainer on all its batches, with the sends and landings that follow."""
        return {
            number: self.engine.run(
                task.state,
                task.batches,
                participants,
                microbatch=task.plan.microbatch,
                counts_R=task.plan.counts_R,
            )
            for number, task in tasks.items()
        }

    def nbytes(self, state: TrainState, batch: PyTree, microbatch: int, trainers: int) -> int:
        """Bytes of a device that `trainers` such states need; see `step_memory.step_bytes`."""
        waiting = device_bytes(state.replace(clock=None)) * (trainers - 1)
        return step_bytes(self.engine, state, batch, microbatch) + waiting
