"""Data parallel steps worked out together are the steps one by one; replays may start recording."""

from dataclasses import replace

import numpy as np
import pytest

from lowcomm_jax.network import Jitter, VirtualClock, every_step, parse, replay, uniform


def uneven(**fields):
    network = parse(
        {
            "regions": 3,
            "bandwidth_gbps": [[0, 8, 3], [8, 0, 2], [3, 2, 0]],
            "delay_ms": [[0, 10, 70], [10, 0, 40], [70, 40, 0]],
            "compute_s": [0.2, 0.35, 0.3],
            "sync_constant_s": 0.05,
            "first_use_s": 0.4,
        }
    )
    return replace(network, **fields)


def one_by_one(clock, first, count, nbytes, route):
    for step in range(first, first + count):
        clock.inner_step(step)
        clock.send(step, f"0@{step}", nbytes, route, label=0)
        clock.land(step, f"0@{step}")


@pytest.mark.parametrize("route", ["two_shot", "all_gather"])
@pytest.mark.parametrize("jitter", [{}, {"compute_jitter": Jitter("lognormal", 0.3)}])
def test_together_as_one_by_one(route, jitter):
    slow, fast = VirtualClock(uneven(**jitter), seed=4), VirtualClock(uneven(**jitter), seed=4)
    for clock in (slow, fast):  # something else before, and after
        clock.inner_step(1)
        clock.send(1, "x", 1e8, "all_gather")
        clock.land(1, "x")
    one_by_one(slow, 2, 700, 3e7, route)
    every_step(fast, 2, 700, 3e7, route)
    for clock in (slow, fast):
        clock.send(701, "x", 1e8, "all_gather")
        clock.land(701, "x")
    one, two = slow.report().as_dict(), fast.report().as_dict()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
    assert slow.ledger.links() == pytest.approx(fast.ledger.links())
    assert slow.ledger.sent_R(0) == pytest.approx(fast.ledger.sent_R(0))


def test_what_cannot_be_worked_out_together_is_not():
    """Jittered transfers, recorded bars and payloads under way: the very same numbers."""
    noisy = uneven(transfer_jitter=Jitter("lognormal", 0.5))
    slow, fast = VirtualClock(noisy, seed=4), VirtualClock(noisy, seed=4)
    one_by_one(slow, 1, 50, 3e7, "two_shot")
    every_step(fast, 1, 50, 3e7)
    np.testing.assert_array_equal(slow.now_R, fast.now_R)
    slow, fast = VirtualClock(uneven()), VirtualClock(uneven(), record=True)
    for clock in (slow, fast):
        clock.send(0, "big", 1e9, "all_gather")
    one_by_one(slow, 1, 20, 3e7, "two_shot")
    every_step(fast, 1, 20, 3e7)
    np.testing.assert_array_equal(slow.now_R, fast.now_R)
    assert sum(bar.kind == "land" for bar in fast.timeline().bars) == 60


def test_no_steps_and_one_region():
    clock = VirtualClock(uneven())
    every_step(clock, 1, 0, 1e6)
    assert clock.now_R.tolist() == [0, 0, 0]
    alone = VirtualClock(uniform(1, 1.0, compute_s=0.5, sync_constant_s=9.0))
    every_step(alone, 1, 10, 1e6)
    assert alone.now_R == pytest.approx([5.0]) and alone.report().sent_R.tolist() == [0]


def rows(steps):
    """DDP, but at step 30 a payload that lands a step later."""
    everyone = {"fragment": 0, "participants": [True] * 3}
    for t in range(1, steps + 1):
        send = {"kind": "send", "key": f"0@{t}", "nbytes": 3e7, "route": "two_shot", **everyone}
        land = {"kind": "land", "key": f"0@{t}", **everyone}
        if t == 30:
            yield {"step": t, "events": [send]}
        elif t == 31:
            yield {"step": t, "events": [{**land, "key": "0@30"}, send, land]}
        else:
            yield {"step": t, "events": [send, land]}


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
