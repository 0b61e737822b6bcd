"""Regions that only receive: their bytes as the exchange counts them, their waits by hand."""

import itertools

import numpy as np
import pytest
from oracle.routes import sent_bytes

from lowcomm_jax import exchange
from lowcomm_jax.network import (
    VirtualClock,
    clock_state,
    link_bytes,
    parse,
    profile,
    restore_clock,
    uniform,
)
from lowcomm_jax.network.ledger import Ledger

GB = 1e9  # bytes; 8 Gbit/s move 1 GB a second
R = 4
MASKS = [m for m in itertools.product([False, True], repeat=R) if any(m)]


ROUTES = ["two_shot", "all_gather"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: "".join("01"[x] for x in m))
def test_bytes_are_those_of_the_exchange(route, mask):
    nbytes = 1_000_000
    counted = getattr(exchange, route)(nbytes, np.array(mask))
    members = tuple(np.flatnonzero(mask).tolist())
    listeners = tuple(np.flatnonzero(~np.array(mask)).tolist())
    ledger = Ledger(tuple("abcd"))
    ledger.book(0, route, [nbytes] * len(members), members, listeners=listeners)
    np.testing.assert_allclose(ledger.sent_R(), counted.sent, atol=2)
    np.testing.assert_allclose(ledger.received_R(), counted.received, atol=2)
    mean = sent_bytes(route, nbytes, len(members), len(listeners))
    assert counted.sent.sum() == pytest.approx(mean * len(members), abs=len(members))


def three_regions():
    """Rates in GB/s: 0->1 1.0, 0->2 2.0, 1->2 0.5; delays 10, 30, 20 ms."""
    rates = [[0, 8, 16], [8, 0, 4], [16, 4, 0]]
    delays = [[0, 10, 30], [10, 0, 20], [30, 20, 0]]
    return parse({"regions": 3, "bandwidth_gbps": rates, "delay_ms": delays, "compute_s": 0.5})


@pytest.mark.parametrize("route", ROUTES)
def test_one_to_all_by_hand(route):
    shape = profile(three_regions(), route, [3 * GB], [0], [1, 2])
    np.testing.assert_allclose(shape.ready_M, [0.0, 3.01, 1.53])
    assert link_bytes(route, (3 * GB,), (0,), (1, 2)) == {(0, 1): 3 * GB, (0, 2): 3 * GB}


def test_a_two_shot_hands_its_slices_to_listeners():
    # Slices of 1 GB between 0 and 1: in after 1.01, back after 2.02; region 2 gets one slice from
    # each owner, over 0->2 in 0.5 s and over 1->2 in 2 s.
    shape = profile(three_regions(), "two_shot", [2 * GB] * 2, [0, 1], [2])
    np.testing.assert_allclose(shape.ready_M, [2.02, 2.02, 1.01 + 2.0 + 0.02])


def test_listeners_wait_at_their_own_next_landing():
    clock = VirtualClock(three_regions())
    clock.inner_step(1)
    clock.send(1, "a", 3 * GB, "all_gather", [True, False, False], listeners_R=[False, True, True])
    assert clock.catch_up([1, 2]).tolist() == [0, 0, 0]  # nobody has landed it
    assert clock.land(1, "a").tolist() == [0, 0, 0]  # the sender has its own payload
    clock.inner_step(2)
    np.testing.assert_allclose(clock.catch_up([2]), [0, 0, 1.53 - 0.5])
    clock.inner_step(3)
    np.testing.assert_allclose(clock.catch_up([0, 1]), [0, 3.01 - 1.0, 0])
    assert clock.catch_up([0, 1, 2]).tolist() == [0, 0, 0] and not clock.transit.owed
    np.testing.assert_allclose(clock.now_R, [1.5, 3.51, 0.5 + 1.53 + 0.5])
    np.testing.assert_allclose(clock.exposed_R, [0, 3.01 - 1.0, 1.53 - 0.5])


def test_latencies_are_each_members_own():
    # Alone: 0 gets 1's 1 GB after 1.01; nobody waits for somebody else's longer way.
    clock = VirtualClock(three_regions())
    sizes = [0.1 * GB, 1 * GB, 0.1 * GB]
    clock.send(1, "x", sizes, "all_gather")
    expected = [max(1 + 0.01, 0.05 + 0.03), max(0.1 + 0.01, 0.2 + 0.02), max(0.05 + 0.03, 2.02)]
    np.testing.assert_allclose(clock.land(1, "x"), expected)


def test_a_label_sent_again_is_in_flight_no_more():
    """A region that sat out a boundary never lands that payload: nothing stays under way."""
    clock = VirtualClock(uniform(3, 8.0, delay_s=0.05, compute_s=0.3))
    for step in range(1, 60):
        clock.inner_step(step)
        clock.send(step, f"0@{step}", 1e6, "two_shot", label=0)
        if step > 1:
            clock.land(step, f"0@{step - 1}", [0, 2])  # region 1 never lands anything
            clock.catch_up([0, 2])
    assert len(clock.transit.payloads) <= 2 and {label for label, *_ in clock.ledger.booked} == {0}
    assert len(clock.transit.owed) <= 2 and len(clock.transit.fabric) < 20


def test_a_region_that_is_away_piles_up_nothing():
    clock = VirtualClock(uniform(3, 8.0, delay_s=0.05, compute_s=0.3), record=True)
    present = np.array([True, False, True])
    for step in range(1, 200):
        clock.inner_step(step, away=~present)
        clock.send(step, f"0@{step}", 1e6, "two_shot", present, listeners_R=~present, label=0)
        clock.land(step, f"0@{step}")
        clock.catch_up([0, 2])
    assert len(clock.transit.owed) <= 2 and len(clock.transit.fabric) < 20
    heard = [b for b in clock.timeline().bars if b.region == 1 and b.kind == "send"]
    assert len(heard) >= 197


def test_state_with_listeners_survives_json():
    def run(clock, first, last):
        for step in range(first, last):
            clock.inner_step(step, active=[True, step % 2 == 0, True])
            sender = np.arange(3) == step % 3
            for fragment in (0, 1):
                key = f"{fragment}@{step}"
                clock.send(step, key, 3 * GB, "all_gather", sender, listeners_R=~sender)
            clock.land(step, f"0@{step}")
            if step > 2:
                clock.land(step, f"1@{step - 2}")
            if step % 3 == 0:
                clock.catch_up(np.flatnonzero(sender))

    whole, part = VirtualClock(three_regions(), seed=3), VirtualClock(three_regions(), seed=3)
    run(whole, 1, 30)
    run(part, 1, 12)
    assert part.transit.owed and part.transit.payloads
    resumed = VirtualClock(three_regions(), seed=3)
    restore_clock(resumed, clock_state(part))
    run(resumed, 12, 30)
    np.testing.assert_array_equal(resumed.now_R, whole.now_R)
    np.testing.assert_array_equal(resumed.peers_R, whole.peers_R)


def test_what_cannot_have_listeners_says_so():
    clock = VirtualClock(three_regions())
    with pytest.raises(ValueError, match="route 'pair' has no listeners"):
        profile(three_regions(), "pair", [1.0, 1.0], [0, 1], [2])
    with pytest.raises(ValueError, match="groups have no listeners"):
        clock.send(1, 0, 1.0, "pair", groups=[(0, 1)], listeners_R=[False, False, True])
    with pytest.raises(ValueError, match="repeat a region"):
        profile(three_regions(), "two_shot", [1.0, 1.0], [0, 1], [1])
    with pytest.raises(ValueError, match="no members"):
        profile(three_regions(), "two_shot", [], [])
