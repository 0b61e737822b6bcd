"""What a `History` tells of several trainers: metrics over all of them, and rows with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lowcomm_jax.adloco.merge import TrainerMerge
from lowcomm_jax.adloco.step_plan import StepPlan
from lowcomm_jax.history import Event, History, common_names


def in_order(events: Mapping[int, list[Event]]) -> list[Event]:
    """Events of all trainers, by their numbers, step by step; of several, all sends come first.

    They leave together and share the links; the order of one trainer's own stays.
    """
    several = len(events) > 1
    found = [of_trainer(event, number) for number, own in events.items() for event in own]
    return sorted(found, key=lambda event: (event.step, several and event.kind != "send"))


def of_trainer(event: Event, number: int) -> Event:
    """The event with its trainer; its key starts with the trainer's number."""
    key = None if event.key is None else f"{number}/{event.key}"
    return dataclasses.replace(event, key=key, trainer=number)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps of one round between which nothing about the trainers changes.

    Attributes:
      start: steps done before.
      regions: R, of the run.
      histories: of the own steps of each trainer, by number, as the next two.
      plans: of every step.
      rates: factor on the learning rate at every step from here, float32, at least `[steps]`.
      work_RxS: each region's seconds of each step, as multiples of a step of the reference batch.
      merges: those before the first step.
      looks: step -> trainer's number -> the batch policy's statistics, and its decision.
    """

    start: int
    regions: int
    histories: dict[int, History]
    plans: dict[int, StepPlan]
    rates: dict[int, jax.Array]
    work_RxS: np.ndarray
    merges: list[TrainerMerge]
    looks: dict[int, dict[str, dict[str, Any]]]

    @property
    def metrics(self) -> dict[str, Any]:
        """Those of all trainers, and `work`, see `work_RxS`."""
        each = list(self.histories.values())
        names = common_names([history.keys() for history in each])
        return {name: OverTrainers(each, name) for name in names} | {"work": self.work_RxS}

    def more(self, step: int) -> dict[str, Any]:
        """What the row of a step (1-based) has besides:

        - `trainers`: number -> its `batch` (asked for), `samples` (of all regions), `microbatch`,
          `rate` (factor on the learning rate) and `loss` (mean over regions);
        - `merges`, where there were any, in the first row of a round, and `looks` in its last.
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
        merges = [] if i else [dataclasses.asdict(merge) for merge in self.merges]
        others = {"merges": merges, "looks": self.looks.get(step)}
        return {"trainers": trainers, **{name: x for name, x in others.items() if x}}


@dataclasses.dataclass(frozen=True)
class OverTrainers:
    """A metric over trainers, `[R, S]`: the mean weighted by their tokens; of `tokens` the sum.

    It is fetched from the devices when NumPy makes an array of it.
    """

    histories: list[History]
    name: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is always a new one
        return np.asarray(self._values().T, dtype)

    def _values(self) -> np.ndarray:
        """`[S, R]`."""
        first, *others = self.histories
        if not others:
            return first[self.name]
        tokens_TxSxR = np.array([history["tokens"] for history in self.histories], float)
        total_SxR = tokens_TxSxR.sum(axis=0)
        if self.name == "tokens":
            return total_SxR
        share_TxSxR = tokens_TxSxR / np.where(total_SxR > 0, total_SxR, 1)
        values_TxSxR = np.array([history[self.name] for history in self.histories], float)
        return (np.where(share_TxSxR > 0, values_TxSxR, 0) * share_TxSxR).sum(axis=0)
