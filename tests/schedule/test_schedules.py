"""Schedules: when fragments leave, over random settings and by hand."""

import functools

import numpy as np
import pytest
from leaving import leaves

import lowcomm_jax as lc
from lowcomm_jax import history
from lowcomm_jax.schedule import (
    Adaptive,
    Learners,
    Ranked,
    Staggered,
    Timed,
    delay_per_region,
    syncs_per_period,
)
from lowcomm_jax.schedule.timing import NetworkTiming
from lowcomm_jax.state.train_state import SyncCounters


def sends_until(schedule, last, rates=None, delay=0):
    """Drive a schedule alone; returns [(step, fragment)]. `rates(step)` are the change rates."""
    clock, sent, due = SyncCounters.start(schedule.fragments, 1), [], {}
    for step in range(1, last + 1):
        due = {p: t for p, t in due.items() if t > step}
        now = None if rates is None else functools.partial(rates, step)
        for p in leaves(schedule, step, clock, due, now):
            assert p not in due, "a fragment in flight was sent again"
            clock.last_sent[p] = step
            sent.append((step, p))
            if delay:
                due[p] = step + delay
    return sent


def test_staggered_by_hand():
    assert sends_until(Staggered(5, 2), 12) == [(2, 0), (5, 1), (7, 0), (10, 1), (12, 0)]
    assert sends_until(Staggered(7, 3), 9) == [(2, 0), (4, 1), (7, 2), (9, 0)]
    assert sends_until(Staggered(1), 3) == [(1, 0), (2, 0), (3, 0)]


def test_staggered_on_random_settings():
    rng = np.random.default_rng(0)
    for _ in range(60):
        period = int(rng.integers(1, 40))
        count = int(rng.integers(1, period + 1))
        schedule = Staggered(period, count)
        sent = sends_until(schedule, 3 * period)
        for p in range(count):
            first = (p + 1) * period // count
            expected = list(range(first, 3 * period + 1, period))
            assert [t for t, q in sent if q == p] == expected
        steps, step = [], 0
        while (step := schedule.next_send(step, None)) <= 3 * period:
            steps.append(step)
        assert steps == [t for t, _ in sent], "next_send must name every send and nothing else"
        assert len(set(steps)) == len(steps), "two fragments left at one step"


def adaptive_cases(count):
    rng = np.random.default_rng(1)
    for _ in range(count):
        period = int(rng.integers(2, 40))
        fragments = int(rng.integers(1, min(period, 8) + 1))
        syncs = int(rng.integers(fragments, period + 1))
        delay = int(rng.integers(0, period))
        yield rng, Adaptive(period, fragments, syncs, delay), delay


