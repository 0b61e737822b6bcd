"""Turn the engine's history into metrics records, with totals and the regions' disagreement.

`continue_counts` gives a region that rejoins a run the totals of its own log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.state.train_state import TrainState


class StepRecords:
    """Makes one record per step and keeps the sums over a run.

    Attributes:
      tokens: tokens of all regions so far.
      sent, received: bytes of each region so far, int64 `[R]`.
      skipped: steps that each region skipped, its gradient not being finite, int64 `[R]`.
      stuck: number of the last steps from which no region learnt anything. Either all regions
        skipped them, or the guard left out all that took part in the exchanges since, so that they
        went back to the anchor.
    """

    def __init__(self, regions: int, rate: Callable[[Mapping[str, Any], np.ndarray], float]):
        """`rate`: (a step's row, steps each region skipped so far) -> learning rate of the step."""
        self.tokens = 0
        self.sent = np.zeros(regions, np.int64)
        self.received = np.zeros(regions, np.int64)
        self.skipped = np.zeros(regions, np.int64)
        self.stuck = 0
        self._lost = False  # what the last exchange was given
        self._rate = rate
        # What left and has not landed: its key -> mean square over regions of |Delta|.
        self._pending: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers."""
        return {
            "tokens": self.tokens,
            "sent": self.sent.tolist(),
            "received": self.received.tolist(),
            "skipped": self.skipped.tolist(),
            "stuck": self.stuck,
            "lost": self._lost,
            "pending": dict(self._pending),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tokens = int(state["tokens"])
        self.sent = np.array(state["sent"], np.int64)
        self.received = np.array(state["received"], np.int64)
        self.skipped = np.array(state["skipped"], np.int64)
        self.stuck = int(state["stuck"])
        self._lost = bool(state["lost"])
        self._pending = {key: float(value) for key, value in state["pending"].items()}

    def make(
        self, rows: Iterator[Mapping[str, Any]], count: int, start: float, end: float
    ) -> list[dict[str, Any]]:
        """Records of `count` consecutive steps that ran from `start` to `end` seconds."""
        records = []
        pace = (end - start) / max(count, 1)
        for i, row in enumerate(rows, 1):
            tokens = sum(row["tokens"])
            self.tokens += round(tokens)
            record = self._record(row)
            record["seconds"] = round(start + i * pace, 4)
            record["tokens_per_second"] = round(tokens / pace, 2) if pace > 0 else None
            records.append(record)
        return records

    def _record(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The `step` record of one row of a history; also counts bytes, skips and stuck steps."""
        events, step = row["events"], row["step"]
        rate = self._rate(row, self.skipped)
        skipped = np.array(row.get("skipped", np.zeros(len(self.sent)))) > 0
        self.skipped += skipped
        disagreement = [self._note(event) for event in events]
        # What was put off stands here, too, but belongs to the step after which it was due.
        sends = [event for event in events if event["kind"] == "send" and event["step"] == step]
        participation = self._participation(sends, row)
        if participation is not None:
            took = any(any(event["participants"]) for event in sends)
            self._lost = took and participation == 0
        self.stuck = self.stuck + 1 if self._lost or skipped.all() else 0
        record = {
            "kind": "step",
            "step": step,
            "tokens": self.tokens,
            "loss": row["loss"],
            "loss_mean": float(np.mean(row["loss"])),
            "lr": rate,
            "grad_norm": row["grad_norm"],
            "bytes_sent": self.sent.tolist(),
            "bytes_received": self.received.tolist(),
            "participation": participation,
            "disagreement": next((d for d in reversed(disagreement) if d is not None), None),
            "events": events,
        }
        # What else the loss function (ce, accuracy, ...) or growing batches report stays as it is.
        return record | {k: v for k, v in row.items() if k not in record}

    def _participation(
        self, sends: list[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> float | None:
        """Share of the regions whose contribution counted, over the sends of this step."""
        if not sends:
            return None
        counted = [
            took and not out
            for event in sends
            for took, out in zip(
                event["participants"], _left_out(event, row) or [0] * len(self.sent)
            )
        ]
        return sum(counted) / len(counted)

    def _note(self, event: Mapping[str, Any]) -> float | None:
        """Count an event's bytes; for a landing return the regions' disagreement."""
        self.sent += np.array(event["bytes_sent"], np.int64)
        self.received += np.array(event["bytes_received"], np.int64)
        if event["kind"] == "send":
            square = _mean_square(event)
            if square is not None:
                self._pending[event["key"]] = square
            return None
        square = self._pending.pop(event["key"], None)
        if square is None or "mean_norm" not in event:
            return None  # nothing was due, or the anchor had moved before
        # With gossip there is one mean per region's group: the spread is that inside the groups.
        return math.sqrt(max(0.0, square - float(np.mean(np.square(event["mean_norm"])))))


def _left_out(event: Mapping[str, Any], row: Mapping[str, Any]) -> list[float] | None:
    """Of a send, which regions' payloads the guards left out; a step's metrics may have it."""
    channel = event.get("channel")
    return event.get("left_out") or row.get(f"{channel}_left_out" if channel else "left_out")


def _mean_square(event: Mapping[str, Any]) -> float | None:
    """Weighted mean over regions of |Delta_r|^2; None when nothing was weighed."""
    if "delta_norm" not in event:
        return None
    norm, weight = np.array(event["delta_norm"], float), np.array(event["weight"], float)
    counted = weight > 0
    if not counted.any():
        return None
    return float((weight[counted] * norm[counted] ** 2).sum() / weight[counted].sum())


def continue_counts(
    state: TrainState | AdaptiveState,
    newest: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
) -> tuple[TrainState | AdaptiveState, dict[str, Any]]:
    """Continue a region's counts from its own newest record.

    The region made steps after its checkpoint, before it was lost. No region repeats them, and the
    checkpoint does not count them; the region's log does.

    Args:
      state: with which it has come in; its counters hold what the checkpoint had counted, and what
        the region received since to catch up.
      newest: its last step record; None = its log is gone, or has none.
      extra: of its checkpoint; None = it has none.

    Returns:
      (state, extra): with bytes, tokens and seconds of all steps it has made; for
      `TrainingLoop.restore`.
    """
    saved = extra and extra["records"]
    seconds = extra["seconds"] if extra else 0.0
    tokens = saved["tokens"] if saved else 0
    if newest is not None:
        tokens, seconds = newest["tokens"], newest["seconds"]
        unsaved = {
            way: np.array(newest[f"bytes_{way}"]) - (saved[way] if saved else 0)
            for way in ("sent", "received")
        }
        state = state.with_more_bytes(**unsaved)
    sent, received = state.counters.bytes_sent, state.counters.bytes_received
    records = StepRecords(len(sent), lambda row, skipped: 0.0)  # nothing is pending, nor skipped
    records.tokens, records.sent, records.received = tokens, sent, received
    return state, {
        "records": records.state(),
        "seconds": seconds,
        "owed_evaluation": False,
        "ended": None,
    }
