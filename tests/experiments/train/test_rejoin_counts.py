"""What a region that comes into a run has counted, by hand-made examples."""

import dataclasses

import numpy as np
import pytest

from experiments.metrics import MetricsLog
from experiments.train.records import StepRecords, continue_counts
from lowcomm_jax.state.train_state import SyncCounters, TrainState

NEWEST = {
    "kind": "step",
    "step": 60,
    "tokens": 600,
    "seconds": 6.5,
    "bytes_sent": [70],
    "bytes_received": [80],
}
EXTRA = {"records": {"tokens": 300, "sent": [30], "received": [40], "pending": {}}, "seconds": 3.0}


def entered(sent, received):
    """A state whose counters hold so many bytes."""
    counters = dataclasses.replace(
        SyncCounters.start(1, 1), bytes_sent=np.array([sent]), bytes_received=np.array([received])
    )
    nothing = dict.fromkeys(f.name for f in dataclasses.fields(TrainState))
    return TrainState(**{**nothing, "counters": counters})


@pytest.mark.parametrize(
    "newest, extra, tokens, sent, received, seconds",
    [
        (NEWEST, EXTRA, 600, 70, 80 + 9, 6.5),
        (NEWEST, None, 600, 70, 80 + 9, 6.5),
        (None, EXTRA, 300, 30, 40 + 9, 3.0),
        (None, None, 0, 0, 9, 0.0),
    ],
)
def test_nothing_that_was_done_is_forgotten(newest, extra, tokens, sent, received, seconds):
    """9 bytes were received to catch up, beside what the checkpoint knows of."""
    saved = (30, 40) if extra else (0, 0)
    state, found = continue_counts(entered(saved[0], saved[1] + 9), newest, extra)
    records = StepRecords(1, lambda row, skipped: 0.0)
    records.skipped, records.stuck = np.array([7]), 7  # of before
    records.restore(found.pop("records"))
    assert (records.tokens, records.sent, records.received) == (tokens, [sent], [received])
    assert records.skipped == [0] and records.stuck == 0
    assert found == {"seconds": seconds, "owed_evaluation": False, "ended": None}
    assert (state.counters.bytes_sent, state.counters.bytes_received) == ([sent], [received])


def test_a_log_knows_its_newest_step_before_the_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, -1)
    assert not log.begun and log.newest is None
    log.write([{"kind": "header"}, NEWEST, {**NEWEST, "step": 90}, {"kind": "eval", "step": 60}])
    log.close()
    log = MetricsLog(path, 70)
    assert log.begun and log.newest == NEWEST
    log.close()
    log = MetricsLog(path, -1)
    assert not log.begun and log.newest is None
    log.close()
