"""What is still to be done after a step: acts follow from counters and payloads in flight alone."""

import numpy as np
import pytest
from leaving import counters_of, flight

from lowcomm_jax.schedule import Adaptive, Arrivals, Learners, Outage, Ranked, Staggered, Timed
from lowcomm_jax.schedule.base import Adopt, Copy, Move, Send, View

R = 3
EVERYONE, NOBODY = np.ones(R, bool), np.zeros(R, bool)


def view(schedule, flights=(), last_sent=None, sends=None, **marks):
    counters = counters_of(schedule, R)
    if last_sent is not None:
        counters.last_sent[:] = last_sent
    if sends is not None:
        counters.sends[:] = sends
    return View(counters, list(flights), R, **marks)


def shown(stage):
    """The acts with masks as lists."""
    return [
        tuple(x.tolist() if isinstance(x, np.ndarray) else x for x in (type(act), *act))
        for act in stage
    ]


def test_a_step_lands_what_is_due_then_sends_then_lands_what_has_no_delay():
    schedule = Staggered(4, 2, delay=2)
    old = flight(0, 2, 4, EVERYONE)
    late = view(schedule, [("0@2", old)], last_sent=[2, -1])
    assert shown(schedule.acts(4, late)) == [
        (Move, "0@2", None, True),
        (Adopt, 0, "0@2", [True] * R, [False] * R, None),
    ]
    assert schedule.acts(3, late) == ()
    landed = view(schedule, last_sent=[2, -1])
    assert schedule.acts(4, landed) == (Send((1,)),)
    fresh = flight(1, 4, 6, EVERYONE)
    assert schedule.acts(4, view(schedule, [("1@4", fresh)], last_sent=[2, 4])) == ()
    at_once = flight(1, 4, 4, EVERYONE)
    after = schedule.acts(4, view(schedule, [("1@4", at_once)], last_sent=[2, 4]))
    assert [type(act) for act in after] == [Move, Adopt]


def test_a_fragment_in_flight_is_not_sent_again_and_no_send_is_done_twice():
    schedule = Staggered(4)
    flying = ("0@4", flight(0, 4, 9, EVERYONE))
    assert schedule.acts(8, view(schedule, [flying], last_sent=[4])) == ()
    assert schedule.acts(8, view(schedule, last_sent=[4])) == (Send((0,)),)
    assert schedule.acts(8, view(schedule, last_sent=[8])) == ()


def test_with_a_delay_for_each_region_the_anchor_moves_once_and_the_rest_waits():
    schedule = Staggered(6, delay=(0, 1, 3))
    due = [6, 7, 9]
    first = flight(0, 6, due, EVERYONE)
    move, adopt = schedule.acts(6, view(schedule, [("k", first)], last_sent=[6]))
    assert move == Move("k") and adopt.regions.tolist() == [True, False, False]
    assert adopt.later.tolist() == [False, True, True]
    left = flight(0, 6, due, [False, True, True], moved=True)
    (adopt,) = schedule.acts(7, view(schedule, [("k", left)], last_sent=[6]))
    assert adopt.regions.tolist() == [False, True, False]
    assert schedule.acts(8, view(schedule, [("k", flight(0, 6, due, [0, 0, 1], True))], [6])) == ()


def test_a_payload_without_regions_here_still_moves_the_anchor():
    schedule = Staggered(4, delay=2)
    absent = flight(0, 4, 6, NOBODY)
    assert shown(schedule.acts(6, view(schedule, [("k", absent)], last_sent=[4]))) == [
        (Move, "k", None, True),
        (Adopt, 0, "k", [False] * R, [False] * R, None),
    ]


def one_period(first_round="empty"):
    return Staggered(4, delay=4, land_after_send=True, first_round=first_round)


def test_a_one_period_boundary_sends_first_and_lands_the_round_before():
    schedule, some = one_period(), np.array([True, False, True])
    late, fresh = ("0@4", flight(0, 4, 8, EVERYONE)), ("0@8", flight(0, 8, 12, some))
    assert schedule.acts(8, view(schedule, [late], last_sent=[4], sends=[1])) == (Send((0,)),)
    crossing = schedule.acts(8, view(schedule, [late, fresh], last_sent=[8], sends=[2]))
    assert shown(crossing) == [
        (Move, "0@4", "0@8", True),
        (Adopt, 0, "0@4", some.tolist(), None, "0@8"),
    ]
    crossed = view(schedule, [fresh], last_sent=[8], sends=[2], crossed=True)
    assert (
        schedule.acts(8, crossed) == () and schedule.acts(9, crossed._replace(crossed=False)) == ()
    )
    nobody = ("0@8", flight(0, 8, 12, NOBODY))
    absent = view(schedule, [late, nobody], last_sent=[8], sends=[2])
    assert shown(schedule.acts(8, absent)) == [
        (Move, "0@4", "0@8", True),
        (Adopt, 0, "0@4", [False] * R, None, "0@8"),
    ]


