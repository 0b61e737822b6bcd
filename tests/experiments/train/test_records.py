"""Records and report numbers against sums written out by hand."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import lowcomm_jax as lc
from experiments.metrics import MetricsLog, read_records
from experiments.report.runlog import document_interval
from experiments.train.drivers import FixedDriver
from experiments.train.records import StepRecords


def send(step, norms, weights, left_out=None):
    took = [w > 0 for w in weights]
    return {
        "kind": "send",
        "step": step,
        "fragment": 1,
        "key": f"1@{step}",
        "participants": took,
        "staleness": [-1] * 3,
        "bytes_sent": [30, 40, 50],
        "bytes_received": [50, 40, 30],
        "route": "two_shot",
        "delta_norm": norms,
        "weight": weights,
        "left_out": left_out or [False] * 3,
    }


def land(step, staleness, mean_norm, key=None):
    event = send(step, [0] * 3, [1] * 3) | {"kind": "land", "staleness": staleness, "key": key}
    for name in ("delta_norm", "weight", "left_out"):
        del event[name]
    event |= {"bytes_sent": [0] * 3, "bytes_received": [0] * 3}
    return event | ({} if mean_norm is None else {"mean_norm": [mean_norm], "update_norm": [0.1]})


def row(step, *events):
    return {
        "step": step,
        "loss": [1.0, 2.0, 4.5],
        "grad_norm": [1.0] * 3,
        "tokens": [5.0, 6.0, 7.0],
        "extra": [0.3] * 3,
        "events": list(events),
    }


def test_disagreement_is_the_spread_of_the_regions():
    deltas = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.2]])
    weights = np.array([0.2, 0.5, 0.3])
    mean = weights @ deltas
    want = np.sqrt(weights @ ((deltas - mean) ** 2).sum(axis=1))
    norms = np.linalg.norm(deltas, axis=1).tolist()
    # The weights as the engine gives them: not normalised.
    sends = send(2, norms, (3 * weights).tolist())
    records = StepRecords(3, lambda row, skipped_R: 0.1 * row["step"])
    made = records.make(iter([row(1), row(2, sends)]), 2, 0.0, 4.0)
    assert [r["disagreement"] for r in made] == [None, None]
    restarted = StepRecords(3, lambda row, skipped_R: 0.1 * row["step"])
    restarted.restore(json.loads(json.dumps(records.state())))
    landing = land(4, [2, 2, -1], float(np.linalg.norm(mean)), "1@2")
    late = land(4, [-1, -1, 2], None, "1@2")  # the anchor has moved already
    made = restarted.make(iter([row(3), row(4, landing, late)]), 2, 4.0, 5.0)
    assert made[1]["disagreement"] == pytest.approx(want, rel=1e-6)
    assert made[0]["lr"] == pytest.approx(0.3) and made[1]["seconds"] == 5.0
    assert made[1]["tokens"] == 4 * 18 and made[1]["tokens_per_second"] == pytest.approx(36)
    assert made[1]["bytes_sent"] == [30, 40, 50] and made[1]["bytes_received"] == [50, 40, 30]
    assert made[1]["extra"] == [0.3] * 3 and made[1]["loss_mean"] == 2.5


def test_an_empty_first_landing_says_nothing():
    records = StepRecords(3, lambda row, skipped_R: 1.0)
    made = records.make(
        iter([row(1, send(1, [3.0] * 3, [1.0] * 3), land(1, [0] * 3, 0.0))]), 1, 0, 1
    )
    assert made[0]["disagreement"] is None
    made = records.make(iter([row(2, land(2, [1] * 3, 1.0, "1@1"))]), 1, 1, 2)
    assert made[0]["disagreement"] == pytest.approx(np.sqrt(8))


def test_participation_leaves_out_the_rejected():
    records = StepRecords(3, lambda row, skipped_R: 1.0)
    absent = send(1, [1.0] * 3, [1.0, 0.0, 1.0])
    rejected = send(1, [1.0, 1.0, np.nan], [1.0, 1.0, 0.0], [False, False, True])
    rejected["participants"] = [True] * 3
    made = records.make(iter([row(1, absent, rejected)]), 1, 0.0, 1.0)
    assert made[0]["participation"] == pytest.approx(4 / 6)


def test_participation_leaves_out_what_a_channel_rejects():
    """A channel's measurements are metrics of the step, and not of its event."""
    event = send(1, [1.0] * 3, [1.0] * 3) | {"channel": "params"}
    del event["left_out"]
    given = row(1, event) | {"params_left_out": [0.0, 1.0, 0.0]}
    made = StepRecords(3, lambda row, skipped_R: 1.0).make(iter([given]), 1, 0.0, 1.0)
    assert made[0]["participation"] == pytest.approx(2 / 3)


def test_a_log_forgets_what_comes_after_the_restored_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, -1)
    log.write([{"kind": "header"}, *({"kind": "step", "step": s} for s in range(1, 8))])
    log.write([{"kind": "end", "step": 5}])
    log.close()
    with path.open("a") as file:
        file.write('{"kind":"step","st')  # cut off by a crash
    log = MetricsLog(path, 5)
    log.write([{"kind": "step", "step": 6, "loss": float("nan")}])
    log.sync()
    log.close()
    records = read_records(path)
    assert [r.get("step") for r in records] == [None, 1, 2, 3, 4, 5, 6]
    assert records[-1]["loss"] is None
    path.write_text("{\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        read_records(path)


def test_the_interval_over_documents_covers():
    """In 95 of 100 draws of documents the interval holds the loss of the whole population."""
    draw = np.random.default_rng(0)
    count = draw.integers(20, 400, 3000)
    level = draw.gamma(4.0, 0.5, 3000)
    total = count * level + draw.normal(size=3000) * np.sqrt(count)
    truth, hits, trials = total.sum() / count.sum(), 0, 1000
    for _ in range(trials):
        chosen = draw.choice(3000, 40, replace=False)
        loss = total[chosen].sum() / count[chosen].sum()
        hits += abs(loss - truth) < document_interval(total[chosen], count[chosen])
    assert 0.92 < hits / trials < 0.97
    assert document_interval(np.array([3.0]), np.array([2])) is None


def test_the_rate_is_that_of_the_optimizers_count():
    """It does not count the steps that a region leaves out."""
    rate_S = np.arange(10) / 10.0
    run = SimpleNamespace(
        job=SimpleNamespace(method=lc.methods.diloco(3)), rates=lambda steps: rate_S[steps]
    )
    run.exchange = None
    driver = FixedDriver(run, nullcontext)
    records = StepRecords(2, driver.rate)
    rows = [
        {"step": t, "tokens": [1, 1], "loss": [1.0, 1.0], "grad_norm": [1.0, 1.0], "events": []}
        | {"skipped": [float(t in (2, 3)), 0.0]}
        for t in range(1, 6)
    ]
    made = records.make(iter(rows), 5, 0.0, 1.0)
    assert [r["lr"] for r in made] == pytest.approx([0.0, 0.1, 0.15, 0.2, 0.3])
