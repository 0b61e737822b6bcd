"""The baseline of every speed-up; replays may start recording."""

from dataclasses import replace

import numpy as np
import pytest

from lowcomm_jax.network import Jitter, VirtualClock, every_step, parse, replay, uniform


def uneven():
    return parse(
        {
            "regions": 3,
            "bandwidth_gbps": [[0, 8, 3], [8, 0, 2], [3, 2, 0]],
            "delay_ms": [[0, 10, 70], [10, 0, 40], [70, 40, 0]],
            "compute_s": [0.2, 0.35, 0.3],
            "sync_constant_s": 0.05,
            "first_use_s": 0.4,
        }
    )


def rows(steps):
    """DDP, but at step 30 a payload that lands a step later."""
    everyone = {"fragment": 0, "participants": [True] * 3, "groups": None, "ahead": 0}
    for t in range(1, steps + 1):
        send = {"kind": "send", "key": f"0@{t}", "nbytes": 3e7, "route": "two_shot", **everyone}
        land = {"kind": "land", "key": f"0@{t}", **everyone}
        if t == 30:
            yield {"step": t, "events": [send]}
        elif t == 31:
            yield {"step": t, "events": [{**land, "key": "0@30"}, send, land]}
        else:
            yield {"step": t, "events": [send, land]}


def test_the_baseline_is_a_replay_of_gradients_at_every_step():
    network = replace(uneven(), transfer_jitter=Jitter("lognormal", 0.5))
    baseline = VirtualClock(network)
    every_step(baseline, 1, 29, 3e7)
    ddp = replay(network, rows(29))
    np.testing.assert_array_equal(baseline.now_R, ddp.now_R)
    assert baseline.ledger.links() == ddp.ledger.links()
    every_step(baseline, 30, 0, 3e7)
    assert baseline.report().as_dict() == ddp.report().as_dict()
    alone = VirtualClock(uniform(1, 1.0, compute_s=0.5, sync_constant_s=9.0))
    every_step(alone, 1, 10, 1e6)
    assert alone.now_R == pytest.approx([5.0]) and alone.report().sent_R.tolist() == [0]


def test_a_replay_may_record_its_last_steps_only():
    whole = replay(uneven(), rows(80))
    last, none = replay(uneven(), rows(80), record_from=61), replay(uneven(), rows(80), 0, None)
    np.testing.assert_allclose(last.now_R, whole.now_R, rtol=1e-12)
    np.testing.assert_allclose(none.now_R, whole.now_R, rtol=1e-12)
    bars = last.timeline().bars
    lands = {(b.region, b.label) for b in bars if b.kind == "land"}
    assert lands == {(region, f"0@{step}") for region in range(3) for step in range(61, 81)}
    at_60 = {b.region: b.end_s for b in whole.timeline().bars if b.label == "0@60"}
    starts = {b.region: b.start_s for b in reversed(bars) if b.kind == "compute"}
    assert starts == pytest.approx(at_60)
    with pytest.raises(ValueError, match="record=True"):
        none.timeline()
