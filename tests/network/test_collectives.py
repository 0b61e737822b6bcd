"""Every collective against sums done by hand, and the flow simulator against the definition of
fairness.
"""

from dataclasses import replace

import numpy as np
import pytest
from oracle.routes import sent_bytes

from lowcomm_jax.network import collectives as co
from lowcomm_jax.network import routes
from lowcomm_jax.network.flows import Flow, arrivals, fair_rates
from lowcomm_jax.network.links import uniform
from lowcomm_jax.network.parse import parse
from lowcomm_jax.network.randomness import Jitter

GB = 1e9  # bytes; 8 Gbit/s move 1 GB a second


def three_regions(**fields):
    """Rates in GB/s: 0->1 1.0, 1->2 0.5, 2->0 0.25, back 2.0; delays 10, 20, 40 ms, back 30 ms."""
    return parse(
        {
            "regions": 3,
            "symmetric": False,
            "bandwidth_gbps": [[0, 8, 16], [16, 0, 4], [2, 16, 0]],
            "delay_ms": [[0, 10, 30], [30, 0, 20], [40, 30, 0]],
            **fields,
        }
    )


def test_flows_of_a_ring_take_what_the_textbook_says():
    network = uniform(5, 2.0, delay_s=0.03)
    expected = 2 * 4 / 5 * 0.7 * GB / (2.0 * GB / 8) + 2 * 4 * 0.03
    # Hop k of member i begins when hop k - 1 of the member before it has arrived.
    hops = [
        Flow(i, (i + 1) % 5, 0.14 * GB, after=((k - 1) * 5 + (i - 1) % 5,) if k else ())
        for k in range(8)
        for i in range(5)
    ]
    assert arrivals(network, hops).max() == pytest.approx(expected)


def test_gather_waits_for_the_slowest_incoming_link():
    shape = co.profile(three_regions(), "all_gather", [1 * GB, 2 * GB, 0.5 * GB], (0, 1, 2))
    expected = [
        max(2 / 2 + 0.03, 0.5 / 0.25 + 0.04),
        max(1 / 1 + 0.01, 0.5 / 2 + 0.03),
        max(1 / 2 + 0.03, 2 / 0.5 + 0.02),
    ]
    np.testing.assert_allclose(shape.ready_M, expected)
    np.testing.assert_allclose(shape.latency_M, [0.04, 0.03, 0.03])
    np.testing.assert_allclose(shape.volume_M, [2.0 - 0.0, 1.01 - 0.03, 4.02 - 0.03])


def test_gather_shares_the_egress():
    network = uniform(4, 8.0, delay_s=0.01, shared=True)
    assert co.sync_seconds(network, 0.6 * GB, "all_gather") == pytest.approx(3 * 0.6 + 0.01)


def test_two_shot_shares_a_link_between_its_legs():
    # Slices of 1 GB. 0 -> 1 is done at 1.00, so member 1 owns its slice at 1.01 and sends back over
    # 1 -> 0, which still has 1 - 0.2525 GB of the first leg: both run at 0.125 GB/s for 5.98 s
    # until 6.99, the second leg needs 1.01 s more. Member 0 gets the first leg at 7.01 and sends 1
    # GB in 1 s.
    network = parse(
        {
            "regions": 2,
            "symmetric": False,
            "bandwidth_gbps": [[0, 8], [2, 0]],
            "delay_ms": [[0, 10], [20, 0]],
        }
    )
    shape = co.profile(network, "two_shot", [2 * GB] * 2, (0, 1))
    np.testing.assert_allclose(shape.ready_M, [8.0 + 0.02, 6.99 + 0.02 + 1.0 + 0.01], rtol=1e-9)


def test_two_shot_of_equal_links():
    network = uniform(4, 8.0, delay_s=0.02)
    assert co.sync_seconds(network, 2 * GB, "two_shot") == pytest.approx(2 * (0.5 + 0.02))
    shared = uniform(4, 8.0, delay_s=0.02, shared=True)
    assert co.sync_seconds(shared, 2 * GB, "two_shot") == pytest.approx(2 * (1.5 + 0.02))


def test_pair_exchanges_both_ways_at_once():
    shape = co.profile(three_regions(), "pair", [1 * GB, 3 * GB], (1, 2))
    np.testing.assert_allclose(shape.ready_M, [3 / 2 + 0.03, 1 / 0.5 + 0.02])


def test_pass_waits_for_the_member_before_alone():
    shape = co.profile(three_regions(), "pass", [1 * GB, 3 * GB, 2 * GB], (0, 2, 1))
    # 2 -> 1 at 2 GB/s, 1 -> 0 at 2 GB/s, 0 -> 2 at 2 GB/s; delays 30 ms each.
    np.testing.assert_allclose(shape.ready_M, [2 / 2 + 0.03, 1 / 2 + 0.03, 3 / 2 + 0.03])
    links = routes.link_bytes("pass", (1.0, 3.0, 2.0), (0, 2, 1))
    assert links == {(0, 2): 1.0, (2, 1): 3.0, (1, 0): 2.0}


@pytest.mark.parametrize("route", routes.ROUTES)
def test_link_bytes_match_the_closed_form_and_are_conserved(route):
    members = (0, 2, 3, 5, 6)
    links = routes.link_bytes(route, (7e6,) * 5, members)
    assert sum(links.values()) / 5 == pytest.approx(sent_bytes(route, 7e6, 5))
    shape = co.profile(uniform(7, 1.0), route, [7e6] * 5, members)
    pairs = zip(shape.sources.tolist(), shape.targets.tolist(), strict=True)
    assert dict(zip(pairs, shape.bytes_L.tolist(), strict=True)) == pytest.approx(links)
    assert routes.link_bytes(route, (7e6,), (3,)) == {} and sent_bytes(route, 7e6, 1) == 0


