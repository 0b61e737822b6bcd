"""Goodput under failures: the closed form, and the simulation by hand."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from lowcomm_jax.planner.goodput import (
    DECOUPLED,
    DP,
    ELASTIC_DP,
    FITTED,
    METHODS,
    YEAR_S,
    Fleet,
    Reaction,
    closed_form,
)
from lowcomm_jax.planner.goodput_simulation import (
    Interruptions,
    all_idle,
    interruptions,
    plan_goodput,
    sent,
    sent_evenly,
    waiting,
)

HOUR = 3600.0


def published_fleet(chips, learners):
    """A fleet of the published simulation, with the values that are fitted to its table.

    A chip has one interrupt a year, as published. Times of reconfiguration and repair are not:
    `FITTED` stands for both.
    """
    elastic, restart = FITTED["elastic"], FITTED["dp"]
    return Fleet(
        regions=(chips // learners,) * learners,
        stop_s=elastic.stop_s,
        restart_s=restart.stop_s,
        overhead=elastic.overhead,
        restart_overhead=restart.overhead,
    )


def expected(fleet, method):
    """The closed form, of jobs that do not wait for one another: nothing is away, all is sent."""
    stop, overhead = fleet.stop_of(method), fleet.overhead_of(method)
    if METHODS[method].reaction == Reaction.ONE_JOB:
        return closed_form(1.0 / sum(fleet.rates), stop, overhead)
    parts = zip(fleet.regions, fleet.rates, strict=True)
    return sum(n * closed_form(1.0 / r, stop, overhead) for n, r in parts) / fleet.chips


@pytest.mark.parametrize("chips", [150_000, 2_400_000])
def test_the_simulation_agrees_with_the_closed_form(chips):
    """Within 0.3 points; uptime is that of independent learners."""
    for learners, methods in ((2, [DECOUPLED]), (16, [DECOUPLED]), (1, [DP, ELASTIC_DP])):
        fleet = published_fleet(chips, learners)
        for row in plan_goodput(fleet, methods):
            assert abs(row.goodput - expected(fleet, row.method)) < 0.003, (learners, row)
            mtbf = YEAR_S * learners / chips
            down = 1 - closed_form(mtbf, fleet.stop_of(row.method), 0.0)
            assert row.uptime == pytest.approx(1 - down**learners, abs=0.003)
            assert math.fsum([row.goodput, *row.lost.values()]) == pytest.approx(1.0)


def test_four_learners_and_more_are_up_nearly_always():
    (row,) = plan_goodput(published_fleet(2_400_000, 4), [DECOUPLED])
    assert 0.99 < row.uptime < 1.0


def test_other_seeds_and_unequal_regions():
    mtbf = (2 * YEAR_S, YEAR_S, YEAR_S / 3)
    fleet = replace(published_fleet(300_000, 3), regions=(150_000, 90_000, 60_000))
    fleet = replace(fleet, chip_mtbf_s=mtbf)
    rates = [n / m for n, m in zip(fleet.regions, mtbf)]
    c, d = FITTED["elastic"][:2]
    each = [n * (1 - c) / (1 + d * rate) for n, rate in zip(fleet.regions, rates)]
    first, again, other = (plan_goodput(fleet, [DECOUPLED, DP], seed) for seed in (0, 0, 1))
    assert first == again and first[0].goodput != other[0].goodput
    for row in (first[0], other[0]):
        assert row.goodput == pytest.approx(sum(each) / 300_000, abs=0.003)
    c, d = FITTED["dp"][:2]
    assert first[1].goodput == pytest.approx((1 - c) / (1 + d * sum(rates)), abs=0.003)


# -- what breaks -------------------------------------------------------------------------------


def _poisson(mean, most=60):
    return [math.exp(-mean) * mean**k / math.factorial(k) for k in range(most)]


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_an_elastic_job_lacks_what_no_spare_slice_replaces(spare):
    """Broken slices are Poisson (a queue of infinitely many servers, fixed repair)."""
    chips, repair, mean = 8192, 10 * HOUR, 2.0
    fleet = Fleet(
        (chips,),
        chip_mtbf_s=chips * repair / mean,
        stop_s=0.0,
        repair_s=repair,
        slice_chips=16,
        spare_slices=spare,
    )
    (row,) = plan_goodput(fleet, [ELASTIC_DP])
    missing = sum(p * max(k - spare, 0) for k, p in enumerate(_poisson(mean)))
    assert row.lost["broken"] == pytest.approx(missing * 16 / (chips + 16 * spare), rel=0.06)
    assert row.lost["spare"] == pytest.approx(16 * spare / (chips + 16 * spare))
    assert row.uptime == pytest.approx(1.0)


def test_growing_again_is_a_stop_and_spare_slices_avoid_it():
    fleet = Fleet((1024,), chip_mtbf_s=1024 * 50 * HOUR, stop_s=900.0, repair_s=HOUR)
    (grows,) = plan_goodput(fleet, [ELASTIC_DP])
    (swaps,) = plan_goodput(replace(fleet, spare_slices=4), [ELASTIC_DP])
    once = 900 / (50 * HOUR)
    # Two stops an interrupt. The next 30 hours have none in nine cases of ten.
    assert grows.lost["stopped"] == pytest.approx(2 * once, rel=0.05)
    assert swaps.lost["stopped"] == pytest.approx(once, rel=0.05)


def test_dp_waits_for_repair_and_spares_take_its_place():
    fleet = Fleet((256, 256), chip_mtbf_s=512 * 30 * HOUR, restart_s=HOUR / 2, repair_s=6 * HOUR)
    (waits,) = plan_goodput(fleet, [DP])
    assert waits.goodput == pytest.approx(30 / (30 + 6 + 0.5), abs=0.004)
    (spares,) = plan_goodput(replace(fleet, spare_slices=9), [DP])
    assert spares.goodput == pytest.approx(512 / 530 * 30 / 30.5, abs=0.004)
    # Regions that restart do as DP does, each by itself.
    stiff = replace(fleet, elastic_regions=False, stop_s=0.0)
    (row,) = plan_goodput(stiff, [DECOUPLED])
    assert row.goodput == pytest.approx(60 / (60 + 6 + 0.5), abs=0.004)


def test_a_region_that_is_away_stops_dp_and_costs_the_others_nothing():
    mtbf, away, stop = 100 * HOUR, 8 * HOUR, HOUR
    fleet = Fleet(
        (100, 200, 300),
        chip_mtbf_s=1e15,
        stop_s=stop,
        restart_s=2 * HOUR,
        outage_mtbf_s=mtbf,
        outage_s=away,
    )
    names = [DP, ELASTIC_DP, DECOUPLED, "diloco_wait"]
    found = {row.method: row for row in plan_goodput(fleet, names)}
    assert found[DP].goodput == pytest.approx(1 / (1 + 3 * (away + 2 * HOUR) / mtbf), abs=0.004)
    alone = 1 / (1 + (away + stop) / mtbf)
    assert found[DECOUPLED].goodput == pytest.approx(alone, abs=0.004)
    assert found[DECOUPLED].uptime == pytest.approx(1 - (1 - alone) ** 3, abs=0.002)
    # Elastic DP stops for an hour when a region goes, and when it comes back in no other stop.
    running = 1.0
    for _ in range(50):
        each = 1 / (100 / running + 8)  # outages of a region an hour
        running = 1 - 3 * each * (1 + running)
    assert found[ELASTIC_DP].lost["stopped"] == pytest.approx(1 - running, abs=0.002)
    # Of 8 hours away it stands for the first; the other two regions stop it now and then.
    broken = each * 7 * (1 - 2 * each * 2)
    assert found[ELASTIC_DP].lost["broken"] == pytest.approx(broken, abs=0.002)
    # Three regions that wait stand nearly as long as DP, but for outages that overlap.
    assert found[DP].goodput < found["diloco_wait"].goodput < found[ELASTIC_DP].goodput
    assert found["diloco_wait"].lost["waiting"] > 0.1


# -- what is not sent --------------------------------------------------------------------------


def test_what_was_sent_is_counted_by_fragments():
    """Every fragment by itself: it keeps what was trained before its last send."""
    between = 7.0
    for fragments, trained in itertools.product((1, 3, 8), (0.0, 6.9, 7.0, 20.0, 100.0)):
        kept = 0.0
        for fragment in range(fragments):
            sends = [n for n in range(1, int(trained // between) + 1) if n % fragments == fragment]
            kept += max(sends, default=0) * between / fragments
        assert sent(np.array([trained]), between, fragments)[0] == pytest.approx(kept)


def test_what_was_sent_with_many_fragments_is_the_limit():
    trained = np.array([0.0, 3.0, 24.0, 100.0])
    many = sent(trained, 24.0 / 4000, 4000)
    np.testing.assert_allclose(sent_evenly(trained, 24.0), many, atol=0.02)
    np.testing.assert_array_equal(sent_evenly(trained, 0.0), trained)


def test_an_absent_region_loses_rounds_and_comes_back_at_a_synchronisation():
    """Renewal theory of one region, the expectations by a fine sum over when it stops."""
    period, stop, mtbf = 60.0, 20.0, 200.0
    when = (np.arange(400_000) + 0.5) * mtbf * 30 / 400_000
    chance = np.exp(-when / mtbf)
    chance /= chance.sum()
    kept = np.floor(when / period) * period
    cycle = np.ceil((when + stop) / period) * period
    fleet = Fleet((64, 64), chip_mtbf_s=64 * mtbf, stop_s=stop, period_s=period)
    (row,) = plan_goodput(fleet, ["diloco_absent"])
    assert row.goodput == pytest.approx((chance @ kept) / (chance @ cycle), abs=0.004)
    assert row.lost["waiting"] == 0.0 and row.lost["unsent"] > 0.1


def test_decoupled_loses_what_it_had_not_sent():
    period, stop, mtbf = 24.0, 20.0, 100.0
    fleet = Fleet((64, 64), 64 * mtbf, stop_s=stop, decoupled_period_s=period)
    (row,) = plan_goodput(fleet, [DECOUPLED])
    lost = mtbf * (1 - mtbf / period * (1 - math.exp(-period / mtbf)))
    assert row.goodput == pytest.approx((mtbf - lost) / (mtbf + stop), abs=0.004)


# -- regions that wait -------------------------------------------------------------------------


def _train(stops, now, seconds):
    """When a region has trained so long, by its stops."""
    for start, end in stops:
        if end <= now:
            continue
        if now + seconds <= max(start, now):
            return now + seconds
        if start > now:
            seconds -= start - now
        now = end
    return now + seconds


def _trained_between(stops, first, last):
    return (last - first) - sum(max(0, min(e, last) - max(s, first)) for s, e in stops)


STOPS = (
    [(10.0, 18.0), (55.0, 56.0), (300.0, 310.0)],
    [(95.0, 131.0), (140.0, 141.0), (302.0, 303.0)],
    [(61.5, 64.0), (133.0, 135.0), (136.0, 139.0)],
)


@pytest.mark.parametrize(("between", "overlap"), [(30.0, 0.0), (10.0, 4.0), (10.0, 10.0)])
def test_waiting_by_hand(between, overlap):
    horizon = 1000.0
    sends, waits, rounds = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0
    intervals = [[], [], []]
    while True:
        ready = [_train(s, t, overlap) for s, t in zip(STOPS, sends)]
        lands = [max(at, *sends) for at in ready]
        after = [_train(s, t, between - overlap) for s, t in zip(STOPS, lands)]
        if max(after) > horizon:
            break
        for region, stops in enumerate(STOPS):
            waits[region] += _trained_between(stops, ready[region], lands[region])
            intervals[region].append((ready[region], lands[region]))
        sends, rounds = after, rounds + 1
    # The same three regions in the second of two fleets; nothing happens to the first.
    start, end = (np.array(STOPS)[None, ..., i] for i in (0, 1))
    calm = np.full_like(start, horizon)
    both = np.concatenate([calm, start]), np.concatenate([calm, end])
    found = Interruptions(*both, np.ones_like(both[0]), horizon)
    rounds_R, seconds_R, waited_RxJ, idle = waiting(found, between, overlap)
    assert rounds_R.tolist() == [horizon // between, rounds] and max(waits) > 10
    assert seconds_R[1] == pytest.approx(max(sends))
    np.testing.assert_allclose(waited_RxJ, [[0, 0, 0], waits], atol=1e-6)
    seen = (idle[1] - idle[0])[1].sum(axis=-1)
    np.testing.assert_allclose(seen, [sum(b - a for a, b in rows) for rows in intervals], atol=1e-6)


def test_all_idle_by_sampling():
    rng = np.random.default_rng(3)
    start = rng.integers(0, 50, (4, 3, 12)).astype(float)
    end = start + rng.integers(0, 9, start.shape)
    until = np.array([60.0, 40.0, 55.0, 20.0])
    middles = np.arange(60) + 0.5
    inside = (start[..., None] <= middles) & (middles < end[..., None])
    both = inside.any(axis=2).all(axis=1) & (middles < until[:, None])
    assert all_idle(start, end, until).tolist() == both.sum(axis=1).tolist()
    assert both.sum() > 10


def test_long_periods_let_what_regions_lose_overlap():
    fleet = published_fleet(600_000, 8)
    names = ["diloco_wait", "streaming_wait", DECOUPLED]
    found = {row.method: row.goodput for row in plan_goodput(fleet, names)}
    assert found["streaming_wait"] < found["diloco_wait"] < found[DECOUPLED]
    # Of the shortest nothing overlaps: all regions train only while none is stopped.
    (short,) = plan_goodput(replace(fleet, period_s=1.0, overlap_s=0.0), ["diloco_wait"])
    c, d = FITTED["elastic"][:2]
    all_up = (1 / (1 + d / (YEAR_S * 8 / 600_000))) ** 8
    assert short.goodput == pytest.approx((1 - c) * all_up, abs=0.01)
    assert short.goodput < found["streaming_wait"]


def test_interrupts_do_not_depend_on_the_reaction():
    fleet = published_fleet(600_000, 4)
    waits, alone = (interruptions(fleet, name, 5) for name in ("diloco_wait", DECOUPLED))
    until, events = waits.horizon_s, waits.start_RxJxE.shape[2]
    assert until < alone.horizon_s
    start = alone.start_RxJxE[..., :events]
    inside = start < until
    np.testing.assert_array_equal(waits.start_RxJxE[inside], start[inside])
    assert inside.sum() > 10_000


def test_everything_wrong_is_named_at_once():
    fleet = Fleet((64, 32), (1.0, 0.0), stop_s=-1.0, overhead=1.0, slice_chips=0, fragments=0)
    with pytest.raises(ValueError, match="goodput:") as error:
        plan_goodput(fleet, ["dipaco"])
    for text in ("'dipaco' is unknown", "chip_mtbf_s is 0.0", "stop_s is -1.0", "less than 1"):
        assert text in str(error.value)
    assert str(error.value).count("\n- ") == 6
    with pytest.raises(ValueError, match="use at most 32, a whole region"):
        plan_goodput(replace(Fleet((64, 32)), slice_chips=64))
    with pytest.raises(ValueError, match=r"overlap_s is 20: use at most 12\.5"):
        plan_goodput(Fleet((64, 32), overlap_s=20.0))
    with pytest.raises(ValueError, match="2 values for 3 regions"):
        plan_goodput(Fleet((8, 8, 8), (1.0, 2.0)))
    with pytest.raises(ValueError, match="regions is empty"):
        plan_goodput(Fleet(()))