def test_no_fragment_waits_longer_than_the_bound():
    """For every tau < H: what is overdue was sent H > tau steps ago, so it is not in flight."""
    overlapping = 0
    for rng, schedule, delay in adaptive_cases(150):
        assert not schedule.violations(1)
        favourite = int(rng.integers(schedule.fragments))

        def rates(step, rng=rng, schedule=schedule, favourite=favourite):
            return rng.random(schedule.fragments) + 5.0 * np.eye(schedule.fragments)[favourite]

        sent = sends_until(schedule, 6 * schedule.period, rates, delay)
        overlapping += delay > schedule.spacing
        for p in range(schedule.fragments):
            times = [0, *(t for t, q in sent if q == p)]
            waits = np.diff([*times, 6 * schedule.period])
            # An overdue fragment was sent H steps ago, so for tau < H it has landed.
            h, slots = schedule.spacing, -(-schedule.period // schedule.spacing)
            assert waits.max() <= (slots + schedule.fragments - 1) * h, (schedule, p, times)
    assert overlapping > 30, "the cases must contain tau > spacing"


def test_the_first_sends_come_within_the_first_fragments_slots():
    for rng, schedule, delay in adaptive_cases(80):
        rates = rng.random(schedule.fragments)
        sent = sends_until(schedule, 2 * schedule.period, lambda _, r=rates: r, delay)
        first = {p: min(t for t, q in sent if q == p) for p in range(schedule.fragments)}
        expected = {p: (p + 1) * schedule.spacing for p in range(schedule.fragments)}
        assert first == expected


def test_next_send_names_every_slot():
    for _, schedule, _ in adaptive_cases(40):
        step, slots, clock = 0, [], SyncCounters.start(schedule.fragments, 1)
        while (step := schedule.next_send(step, clock)) <= 3 * schedule.period:
            slots.append(step)
        assert slots == list(range(schedule.spacing, 3 * schedule.period + 1, schedule.spacing))
        assert schedule.spacing == schedule.period // schedule.syncs


def test_equal_rates_give_round_robin():
    for _, schedule, _ in adaptive_cases(60):
        equal = np.full(schedule.fragments, 0.3, np.float32)
        sent = [p for _, p in sends_until(schedule, 4 * schedule.period, lambda _, r=equal: r)]
        assert sent == [i % schedule.fragments for i in range(len(sent))]


def clock_with(last_sent):
    clock = SyncCounters.start(len(last_sent), 1)
    clock.last_sent[:] = last_sent
    return clock


@pytest.mark.parametrize(
    "last_sent,in_flight,rates,expected",
    [
        ([0, 15, 10], {}, [0.0, 0.0, 9.0], 0),  # overdue (20 - 0 >= 10) before the largest rate
        ([8, 5, -1], {}, [0.0, 0.0, 0.0], 1),  # overdue before never sent, oldest of two overdue
        ([14, -1, 12], {}, [9.0, 0.0, 0.0], 1),  # never sent before rates
        ([14, 12, 16], {}, [0.1, 0.2, 0.3], 2),  # largest rate
        ([14, 12, 16], {2}, [0.1, 0.2, 0.3], 1),  # ... that is not in flight
        ([14, 12, 16], {}, [0.3, 0.3, 0.1], 1),  # a tie goes to the one sent longest ago
        ([-1, 12, 16], {0}, [0.1, 0.2, 0.3], 2),  # never sent, but in flight
        ([14, 12, 16], {0, 1, 2}, [0.1, 0.2, 0.3], None),
    ],
)
def test_adaptive_order_by_hand(last_sent, in_flight, rates, expected):
    schedule = Adaptive(period=10, fragments=3, syncs=5)
    chosen = leaves(schedule, 20, clock_with(last_sent), in_flight, lambda: np.array(rates))
    assert chosen == (() if expected is None else (expected,))
    assert leaves(schedule, 21, clock_with(last_sent)) == ()


@pytest.mark.parametrize(
    "setting,expected",
    [
        ((100, 4, 0.4, 1.0, 5.0), 8),  # the published N: gamma 0.4, tau = 5 = T_s / T_c
        ((100, 4, 0.4, 0.25, 5.0), 4),  # too slow a link: never fewer than K
        ((100, 4, 1.0, 3.0, 1.0), 100),  # never more than one a step
        ((100, 4, 0.29, 1.0, 1.0), 29),  # 0.29 * 100 = 28.999... in binary
        ((70, 3, 0.37, 1.0, 2.0), 12),  # floor(12.95)
    ],
)
def test_syncs_per_period_by_hand(setting, expected):
    assert syncs_per_period(*setting) == expected


def test_delay_per_region():
    assert delay_per_region(3, 2).tolist() == [3, 3]
    assert delay_per_region((0, 5), 2).tolist() == [0, 5]


def landed(rank):
    never = np.full(1, -1)
    values = {"rank": np.float32(rank)}
    return history.Event("land", 0, 0, "k", never >= 0, never, 0, never, never, "", values)


def ranked_rounds(schedule, measured, rounds):
    """Drive `Ranked` alone; returns [(level sent, steps until the next boundary)]."""
    clock, found = SyncCounters.start(1, 1, schedule.start()), []
    for k in range(rounds):
        boundary, level = int(clock.decided["boundary"]), schedule.level(clock)
        assert schedule.next_send(boundary - 1, clock) == boundary
        landings = [landed(measured(k))] if k else []
        clock.decided = schedule.decide(boundary, clock, landings)
        found.append((level, int(clock.decided["boundary"]) - boundary))
    return found


def test_a_boundary_that_was_put_off_names_the_latest_next_one():
    schedule = Ranked(6, (4, 2))
    clock = SyncCounters.start(1, 1, schedule.start())
    assert [schedule.next_send(step, clock) for step in (0, 5, 6, 9)] == [6, 6, 12, 15]


@pytest.mark.parametrize("probe", [None, 2])
def test_a_payload_travels_during_the_round_after_it(probe):
    """T_comm <= H T_step holds for what leaves at a boundary and the round that then begins."""
    travel = (40, 20, 10, 5)
    schedule = Ranked(60, (32, 16, 8, 4), window=1, travel=travel, probe=probe)
    rounds = ranked_rounds(schedule, lambda k: 4.0, 8)
    assert all(length >= travel[level] for level, length in rounds), rounds
    if probe is None:
        # Rank 4 is known at the second boundary, where rank 32 still leaves; 60 * 4 / 32 = 8.
        assert rounds == [(0, 60), (0, 40)] + [(3, 8)] * 6
    else:
        assert rounds[2:] == [(3, 8), (2, 10)] * 3


def test_level_and_length_follow_the_mean_of_the_last_ranks():
    """Ranks 8, 4, 2, 2, 2 over a window of three; the level of a boundary is sent at the next."""
    schedule, ranks = Ranked(60, (8, 4, 2), window=3), [8.0, 4.0, 2.0, 2.0, 2.0, 2.0]
    rounds = ranked_rounds(schedule, lambda k: ranks[k - 1], 7)
    assert rounds[:3] == [(0, 60)] * 3  # nothing, 8, and 8 and 4: the window is not full
    # (8 + 4 + 2) / 3 needs bucket 8; (4 + 2 + 2) / 3 needs bucket 4, sent from the next boundary.
    assert rounds[3:] == [(0, 35), (0, 20), (1, 15), (2, 15)]


def test_rounding_of_the_mean_rank_is_not_a_higher_rank():
    """A float32 mean of ranks may lie a few ulp above them."""
    schedule = Ranked(60, (8, 4, 2), window=1)
    for rank, level in ((8, 0), (4, 1), (2, 2)):
        above = np.nextafter(np.float32(rank), np.float32(99))
        assert ranked_rounds(schedule, lambda k, r=above: r, 3)[2] == (level, round(60 * rank / 8))
    assert ranked_rounds(schedule, lambda k: 4.01, 3)[2][0] == 0


def test_a_ranked_payload_leaves_at_the_level_that_was_decided():
    """Only a probing round is one bucket higher, and none is higher than the first bucket."""
    schedule = Ranked(60, (32, 16, 8), window=1, probe=2)
    levels = [level for level, _ in ranked_rounds(schedule, lambda k: 8.0, 6)]
    assert levels == [0, 0, 2, 1, 2, 1]
    highest = [level for level, _ in ranked_rounds(schedule, lambda k: 32.0, 6)]
    assert highest == [0] * 6
    clock = SyncCounters.start(1, 1, {**schedule.start(), "level": np.int64(2)})
    assert schedule.level(clock) == 2


def test_a_round_that_told_no_rank_is_not_in_the_window():
    """Nobody took part in the second one: 8 and 4 are measured, whose mean is 3/4 of 8."""
    schedule, ranks = Ranked(60, (8, 4, 2), window=2), [8.0, 0.0, 4.0]
    rounds = ranked_rounds(schedule, lambda k: ranks[k - 1], 4)
    assert [length for _, length in rounds] == [60, 60, 60, 45]


def test_learners_wait_for_the_fragment_that_travels_longest():
    timing = NetworkTiming(1.0, lambda fragment, level: [1.0, 3.5, 2.0][fragment])
    assert Learners(9, 3, 5).settle(timing).travel == (4,)
    assert Learners(9, 3, 5, travel=(2,)).settle(timing).travel == (2,)


def test_a_header_holds_two_seconds_and_the_drift_of_every_fragment():
    floats = [
        Adaptive(8, 3, 4, statistic=score, measured=measured).header_floats()
        for score in ("rate", "drift")
        for measured in (False, True)
    ]
    assert floats == [0, 2, 3, 5]


def test_a_payload_may_travel_for_as_long_as_is_hidden():
    for travel, fits in ((3, True), (4, False)):
        rounds = Staggered(3, travel=(travel,), land_after_send=True)
        ranked = Ranked(3, (2, 1), travel=(travel, 1), land_after_send=True)
        learners = Learners(9, 3, 3, travel=(travel,))
        for schedule in (rounds, ranked, learners):
            assert (schedule.violations(2) == []) == fits, schedule


def test_only_a_payload_that_is_to_be_hidden_is_timed():
    timing = NetworkTiming(1.0, lambda fragment, level: 3.5)
    assert Staggered(9).settle(timing).travel == ()
    assert Staggered(9, travel=None).settle(timing).travel == (4,)
    assert Staggered(9, travel=(2,)).settle(timing).travel == (2,)
    assert Ranked(9, (4, 2), travel=None).settle(timing).travel == (4, 4)


def test_rounds_of_a_learner_of_half_speed():
    plain = lc.methods.decoupled_diloco(4, 3, 2, 1, 0.0, (1.0, 0.5)).schedule
    rounds = [r for t in range(1, 9) for r in plain.rounds_closing(t, 2)]
    assert [r.closes for r in rounds] == [1, 2, 4, 5, 6, 8]
    assert [bool(r.admitted[1]) for r in rounds] == [False, True, True, False, True, True]
    patient = lc.methods.decoupled_diloco(4, 3, 2, 1, 0.8, (1.0, 0.5)).schedule
    rounds = [r for t in range(1, 9) for r in patient.rounds_closing(t, 2)]
    assert all(r.admitted.all() and r.lands - r.quorum == 2 for r in rounds)


def test_a_period_of_0_is_told_of_rounds_of_a_time():
    assert "period=0" in "\n".join(Timed(0, (3.0, 1.0, 2.0)).violations(3))