@pytest.mark.parametrize("route", routes.ROUTES)
def test_more_bandwidth_or_less_delay_is_never_slower(route):
    rng = np.random.default_rng(5)
    for _ in range(6):
        rates = rng.uniform(0.2, 3.0, (4, 4)).tolist()
        spec = {"regions": 4, "symmetric": False, "bandwidth_gbps": rates, "delay_ms": 40}
        spec["egress_gbps"] = rng.uniform(1.0, 4.0, 4).tolist()
        network = parse(spec)
        time = co.sync_seconds(network, 1e8, route)
        assert co.sync_seconds(network.scaled(bandwidth=1.3), 1e8, route) < time
        assert co.sync_seconds(network.scaled(delay=0.6), 1e8, route) < time
        assert co.sync_seconds(network, 1.2e8, route) > time


def test_the_slowest_of_all_pairs():
    rng = np.random.default_rng(3)
    rates = rng.uniform(0.2, 3.0, (5, 5)).tolist()
    spec = {"regions": 5, "symmetric": False, "bandwidth_gbps": rates, "delay_ms": 40}
    network = parse({**spec, "egress_gbps": [0.5, 0.1, None, 2, 3], "sync_constant_s": 0.2})
    pairs = [(i, j) for i in range(5) for j in range(i)]
    each = [co.profile(network, "pair", [1e8] * 2, pair).ready_M.max() for pair in pairs]
    assert co.sync_seconds(network, 1e8, "pair") == pytest.approx(max(each) + 0.2)
    assert min(each) < max(each)


def test_step_seconds_are_the_slowest_regions_mean():
    network = uniform(3, 1.0).with_compute([0.2, 0.7, 0.3])
    assert co.step_seconds(network) == 0.7
    jittered = replace(network, compute_jitter=Jitter("lognormal", 0.4))
    assert co.step_seconds(jittered) == pytest.approx(0.7 * np.exp(0.08))


def test_a_store_is_as_far_and_as_slow_as_the_worst_pair_of_regions():
    """Three payloads at 0.25 GB/s, or at the limit of an egress; ten trips of 80 ms."""
    apart = co.STORE_TRIPS * 2 * 0.04 + 2 * co.STORE_LOOK_S
    assert co.store_seconds(three_regions(), GB) == pytest.approx(apart + 3 / 0.25)
    limited = three_regions(egress_gbps=[0.8, 8, 8])
    assert co.store_seconds(limited, GB) == pytest.approx(apart + 3 / 0.1)
    assert co.store_seconds(uniform(1, 1.0), GB) == pytest.approx(2 * co.STORE_LOOK_S)


def test_one_member_and_constants():
    network = uniform(3, 1.0, sync_constant_s=0.7)
    assert co.sync_seconds(uniform(1, 1.0, sync_constant_s=0.7), 1e6, "two_shot") == 0.0
    assert co.sync_seconds(network, 0.0, "pair") == pytest.approx(0.7)


def test_bad_collectives_are_refused_with_all_reasons():
    with pytest.raises(ValueError) as caught:
        routes.check("two_shot", [1.0, 2.0, -1.0], (0, 0, 9), 3)
    for part in ("repeat", "are no regions", "must not be negative", "equal payload sizes"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="route 'pigeon' is unknown"):
        co.sync_seconds(uniform(2, 1.0), 1.0, "pigeon")


def test_fair_rates_of_a_known_case():
    network = parse(
        {
            "regions": 4,
            "bandwidth_gbps": 8.0,
            "links": [{"pair": ["r0", "r1"], "bandwidth_gbps": 2.4}],
            "egress_gbps": [8.0, None, None, None],
            "ingress_gbps": [None, None, 8.0, None],
        }
    )
    # 0->1 is held to 0.3 by its link; 3->2 and 0->2 share region 2's ingress: half each.
    rates = fair_rates(network, np.array([0, 0, 3]), np.array([1, 2, 2]))
    np.testing.assert_allclose(rates / GB, [0.3, 0.5, 0.5])


def test_fair_rates_are_feasible_and_max_min():
    rng = np.random.default_rng(0)
    for _ in range(20):
        network = parse(
            {
                "regions": 5,
                "symmetric": False,
                "bandwidth_gbps": rng.uniform(0.5, 4, (5, 5)).tolist(),
                "egress_gbps": rng.uniform(0.5, 6, 5).tolist(),
                "ingress_gbps": rng.uniform(0.5, 6, 5).tolist(),
            }
        )
        source = rng.integers(0, 5, 9)
        target = (source + rng.integers(1, 5, 9)) % 5
        rate = fair_rates(network, source, target)
        groups = [(source == i, network.egress_rate_R[i]) for i in range(5)]
        groups += [(target == i, network.ingress_rate_R[i]) for i in range(5)]
        groups += [
            ((source == i) & (target == j), network.rate_RxR[i, j])
            for i in range(5)
            for j in range(5)
            if i != j
        ]
        for users, limit in groups:
            assert rate[users].sum() <= limit * (1 + 1e-9)
        for k in range(9):  # some full resource on which nobody is faster
            assert any(
                users[k]
                and rate[users].sum() >= limit * (1 - 1e-9)
                and rate[k] >= rate[users].max() * (1 - 1e-9)
                for users, limit in groups
            )


def test_flows_that_start_late_share_only_the_rest():
    network = uniform(3, 8.0, delay_s=0.5)
    late = Flow(0, 1, 1 * GB, after=(0,))
    times = arrivals(network, [Flow(2, 0, 0.5 * GB), Flow(0, 1, 2 * GB), late])
    # 1 GB alone in the first second, then both at half speed for two seconds.
    np.testing.assert_allclose(times, [1.0, 3.5, 3.5])
