"""The history of several trainers, one row a step; reading rows fetches from the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lowcomm_jax.adaptive.trainer_merge import TriedMerge
from lowcomm_jax.batching import Plan
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
class Share:
    """One trainer's part of a segment.

    Attributes:
      history: of the trainer's own steps.
      plan: of every step.
      rate: gives the factor on the learning rate at every step, `[steps]`.
      exchanges: sends and landings of the batch policy's statistics.
    """

    history: History
    plan: Plan
    rate: Callable[[], np.ndarray]
    exchanges: list[Event]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps of one round between which nothing about the trainers changes.

    Attributes:
      start: steps done before.
      steps: how many.
      shares: by trainer.
      work_SxR: each region's seconds of each step, as multiples of a step of the reference batch.
      merges: those tried before the first step.
      looks: by trainer, the statistics of the batch policy before the first step, and its decision.
    """

    start: int
    steps: int
    shares: dict[int, Share]
    work_SxR: np.ndarray
    merges: list[TriedMerge]
    looks: dict[int, dict[str, Any]]

    def events(self, step: int) -> list[TrainerEvent]:
        """Events of one step (1-based) of all trainers; of several, all sends come first.

        They leave together and share the links; the order of one trainer's own stays.
        """
        found = [
            TrainerEvent.of(event, number)
            for number, share in self.shares.items()
            for event in [*share.exchanges, *share.history.events]
            if event.step == step
        ]
        if len(self.shares) > 1:
            found.sort(key=lambda event: event.kind != "send")
        return found


class AdaptiveHistory(NamedMetrics):
    """Metrics of consecutive steps of all trainers."""

    def __init__(self):
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        return sum(segment.steps for segment in self.segments)

    def keys(self) -> list[str]:
        shares = (share for segment in self.segments for share in segment.shares.values())
        return common_names([share.history.keys() for share in shares])

    def __getitem__(self, name: str) -> np.ndarray:
        """A metric of every step over all trainers, `[steps, R]`, as `rows` gives it."""
        self._check(name)
        rows = [row[name] for row in self.rows()]
        return np.array(rows) if rows else np.zeros((0, 0), np.float32)

    @property
    def events(self) -> list[Event]:
        return [
            event
            for segment in self.segments
            for step in range(segment.start + 1, segment.start + segment.steps + 1)
            for event in segment.events(step)
        ]

    @property
    def merges(self) -> list[TriedMerge]:
        return [merge for segment in self.segments for merge in segment.merges]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step: `step`, metrics as lists over regions, `events`, and

        - `tokens`: the sum over trainers, every other metric the mean weighted by tokens;
        - `trainers`: number -> its `batch` (asked for), `samples` (of all regions), `microbatch`,
          `rate` (factor on the learning rate) and `loss` (mean over regions);
        - `work`: see `Segment.work_SxR`; `merges` and `looks` where there were any.
        """
        for segment in self.segments:
            yield from _rows(segment)


def _rows(segment: Segment) -> Iterator[dict[str, Any]]:
    """One row a step, as `History.rows` gives; merges and looks stand in the segment's first."""
    numbers, shares = list(segment.shares), list(segment.shares.values())
    each = [share.history.rows() for share in shares]
    rates = [share.rate() for share in shares]
    for i, rows in enumerate(zip(*each, strict=True)):
        step = segment.start + i + 1
        row = {
            "step": step,
            **_metrics(rows),
            "events": [event.fetch() for event in segment.events(step)],
            "trainers": {
                str(number): {
                    "batch": share.plan.batch,
                    "samples": share.plan.total,
                    "microbatch": share.plan.microbatch,
                    "rate": float(rate[i]),
                    "loss": float(np.mean(own["loss"])),
                }
                for number, share, rate, own in zip(numbers, shares, rates, rows)
            },
            "work": segment.work_SxR[i].tolist(),
        }
        if i == 0 and segment.merges:
            row["merges"] = [merge.as_dict() for merge in segment.merges]
        if i == 0 and segment.looks:
            row["looks"] = {str(number): look for number, look in segment.looks.items()}
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
