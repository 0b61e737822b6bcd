"""What a `History` tells of several trainers: metrics over all of them, and rows with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.adloco.state import LOOKED, SCALARS, AdaptiveState
from lowcomm_jax.adloco.step_plan import StepPlan
from lowcomm_jax.history import Event, History, common_names
from lowcomm_jax.state.train_state import TrainState


@dataclasses.dataclass
class Told:
    """What steps and landings tell beside the state.

    Attributes:
      events: of all trainers; the key of each starts with its trainer's number.
      noise: trainer's number -> what decides on its next batch, `[n]` by name: the `SCALARS` of the
        regions that have measured and took part in the round; none where there is no such region.
      looks: step -> trainer's number -> the batch policy's statistics, and its decision.
    """

    events: list[Event] = dataclasses.field(default_factory=list)
    noise: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    looks: dict[int, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)

    def add(self, number: int, events: Sequence[Event]) -> None:
        """Add a trainer's own events."""
        for event in events:
            key = None if event.key is None else f"{number}/{event.key}"
            self.events.append(dataclasses.replace(event, key=key, trainer=number))

    def hear(self, number: int, measured: Mapping[str, Any], took_part_N: np.ndarray) -> None:
        """Take what all regions have measured of a trainer, `[N]` by name; waits for it."""
        counts_N = (np.asarray(measured[LOOKED]) > 0) & took_part_N
        if counts_N.any():
            self.noise[number] = {name: np.asarray(measured[name])[counts_N] for name in SCALARS}

    def in_order(self) -> list[Event]:
        """The events step by step; of several trainers, by number, all sends come first.

        They leave together and share the links; the order of one trainer's own stays.
        """
        several = len({event.trainer for event in self.events}) > 1
        return sorted(self.events, key=lambda e: (e.step, several and e.kind != "send", e.trainer))


@dataclasses.dataclass
class Segment:
    """Steps of one round between which nothing about the trainers changes.

    Attributes:
      start: steps done before.
      regions: R, of the run.
      steps: of each trainer.
      per_step: samples of a step, of all trainers and regions.
      plans: of every step of each trainer, by number.
      merges: those before the first step, as their row tells them.
      histories: of the own steps of each trainer, by number.
      rates: by number: factor on the learning rate at every step from here, float32, at least
        `[steps]`.
    """

    start: int
    regions: int
    steps: int
    per_step: int
    plans: dict[int, StepPlan]
    merges: list[dict[str, Any]]
    histories: dict[int, History] = dataclasses.field(default_factory=dict)
    rates: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def stepped(self, state: AdaptiveState, number: int, ended: TrainState) -> AdaptiveState:
        """The state after a trainer's steps, with which its training state is `ended`."""
        trainer, used = state.trainers[number], self.steps * self.plans[number].samples
        trainer = trainer.replace(state=ended, used=trainer.used + used)
        samples = state.samples + self.regions * used
        return state.replace(samples=samples).with_trainer(number, trainer)

    def metrics(self) -> dict[str, Any]:
        """Those that all trainers have, over all of them."""
        each = list(self.histories.values())
        return {name: OverTrainers(each, name) for name in common_names([h.keys() for h in each])}

    def more(self, step: int) -> dict[str, Any]:
        """What the row of a step (1-based) has of each trainer, by number, and of merges.

        - `trainers`: number -> its `batch` (asked for), `samples` (of all regions), `microbatch`,
          `rate` (factor on the learning rate) and `loss` (mean over regions);
        - `merges`, where there were any, in the first row of a round.
        """
        i = step - self.start - 1
        trainers = {
            str(number): {
                "batch": plan.batch,
                "samples": plan.samples * self.regions,
                "microbatch": plan.microbatch,
                "rate": float(np.asarray(self.rates[number])[i]),
                "loss": float(np.mean(self.histories[number]["loss"][i], dtype=float)),
            }
            for number, plan in self.plans.items()
        }
        merges = {"merges": self.merges} if self.merges and i == 0 else {}
        return {"trainers": trainers, **merges}


@dataclasses.dataclass(frozen=True)
class OverTrainers:
    """A metric over trainers, `[R, S]`: the mean weighted by their tokens; of `tokens` the sum.

    It is fetched from the devices when NumPy makes an array of it.
    """

    histories: list[History]
    name: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is always a new one
        first, *others = self.histories
        if not others:
            return np.asarray(first[self.name].T, dtype)
        tokens_TxSxR = np.array([history["tokens"] for history in self.histories], float)
        total_SxR = tokens_TxSxR.sum(axis=0)
        if self.name == "tokens":
            return np.asarray(total_SxR.T, dtype)
        share_TxSxR = tokens_TxSxR / np.where(total_SxR > 0, total_SxR, 1)
        values_TxSxR = np.array([history[self.name] for history in self.histories], float)
        mean_SxR = (np.where(share_TxSxR > 0, values_TxSxR, 0) * share_TxSxR).sum(axis=0)
        return np.asarray(mean_SxR.T, dtype)