@pytest.mark.parametrize("first_round", ["empty", "blocking"])
def test_the_first_boundary_lands_nothing_or_what_was_just_sent(first_round):
    schedule = one_period(first_round)
    fresh = view(schedule, [("0@4", flight(0, 4, 8, EVERYONE))], last_sent=[4], sends=[1])
    move, adopt = schedule.acts(4, fresh)
    key = "0@4" if first_round == "blocking" else None
    assert (move.key, adopt.key) == (key, key) and adopt.regions.all()
    assert move.fresh == adopt.fresh == (None if key else "0@4")
    assert move.applied == (key is None)  # no own part was applied before


def test_rounds_of_a_measured_length_end_at_their_boundary():
    schedule = Ranked(6, ranks=(4, 2), delay=6, land_after_send=True)
    assert schedule.acts(5, view(schedule)) == () and schedule.acts(6, view(schedule)) == (
        Send((0,)),
    )
    # Sent six steps ago, or two: what lands at a boundary is the payload of the one before.
    given = view(schedule, [("0@4", flight(0, 4, 10, EVERYONE))], last_sent=[4], sends=[1])
    assert schedule.acts(6, given) == (Send((0,)),)


def test_one_of_the_fragments_that_are_ready_leaves_in_a_slot():
    schedule = Adaptive(6, 3, 3, 4)
    busy = [("1@2", flight(1, 2, 6, EVERYONE))]
    (act,) = schedule.acts(4, view(schedule, busy, last_sent=[-1, 2, -1]))
    assert act.fragments == (0, 2) and act.leaves(None) == 0
    (act,) = schedule.acts(10, view(schedule, last_sent=[8, 5, 4]))
    assert act.fragments == (2, 1, 0), "overdue since tick 10; the others by their rates"
    (act,) = schedule.acts(10, view(schedule, [("2@4", flight(2, 4, 14, EVERYONE))], [8, 5, 4]))
    assert act.fragments == (1, 0) and act.leaves(lambda: [3.0, 2.0, 9.0]) == 0
    assert act.leaves(lambda: [2.0, 2.0, 9.0]) == 1, "sent longest ago"
    assert schedule.acts(4, view(schedule, busy, last_sent=[4, 2, -1])) == ()
    assert schedule.acts(5, view(schedule, busy, last_sent=[-1, 2, -1])) == ()


def test_arrivals_name_the_regions_that_arrive():
    schedule = Arrivals(4, (1.0, 1.0, 0.5), dynamic=False)
    (act,) = schedule.acts(4, view(schedule))
    assert act.fragments == (0,) and act.admitted.tolist() == [True, True, False]
    (act,) = schedule.acts(8, view(schedule, last_sent=[4]))
    assert act.admitted.tolist() == [True] * R
    assert schedule.acts(5, view(schedule)) == ()


def test_learners_that_are_down_adopt_nothing_and_copy_a_peer_when_they_come_back():
    schedule = Learners(4, 1, 2, outages=(Outage(1, 3, 6),))
    (send,) = schedule.acts(4, view(schedule))
    assert send.admitted.tolist() == [True, False, True] and send.lands == 6
    flying = view(schedule, [("0@4", flight(0, 4, 6, EVERYONE))], last_sent=[4])
    move, adopt = schedule.acts(6, flying)
    assert move.key == "0@4" and adopt.regions.tolist() == [True, False, True]
    assert not adopt.later.any()
    assert schedule.acts(6, view(schedule, last_sent=[4])) == (Copy(1, 0),)
    copied = view(schedule, last_sent=[4])
    copied.counters.last_landed[:, 1] = 6
    assert schedule.acts(6, copied) == ()
    last = schedule.at_the_end(5, 0, copied.counters)
    assert last.admitted.tolist() == [True, False, True] and last.lands == 5


def test_rounds_of_a_time_are_sent_by_those_who_have_made_a_step():
    """Speeds 1, 1/2 and 1/10: in rounds of 4 ticks 4, 2 and 0.4 steps."""
    schedule = Timed(4, (2.0, 1.0, 0.2))
    made = [schedule.pace.active(t, R).tolist() for t in range(1, 11)]
    assert np.sum(made, axis=0).tolist() == [10, 5, 1]
    counters = counters_of(schedule, R)
    assert [len(schedule.due(t, counters)) for t in range(1, 9)] == [0, 0, 0, 1] * 2
    (send,) = schedule.acts(4, view(schedule))
    assert send.fragments == (0,) and send.admitted.tolist() == [True, True, False]
    assert send.lands is None
    later = view(schedule, last_sent=[8])
    later.counters.last_landed[:] = [[8, 8, -1]]
    (send,) = schedule.acts(12, later)
    assert send.admitted.all(), "the slowest has made its first step at tick 10"
    assert schedule.at_the_end(9, 0, later.counters).admitted.tolist() == [True, False, False]
    assert schedule.acts(13, later) == ()
