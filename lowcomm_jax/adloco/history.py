"""The history of several trainers, one row a step; reading rows fetches from the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lowcomm_jax.adloco.merge import TrainerMerge
from lowcomm_jax.adloco.step_plan import StepPlan
from lowcomm_jax.history import Event, History, NamedMetrics, common_names


@dataclasses.dataclass
class TrainerEvent(Event):
    """A send or landing of one of several trainers; its key starts with the trainer's number."""

    trainer: int = 0

    @classmethod
    def of(cls, event: Event, trainer: int) -> TrainerEvent:
        key = None if event.key is None else f"{trainer}/{event.key}"
        return cls.widened(event, key=key, trainer=trainer)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps of one round between which nothing about the trainers changes.

    Attributes:
      start: steps done before.
      regions: R, of the run.
      histories: of the own steps of each trainer, by number, as the next two.
      plans: of every step.
      rates: factor on the learning rate at every step from here, float32, at least `[steps]`.
      events: of all trainers, see `in_order`.
      work_SxR: each region's seconds of each step, as multiples of a step of the reference batch.
      merges: those before the first step.
      looks: by the last step of a round, and by trainer: the batch policy's statistics, and its
        decision.
    """

    start: int
    regions: int
    histories: dict[int, History]
    plans: dict[int, StepPlan]
    rates: dict[int, jax.Array]
    events: list[TrainerEvent]
    work_SxR: np.ndarray
    merges: list[TrainerMerge]
    looks: dict[int, dict[int, dict[str, Any]]]

    def events_of(self, step: int) -> list[TrainerEvent]:
        """The events of one step (1-based); those of a paused one before stand at the first."""
        return [event for event in self.events if max(event.step, self.start + 1) == step]

    def looks_of(self, step: int) -> dict[str, dict[str, Any]]:
        """By trainer, what was decided after one step, as `events_of`."""
        found = (each for end, each in self.looks.items() if max(end, self.start + 1) == step)
        return {str(number): look for each in found for number, look in each.items()}


def in_order(events: Mapping[int, list[Event]]) -> list[TrainerEvent]:
    """Events of all trainers, by their numbers, step by step; of several, all sends come first.

    They leave together and share the links; the order of one trainer's own stays.
    """
    several = len(events) > 1
    found = [TrainerEvent.of(event, number) for number, own in events.items() for event in own]
    return sorted(found, key=lambda event: (event.step, several and event.kind != "send"))


class AdaptiveHistory(NamedMetrics):
    """Metrics of consecutive steps of all trainers."""

    def __init__(self):
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        return sum(len(segment.work_SxR) for segment in self.segments)

    def keys(self) -> list[str]:
        each = (history for segment in self.segments for history in segment.histories.values())
        return common_names([history.keys() for history in each])

    def __getitem__(self, name: str) -> np.ndarray:
        """A metric of every step over all trainers, `[steps, R]`, as `rows` gives it."""
        self._check(name)
        rows = [row[name] for row in self.rows()]
        return np.array(rows) if rows else np.zeros((0, 0), np.float32)

    @property
    def events(self) -> list[Event]:
        return [event for segment in self.segments for event in segment.events]

    @property
    def merges(self) -> list[TrainerMerge]:
        return [merge for segment in self.segments for merge in segment.merges]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step: `step`, metrics as lists over regions, `events`, and

        - `tokens`: the sum over trainers, every other metric the mean weighted by tokens;
        - `trainers`: number -> its `batch` (asked for), `samples` (of all regions), `microbatch`,
          `rate` (factor on the learning rate) and `loss` (mean over regions);
        - `work`: see `Segment.work_SxR`;
        - `merges`, where there were any, in the first row of a round, and `looks` in its last.
        """
        for segment in self.segments:
            rates = {number: np.asarray(rate) for number, rate in segment.rates.items()}
            each = [history.rows() for history in segment.histories.values()]
            for i, rows in enumerate(zip(*each, strict=True)):
                trainers = {
                    str(number): {
                        "batch": plan.batch,
                        "samples": plan.samples * segment.regions,
                        "microbatch": plan.microbatch,
                        "rate": float(rates[number][i]),
                        "loss": float(np.mean(own["loss"])),
                    }
                    for (number, plan), own in zip(segment.plans.items(), rows)
                }
                step = segment.start + i + 1
                row = {
                    "step": step,
                    **_metrics(rows),
                    "events": [event.fetch() for event in segment.events_of(step)],
                    "trainers": trainers,
                    "work": segment.work_SxR[i].tolist(),
                }
                if i == 0 and segment.merges:
                    row["merges"] = [dataclasses.asdict(merge) for merge in segment.merges]
                if looks := segment.looks_of(step):
                    row["looks"] = looks
                yield row


def _metrics(rows: tuple[Mapping[str, Any], ...]) -> dict[str, list]:
    """Metrics `[R]` of one step over its trainers."""
    if len(rows) == 1:
        return {k: v for k, v in rows[0].items() if k not in ("step", "events")}
    tokens_TxR = np.array([row["tokens"] for row in rows], float)
    total_R = tokens_TxR.sum(axis=0)
    share_TxR = np.where(total_R > 0, tokens_TxR / np.where(total_R > 0, total_R, 1), 0)
    out = {}
    for name in rows[0]:
        if name in ("step", "events"):
            continue
        values_TxR = np.array([row[name] for row in rows], float)
        weighed = np.where(share_TxR > 0, values_TxR, 0) * share_TxR
        out[name] = (total_R if name == "tokens" else weighed.sum(axis=0)).tolist()
    return out
