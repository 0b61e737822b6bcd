"""The virtual clock: stalls, sharing, absence, jitter, resume, conservation and cost."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from lowcomm_jax.network import (
    Jitter,
    VirtualClock,
    clock_state,
    derive_tau,
    restore_clock,
    sync_seconds,
    uniform,
)

GB = 1e9


def equal_regions(**fields):
    return uniform(3, 8.0, delay_s=0.05, compute_s=0.3, **fields)


def compute(clock, first, count):
    for step in range(first, first + count):
        clock.inner_step(step)


@pytest.mark.parametrize("route", ["two_shot", "all_gather"])
@pytest.mark.parametrize("tau", [0, 1, 4, 7, 30])
def test_stall_is_transfer_time_minus_hidden_compute(route, tau):
    network = equal_regions(sync_constant_s=0.11)
    clock = VirtualClock(network)
    transfer = sync_seconds(network, 0.9 * GB, route)
    for step in range(1, 6):
        clock.inner_step(step)
    clock.send(5, 0, 0.9 * GB, route)
    compute(clock, 6, tau)
    stall = clock.land(5 + tau, 0)
    assert stall.max() == pytest.approx(max(0.0, transfer - tau * 0.3), abs=1e-12)
    report = clock.report()
    assert report.wall_s == pytest.approx((5 + tau) * 0.3 + stall.max())
    np.testing.assert_allclose(report.exposed_R, stall)
    np.testing.assert_allclose(report.compute_R, (5 + tau) * 0.3)
    assert report.utilisation == pytest.approx(report.compute_R.mean() / report.wall_s)


def test_tau_is_derived_from_the_times():
    assert derive_tau(1.5, 0.3) == 5 and derive_tau(1.51, 0.3) == 6
    assert derive_tau(0.0, 0.3) == 0 and derive_tau(0.2, 0.3, margin=2) == 3
    with pytest.raises(ValueError, match="above 0"):
        derive_tau(1.0, 0.0)
    clock = VirtualClock(equal_regions())
    tau = derive_tau(sync_seconds(equal_regions(), 2 * GB, "all_gather"), 0.3)
    clock.send(0, 0, 2 * GB, "all_gather")
    compute(clock, 1, tau)
    assert clock.land(tau, 0).max() == 0.0


def test_waiting_for_a_slow_peer_is_not_exposed_communication():
    network = equal_regions().with_compute([0.2, 0.5, 0.3])
    clock = VirtualClock(network)
    compute(clock, 1, 10)
    clock.send(10, "all", 0.4 * GB, "all_gather")
    stall = clock.land(10, "all")
    np.testing.assert_allclose(stall, [5 + 0.45 - 2, 0.45, 5 + 0.45 - 3])
    np.testing.assert_allclose(clock.peers_R, [3.0, 0.0, 2.0])
    np.testing.assert_allclose(clock.exposed_R, [0.45, 0.45, 0.45])
    np.testing.assert_allclose(clock.now_R, 5.45)


def test_two_transfers_share_a_link_fairly():
    # Alone 1.0 and 0.4 s of volume. Both at half speed from 0.05 to 0.85; then the first alone for
    # 0.6 s.
    clock = VirtualClock(equal_regions())
    clock.send(1, "big", 1.0 * GB, "all_gather")
    clock.send(1, "small", 0.4 * GB, "all_gather")
    assert clock.land(1, "small").max() == pytest.approx(0.85)
    assert clock.land(1, "big").max() == pytest.approx(0.6)


def test_a_later_send_slows_what_is_still_in_flight():
    clock = VirtualClock(equal_regions())
    clock.send(0, "first", 1.0 * GB, "pair", groups=[(0, 1)])
    compute(clock, 1, 1)
    clock.send(1, "second", 1.0 * GB, "all_gather")
    # The first moves 0.3 s alone (0.05 to 0.35), then shares link 0-1 until 0.35 + 2 * 0.7.
    np.testing.assert_allclose(clock.land(1, "first"), [0.05 + 1.4, 0.05 + 1.4, 0])
    clock.land(1, "second")
    np.testing.assert_allclose(clock.now_R, 0.35 + 1.4 + 0.3)


def test_disjoint_pairs_do_not_slow_each_other():
    network = uniform(4, 8.0, compute_s=0.3)
    clock = VirtualClock(network)
    clock.send(1, 0, [1 * GB, 1 * GB, 2 * GB, 2 * GB], "pair", groups=[(0, 1), (3, 2)])
    np.testing.assert_allclose(clock.land(1, 0), [1.0, 1.0, 2.0, 2.0])


def test_egress_limits_concurrent_pairs():
    clock = VirtualClock(uniform(3, 8.0, compute_s=0.3, shared=True))
    clock.send(1, "a", 1 * GB, "pair", groups=[(0, 1)])
    clock.send(1, "b", 1 * GB, "pair", groups=[(0, 2)])  # both leave and enter region 0
    np.testing.assert_allclose(clock.land(1, "b")[[0, 2]], 2.0)
    np.testing.assert_allclose(clock.land(1, "a"), [0.0, 2.0, 0.0])


def test_regions_may_land_at_different_steps():
    clock = VirtualClock(equal_regions())
    clock.send(0, 7, 1.0 * GB, "all_gather")
    np.testing.assert_allclose(clock.land(0, 7, regions=[2]), [0, 0, 1.05])
    compute(clock, 1, 2)
    np.testing.assert_allclose(clock.land(2, 7), [0.45, 0.45, 0.0])
    with pytest.raises(ValueError, match="nothing is in flight under key 7"):
        clock.land(2, 7)
    clock.send(3, 7, 1.0, "all_gather")
    with pytest.raises(ValueError, match="still in flight"):
        clock.send(3, 7, 1.0, "all_gather")


def test_absent_regions_neither_compute_nor_send():
    clock = VirtualClock(equal_regions(), record=True)
    for step in range(1, 5):
        clock.inner_step(step, away=[False, True, False])
    clock.send(4, 0, 0.6 * GB, "two_shot", participants_R=[True, False, True])
    stall = clock.land(4, 0)
    np.testing.assert_allclose(stall, [0.7, 0.0, 0.7])  # two members: 2 * (0.3 + 0.05)
    np.testing.assert_allclose(clock.absent_R, [0.0, 1.2, 0.0])
    report = clock.report()
    np.testing.assert_allclose(report.compute_R, [1.2, 0.0, 1.2])
    assert report.sent_R.tolist() == [0.6 * GB, 0.0, 0.6 * GB]
    with pytest.raises(ValueError, match=r"away has shape \(2,\)"):
        clock.inner_step(5, away=[True, False])


def test_an_away_region_is_as_late_as_the_slowest_that_computes():
    """It returns no earlier than the step ends, and a slow peer's time is no wait of its own."""
    clock = VirtualClock(equal_regions().with_compute([0.2, 0.3, 0.5]))
    clock.inner_step(1, away=[False, True, False])
    np.testing.assert_allclose(clock.now_R, [0.2, 0.5, 0.5])
    clock.inner_step(2, away=[False, True, False], active=[True, True, False])
    np.testing.assert_allclose(clock.now_R, [0.4, 0.5, 0.5])  # time never goes back
    clock.inner_step(3, away=[True, False, False])
    np.testing.assert_allclose(clock.now_R, [1.0, 0.8, 1.0])
    np.testing.assert_allclose(clock.absent_R, [0.6, 0.5, 0.0])
    clock.send(3, 0, 0.4 * GB, "all_gather")
    clock.land(3, 0)
    np.testing.assert_allclose(clock.peers_R, [0.0, 0.2, 0.0])


