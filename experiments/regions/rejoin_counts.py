"""Tokens, bytes and seconds that a region has counted when it rejoins a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.train.records import StepRecords
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.state.train_state import TrainState


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