def test_first_use_is_charged_once_per_link():
    clock = VirtualClock(equal_regions(first_use_s=0.5))
    for step, expected in ((1, 0.95), (2, 0.45)):
        clock.send(step, 0, 0.4 * GB, "all_gather")
        assert clock.land(step, 0).max() == pytest.approx(expected)
    clock = VirtualClock(equal_regions(first_use_s=0.5))
    for step, pair, expected in ((1, (0, 1), 0.95), (2, (0, 2), 0.95), (3, (1, 0), 0.45)):
        clock.send(step, 0, 0.4 * GB, "pair", groups=[pair])
        # Peers may arrive later; measured from the start of the transfer.
        start = clock.transit.payloads[0].sent[0].start_s
        clock.land(step, 0)
        assert clock.now_R[pair[0]] - start == pytest.approx(expected)


def test_groups_are_checked():
    clock = VirtualClock(equal_regions())
    with pytest.raises(ValueError, match=r"regions \[1\] are in two groups"):
        clock.send(1, 0, 1.0, "pair", groups=[(0, 1), (1, 2)])
    with pytest.raises(ValueError, match="do not exist"):
        clock.send(1, 0, 1.0, "pair", groups=[(0, 3)])
    clock.send(1, 0, 1.0, "pair", groups=[(0,), (1, 2)], participants_R=[True, True, False])
    assert clock.land(1, 0).tolist() == [0.0, 0.0, 0.0]


def noisy(regions=4):
    return replace(
        uniform(regions, 1.0, delay_s=0.03, shared=True, first_use_s=0.4, sync_constant_s=0.02),
        compute_R=np.linspace(0.1, 0.16, regions),
        compute_jitter=Jitter("lognormal", 0.2),
        transfer_jitter=Jitter("lognormal", 0.5),
    )


def drive(clock, first, last, tau=3):
    """Stagger three fragments over a period of 9 steps."""
    for step in range(first, last + 1):
        clock.inner_step(step)
        for fragment in range(3):
            if (
                step > 3 * (fragment + 1)
                and (step - tau - 3 * fragment) % 9 == 0
                and fragment in clock.transit.payloads
            ):
                clock.land(step, fragment)
        for fragment in range(3):
            if (step - 3 * fragment) % 9 == 0 and fragment not in clock.transit.payloads:
                clock.send(step, fragment, 4e6 * (1 + fragment), "two_shot")


def test_runs_are_deterministic_and_resume_bit_for_bit():
    whole = VirtualClock(noisy(), seed=5)
    drive(whole, 1, 40)
    assert whole.transit.payloads, "the test wants transfers in flight at the cut"
    saved = json.loads(json.dumps(clock_state(whole)))
    drive(whole, 41, 90)
    resumed = VirtualClock(noisy(), seed=5)
    restore_clock(resumed, saved)
    drive(resumed, 41, 90)
    np.testing.assert_array_equal(resumed.now_R, whole.now_R)
    np.testing.assert_array_equal(resumed.exposed_R, whole.exposed_R)
    assert resumed.ledger.links() == whole.ledger.links()
    other = VirtualClock(noisy(), seed=6)
    drive(other, 1, 90)
    assert not np.array_equal(other.now_R, whole.now_R)
    with pytest.raises(ValueError, match="already used"):
        restore_clock(resumed, saved)
    with pytest.raises(ValueError, match=r"(?s)saved with 4 regions.*saved with seed 5"):
        restore_clock(VirtualClock(noisy(3), seed=1), saved)


def test_a_report_after_a_resume_is_that_of_the_whole_run():
    """Waits for peers and bytes and time away included."""

    def steps(clock, first, last):
        for step in range(first, last + 1):
            clock.inner_step(step, away=[step % 4 == 1, False, step % 5 == 0])
            if step % 3 == 0:
                clock.send(step, 0, 0.1 * GB, "two_shot")
                clock.land(step, 0)

    network = equal_regions()
    whole = VirtualClock(network)
    steps(whole, 1, 10)
    resumed = VirtualClock(network)
    restore_clock(resumed, json.loads(json.dumps(clock_state(whole))))
    steps(whole, 11, 20)
    steps(resumed, 11, 20)
    found, expected = resumed.report(), whole.report()
    assert found.as_dict() == expected.as_dict()
    assert expected.absent_R.max() > 0 and expected.exposed_R.max() > 0


def test_more_bandwidth_is_never_slower():
    walls = []
    for scale in (0.3, 0.6, 1.0, 2.0, 10.0):
        clock = VirtualClock(noisy().scaled(bandwidth=scale), seed=9)
        drive(clock, 1, 200)
        walls.append(clock.report().wall_s)
        report = clock.report()
        total = report.compute_R + report.peers_R + report.exposed_R
        np.testing.assert_allclose(total, clock.now_R)
    assert all(slow >= fast for slow, fast in itertools.pairwise(walls))
    assert walls[0] > walls[-1]


def test_sent_equals_received_per_link_and_rates_respect_limits():
    clock = VirtualClock(noisy(), seed=1)
    drive(clock, 1, 300)
    report = clock.report()
    assert report.sent_R.sum() == pytest.approx(report.received_R.sum())
    links = clock.ledger.links()
    for region in range(4):
        assert report.sent_R[region] == pytest.approx(
            sum(b for (i, _), b in links.items() if i == region)
        )
    assert (report.mean_gbps_R <= 1.0 + 1e-9).all()
    json.dumps(report.as_dict())


def test_jitter_of_a_pair_is_the_slower_of_two_messages():
    network = replace(uniform(2, 8.0, compute_s=1e-9), transfer_jitter=Jitter("lognormal", 1.0))
    clock = VirtualClock(network, seed=0)
    for step in range(1, 8001):
        clock.send(step, 0, 1.0 * GB, "pair")
        clock.land(step, 0)
    # A round lasts max(T1, T2): exp(1/2) (1 + erf(1/2)) = 2.507 on average; 8,000 draws.
    assert clock.report().wall_s / 8000 == pytest.approx(2.507, abs=0.1)


def test_jitter_is_drawn_for_every_send_by_itself():
    """Another step or another fragment, another factor; the same one in a second run."""

    def seconds(step, key):
        clock = VirtualClock(
            replace(uniform(2, 1.0, delay_s=0.0), transfer_jitter=Jitter("lognormal", 0.5)), seed=3
        )
        clock.inner_step(1)
        clock.send(step, key, 4e6, "all_gather")
        clock.land(step, key)
        return float(clock.now_R[0])

    drawn = [seconds(step, key) for step, key in ((1, 0), (2, 0), (1, 1))]
    assert len(set(drawn)) == 3
    assert seconds(1, 0) == drawn[0]
