"""What a region proposes as the commit record, and when: decided without threads or a store."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from regions.made_records import commit_of, knows_jobs

from lowcomm_jax.rounds import round, two_shot_exchange
from lowcomm_jax.rounds.agreed_round import AgreedRound
from lowcomm_jax.rounds.fetch import Fetch
from lowcomm_jax.rounds.request import Due, ExchangeRequest
from lowcomm_jax.rounds.two_shot_exchange import TwoShotExchange
from lowcomm_jax.store.commits import Announced, Job
from lowcomm_jax.store.errors import Lost
from lowcomm_jax.store.records import Announcement, Beat, Late, Payload
from lowcomm_jax.store.wait_list import WaitList

R, DEADLINE_S = 3, 10.0
REQUEST = ExchangeRequest("k", "1/k", tuple(range(R)), takes_part=True)


def payload(region):
    return Payload(f"digest {region}", 100)


def context(living):
    heartbeat = SimpleNamespace(
        clock_s=0.0, living=lambda certain: set(living), latest=dict, own=Beat(incarnation=1)
    )
    knows_jobs(heartbeat)
    commit_log = SimpleNamespace(
        confirmed=lambda name, jobs: {}, commit=lambda name, proposed: proposed
    )
    pace = SimpleNamespace(deadline_s=lambda nbytes, missed: DEADLINE_S * 2**missed)
    return SimpleNamespace(
        region=0,
        heal="stop",
        heartbeat=heartbeat,
        wait_list=WaitList(heartbeat),
        commit_log=commit_log,
        pace=pace,
    )


def exchange(around, request, awaited=range(R), due_s=0.0):
    """An exchange of region 0, for which the loop waits since then; None = it computes."""
    request = dataclasses.replace(request, awaited=lambda region: region in awaited)
    return AgreedRound(around, request, due=Due(due_s))


def at_proposal(living, held):
    """An exchange of region 0 that has all payloads, and has confirmed them; (it, its context)."""
    around = context(living)
    one = exchange(around, REQUEST)
    for region in range(R):
        one.announcements[region] = Announced(1, payload(region), {})
        one.fetches[region] = SimpleNamespace(complete=True)
    one._held = {by: {r: payload(r).content for r in regions} for by, regions in held.items()}
    return one, around


def test_the_dead_are_not_present():
    """Region 2 died before region 1 had its payload: it averages nothing, and must not be asked."""
    one, _ = at_proposal(living={0, 1}, held={0: [0, 1, 2], 1: [0, 1]})
    commit = one.propose()
    assert sorted(commit.admitted) == [0, 1] and tuple(commit.present) == (0, 1)


def test_who_announced_and_lives_is_present_without_a_payload():
    one, _ = at_proposal(living={0, 1, 2}, held={0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]})
    one.announcements[2] = Announced(1, None, {})
    commit = one.propose()
    assert sorted(commit.admitted) == [0, 1] and tuple(commit.present) == (0, 1, 2)


def test_a_confirmation_is_waited_for_twice_as_long_as_a_payload():
    """The other region may wait a deadline itself before it confirms."""
    one, around = at_proposal(living={0, 1, 2}, held={0: [0, 1, 2], 1: [0, 1, 2]})
    around.heartbeat.clock_s = 1.9 * DEADLINE_S
    assert one.propose() is None
    around.heartbeat.clock_s = 2.0 * DEADLINE_S
    assert sorted(one.propose().admitted) == [0, 1, 2]


@pytest.mark.parametrize(
    ("beat", "owes"),
    [
        (Beat(incarnation=4), True),
        (Beat(incarnation=5), False),  # another job: what it was to average is gone
        (Beat(incarnation=4, wants=True), False),
        (None, False),
    ],
)
def test_averages_are_owed_by_the_job_that_announced(beat, owes):
    around = context(living={0, 1, 2})
    around.heartbeat.latest = lambda: {} if beat is None else {1: beat}
    reduction = SimpleNamespace(parts=R, like={}, rest={})
    request = ExchangeRequest("k", "1/k", tuple(range(R)), reduction=reduction)
    one = TwoShotExchange(around, request)
    everyone = commit_of({r: payload(r) for r in range(R)}, {}, 0, range(R), job=4)
    assert one._owes_averages(everyone)(1) is owes, "also where its announcement was not read here"
    assert not one._owes_averages(commit_of({}, {}, 0, (0, 2), job=4))(1)


def test_terms_of_the_dead_whose_payload_is_here_count():
    """Others may hold it. Terms of the dead whose payload is not here do not."""
    one, _ = at_proposal(living={0, 1}, held={0: [0, 1, 2], 1: [0, 1, 2]})
    one.announcements[3] = Announced(1, payload(3), {})
    commit = one.propose()
    assert set(commit.terms) == {0, 1, 2} and sorted(commit.admitted) == [0, 1, 2]
    assert tuple(commit.present) == (0, 1, 2) and commit.writer == 0


def test_who_has_other_terms_is_no_part_of_the_record_but_named_in_it():
    one, around = at_proposal(living={0, 1, 2}, held={by: [0, 1, 2] for by in range(3)})
    around.heal = "majority"
    for region in range(3):
        terms = {"step": 4 + (region == 2)}
        one.announcements[region] = Announced(1, payload(region), terms)
    commit = one.propose()
    assert sorted(commit.admitted) == [0, 1] and tuple(commit.present) == (0, 1)
    assert commit.terms == {0: {"step": 4}, 1: {"step": 4}, 2: {"step": 5}}


def test_confirmations_are_read_and_not_awaited_of_the_dead_or_replaced():
    one, around = at_proposal(living={0, 1}, held={0: [0, 1, 2]})
    confirmed = {1: {0: payload(0).content, 1: payload(1).content}}
    around.commit_log.confirmed = lambda name, jobs: confirmed
    commit = one.propose()  # at once: 2 is dead
    assert sorted(commit.admitted) == [0, 1], "region 1 does not hold that of 2"
    assert one._held.keys() == {0, 1}
    one, around = at_proposal(living={0, 1, 2}, held={0: [0, 1, 2], 1: [0, 1, 2]})
    around.heartbeat.latest = lambda: {2: Beat(incarnation=2)}
    assert sorted(one.propose().admitted) == [0, 1, 2]


def test_a_payload_that_only_we_lack_is_waited_for_while_the_others_live():
    held = {0: [0, 1], 1: [0, 1, 2], 2: [0, 1, 2]}
    # `held` of 0 is what it confirmed; as if it were not known to itself to lack anything.
    for living, at_once in (({0, 1, 2}, False), ({0}, True)):
        one, around = at_proposal(living, {**held, 0: [0, 1, 2]})
        one.fetches[2].complete = False
        around.heartbeat.clock_s = 1.9 * DEADLINE_S
        if at_once:
            assert sorted(one.propose().admitted) == [0, 1]
            continue
        assert one.propose() is None
        around.heartbeat.clock_s = 2.0 * DEADLINE_S
        assert sorted(one.propose().admitted) == [0, 1]


# -- what is waited for before a region confirms what it holds ----------------------------------


def waiting(awaited=(0, 1, 2), due_s=0.0, missed=0, **changes):
    """An exchange of region 0 that nobody else has announced to yet; (it, its context, notes).

    `missed`: exchanges that region 1 has missed before it has caught up.
    """
    around = context(living={0, 1, 2})
    notes = SimpleNamespace(late_s=[], confirmed=[])
    around.pace.announced = notes.late_s.append
    around.commit_log.announced = lambda name, jobs: {}

    def confirm(name, job, held):
        notes.confirmed.append((job.region, held))
        return held

    around.commit_log.confirm = confirm
    around.timing = SimpleNamespace(beat_s=1.0)
    request = dataclasses.replace(REQUEST, **changes)
    one = exchange(around, request, awaited, due_s)
    one.announcements[0] = Announced(1, payload(0), {})
    if missed:
        around.wait_list.late = {1: Late(4, missed)}
        around.heartbeat.latest = lambda: {1: Beat(1, step=5)}
    return one, around, notes


def confirms(one):
    """Whether a region that looks waits for nobody any longer, and has confirmed what it holds."""
    one.hear()
    return one._stops_waiting()


def proposed(one):
    """The record that a region writes once it has looked."""
    one.hear()
    return one.propose()


def arrive(one, around, region, here=True):
    """A region has announced, and its payload is here."""
    one.fetches[region] = SimpleNamespace(
        job=Job(region, 1), complete=here, hopeless=False, missing_s=None, payload=payload(region)
    )
    said = Announced(1, payload(region), {})
    around.commit_log.announced = lambda name, jobs: {region: said} if region in jobs else {}
    one._fetch = lambda *_: None


def assert_has_the_usual_time_once_it_announces(one, around):
    """Region 1, which a longer wait is about to end for."""
    assert not confirms(one)
    arrive(one, around, 1, here=False)
    assert not confirms(one)
    around.heartbeat.clock_s += DEADLINE_S - 1.0
    assert not confirms(one)
    around.heartbeat.clock_s += 1.0
    assert confirms(one)


def test_a_region_confirms_once_all_that_are_awaited_are_here():
    one, around, notes = waiting(awaited=(0, 1))
    assert not confirms(one) and one._silent == [1]
    around.heartbeat.clock_s = 3.0
    arrive(one, around, 1, here=False)
    assert not confirms(one) and one._held is None
    around.heartbeat.clock_s = 4.0
    one.fetches[1].complete = True
    assert confirms(one) and not one._silent
    held = {0: payload(0).content, 1: payload(1).content}
    assert notes.confirmed == [(0, held)] and one._held == {0: held}
    assert notes.late_s == [3.0], "how late the last announcement was"
    assert one._waited_s == 0.0, "the next wait begins"


def test_the_others_have_their_time_from_the_own_announcement_on():
    """What this region computes and sends before that takes nothing of it."""
    one, around, _ = waiting(takes_part=False)
    said = []

    def takes(seconds):
        around.heartbeat.clock_s += seconds

    around.fault_hooks = SimpleNamespace(begins=lambda *_: takes(7.0))
    around.commit_log.committed = lambda name: takes(2.0)
    around.commit_log.announce = lambda *given: said.append(given) or Announced(1, None, {})
    one._offer({})
    assert one.advance()
    assert said == [("1/k", Job(0, 1), Announcement(None, {}))]
    assert one.announcements == {0: Announced(1, None, {})}
    assert around.heartbeat.clock_s == 9.0 and one._waited_s == 0.0


def test_a_deadline_ends_the_wait_and_is_noted_as_lateness():
    one, around, notes = waiting()
    around.heartbeat.clock_s = DEADLINE_S - 0.5
    assert not confirms(one)
    around.heartbeat.clock_s = DEADLINE_S
    assert confirms(one) and one._silent == [1, 2] and notes.late_s == [DEADLINE_S]


def test_a_deadline_begins_when_the_loop_waits():
    """What the others bring while it still computes keeps nobody from training."""
    one, around, notes = waiting(awaited=(0, 1), due_s=None)
    around.heartbeat.clock_s = 5 * DEADLINE_S
    assert not confirms(one) and one._waited_s == 0.0
    one.due.begin(around.heartbeat.clock_s)
    around.heartbeat.clock_s = 6 * DEADLINE_S - 0.5
    one.due.begin(around.heartbeat.clock_s)  # it waits already
    assert not confirms(one) and one._waited_s == DEADLINE_S - 0.5
    around.heartbeat.clock_s = 6 * DEADLINE_S
    assert confirms(one) and notes.late_s == [6 * DEADLINE_S]
    one, around, notes = waiting(awaited=(0, 1), due_s=None)
    around.heartbeat.clock_s = 5 * DEADLINE_S
    arrive(one, around, 1)
    assert confirms(one) and one._waited_s == 0.0
    # An exchange that hides nothing will need that much.
    assert notes.late_s == [5 * DEADLINE_S]


def test_who_has_missed_exchanges_is_waited_for_longer():
    one, around, notes = waiting(awaited=(0, 1), missed=3)
    around.heartbeat.clock_s = 8 * DEADLINE_S - 0.5
    assert not confirms(one)
    around.heartbeat.clock_s = 8 * DEADLINE_S
    assert confirms(one) and not notes.late_s, "no usual wait, and in vain"
    one, around, notes = waiting(awaited=(0, 1), missed=3)
    around.heartbeat.clock_s = 5 * DEADLINE_S
    arrive(one, around, 1)
    assert confirms(one) and notes.late_s == [5 * DEADLINE_S], "a region that stays so slow"
    one, around, _ = waiting(awaited=(0, 1), teaches=False, missed=3)
    around.heartbeat.clock_s = DEADLINE_S
    assert confirms(one), "in the exchange that this one follows it was in time"
    one, around, _ = waiting(awaited=(0, 2), missed=3)
    around.heartbeat.clock_s = DEADLINE_S
    assert confirms(one), "it is not what this exchange waits for"


def test_who_has_missed_exchanges_and_announces_has_the_usual_time_from_then_on():
    one, around, _ = waiting(awaited=(0, 1), missed=3)
    around.heartbeat.clock_s = 8 * DEADLINE_S - 1.0
    assert_has_the_usual_time_once_it_announces(one, around)
    one, around, _ = waiting(missed=3)
    around.heartbeat.clock_s = 7 * DEADLINE_S
    arrive(one, around, 2)
    assert not confirms(one)
    around.heartbeat.clock_s = 8 * DEADLINE_S
    assert confirms(one), "another one's announcement gives it no more time"
    one, around, _ = waiting(awaited=(0, 2), missed=3)
    around.heartbeat.clock_s = DEADLINE_S - 1.0
    assert not confirms(one)
    arrive(one, around, 1)
    assert not confirms(one)
    around.heartbeat.clock_s = DEADLINE_S
    assert confirms(one), "nor does that of one that nobody waited for"


@pytest.mark.parametrize(
    ("awaited", "passed", "expected"),
    [
        ((0, 1, 2), False, {1: Late(9, 3), 2: Late(9, 1)}),
        ((0, 2), False, {1: Late(4, 2), 2: Late(9, 1)}),
        ((0,), False, {1: Late(4, 2)}),
        ((0, 1), True, {1: Late(9, 3)}),
    ],
)
def test_a_record_says_who_is_late(awaited, passed, expected):
    """Region 1 has been late before; who announces nothing stays late, waited for or not."""
    one, around, _ = waiting(awaited=awaited, missed=2)
    around.heartbeat.own = Beat(1, step=9)
    around.heartbeat.clock_s = 8 * DEADLINE_S
    one._passed_over = lambda waiting: passed
    assert proposed(one).late == expected
    one, around, _ = waiting(awaited=(0, 1), missed=2)
    arrive(one, around, 1)
    held = {r: f"digest {r}" for r in (0, 1)}
    around.commit_log.confirmed = lambda name, jobs: {job.region: held for job in jobs}
    assert proposed(one).late == {}, "it has announced"
    one, around, _ = waiting(awaited=(0,), teaches=False, missed=2)
    assert proposed(one).late == {}, "the exchange that this one follows says it"


@pytest.mark.parametrize("changes", [{"teaches": False}, {"patience_s": 5.0}])
def test_waits_that_are_no_usual_ones_teach_nothing(changes):
    one, _, notes = waiting(awaited=(), **changes)
    assert confirms(one) and not notes.late_s


def test_an_earlier_jobs_payload_is_not_confirmed():
    one, _, notes = waiting(awaited=())
    one.announcements[0] = Announced(7, payload(0), {})
    one.fetches[0] = fetched(0, hopeless=True)
    assert confirms(one) and not notes.confirmed and one._held == {0: {}}


def test_patience_is_for_those_who_still_compute():
    """For a payload that was announced the usual time is enough, from then on."""
    one, around, _ = waiting(awaited=(0, 1), patience_s=30.0)
    around.heartbeat.clock_s = DEADLINE_S + 29.0
    assert_has_the_usual_time_once_it_announces(one, around)
    one, around, _ = waiting(awaited=(0, 1), patience_s=30.0)
    around.heartbeat.clock_s = DEADLINE_S + 30.0
    assert confirms(one)


def test_the_deadline_is_for_the_bytes_that_this_region_gets():
    one, around, _ = waiting()
    sizes = []
    around.pace.deadline_s = lambda nbytes, missed: sizes.append(nbytes) or 100.0
    slices = tuple(Payload(f"{s}", 10 + s) for s in range(R))
    one.announcements = {
        0: Announced(1, Payload("a", 100, slices), {}),
        1: Announced(1, Payload("b", 200, (None, *slices[1:])), {}),
        2: Announced(1, None, {}),
    }
    assert not one._waited_enough([1]) and sizes == [100 + 10 + 200]
    around.heartbeat.clock_s = 100.0
    assert one._waited_enough([1]) and not one._waited_enough([1], deadlines=2)
    assert not one._waited_enough([1], patience_s=0.5) and one._waited_enough([], deadlines=9)


@pytest.mark.parametrize(
    ("held", "passed"),
    [
        ({1: {0: "", 1: ""}}, True),
        ({1: {0: "", 1: "", 2: ""}}, False),
        ({}, False),
    ],
)
def test_whom_another_region_left_out_cannot_count_any_more(held, passed):
    one, around, _ = waiting()
    around.commit_log.confirmed = lambda name, jobs: held
    one.announcements[1] = Announced(1, payload(1), {})
    around.heartbeat.clock_s = 0.75
    assert not one._passed_over([2]), "asked once a heartbeat"
    around.heartbeat.clock_s = 1.0
    assert one._passed_over([2]) is passed
    assert not one._passed_over([2])
    around.heartbeat.clock_s = 2.0
    assert not one._passed_over([1, 2]), "region 1 has announced"
    assert one._passed_over([2]) is passed


# -- the round --------------------------------------------------------------------------------


def fetched(region, **state):
    state = {"complete": False, "hopeless": False, "missing_s": None, **state}
    return SimpleNamespace(job=Job(region, 1), region=region, payload=payload(region), **state)


@pytest.mark.parametrize(
    ("state", "living", "final"),
    [
        ({"complete": True}, {0, 1}, True),
        ({}, {0, 1}, False),
        ({"hopeless": True}, {0, 1}, True),
        ({"missing_s": 0.0}, {0, 1}, False),
        ({"missing_s": 0.0}, {0}, True),
        ({}, {0}, False),  # dead, and its bytes may still come from elsewhere
    ],
)
def test_when_waiting_for_a_payload_changes_nothing(state, living, final):
    one, around, _ = waiting()
    around.heartbeat.living = lambda certain: living
    one.announcements[1] = Announced(1, payload(1), {})
    one.fetches[1] = fetched(1, **state)
    assert one.is_final(1) is final
    assert one.has(1) is state.get("complete", False)
    one.announcements[1] = Announced(1, None, {})
    assert one.is_final(1)
    assert one.is_final(0) and one.has(0) and not one.has(2)


@pytest.mark.parametrize(
    ("missing_s", "incarnation", "asked"), [(0.0, 2, True), (0.0, 1, False), (None, 2, False)]
)
def test_a_job_in_the_place_of_one_whose_payload_is_gone_is_heard(missing_s, incarnation, asked):
    one, around, _ = waiting()
    one.announcements |= {r: Announced(1, payload(r), {}) for r in (1, 2)}
    one.fetches = {1: fetched(1, missing_s=missing_s), 2: fetched(2)}
    around.heartbeat.latest = lambda: {1: Beat(incarnation)}
    asks, new = [], Announced(2, Payload("new", 9), {})
    around.commit_log.announced = lambda name, jobs: asks.extend(jobs) or dict.fromkeys(jobs, new)
    begun = []
    one._fetch = lambda *given: begun.append(given)
    assert one.replaced(1) is (incarnation == 2)
    assert one.look() is asked and asks == [1] * asked
    assert begun == [(Job(1, 2), new.payload)] * asked
    assert not one.replaced(1) or not asked, "it is the job that announced now"


def test_what_was_published_is_known_by_its_digests():
    one, *_ = waiting()
    one.announcements[2] = Announced(1, None, {})
    one._begun.append(fetched(1))
    # The announcement of one that takes no part is removed with the others.
    digests = {Job(0, 1): ["digest 0"], Job(1, 1): ["digest 1"], Job(2, 1): []}
    assert one.published == {"1/k": digests}


@pytest.mark.parametrize(
    ("changes", "ours", "slice_of"),
    [({}, True, 0), ({}, False, None), ({"joins": False}, True, None)],
)
def test_which_slice_is_fetched(monkeypatch, changes, ours, slice_of):
    """The one that this region reduces, unless another job was to reduce it."""
    reduction = SimpleNamespace(rest={"weight": ("float32", (1,))})
    one, *_ = waiting(reduction=reduction, **changes)
    given = []
    monkeypatch.setattr(round, "pieces", lambda *x: given.append(x) or ["piece"])
    monkeypatch.setattr(round, "Fetch", lambda *x: SimpleNamespace(cancelled=[], given=x))
    before = SimpleNamespace(cancel=lambda: given.append("cancelled"))
    one.fetches[1] = before
    one.reduces &= ours
    one._fetch(Job(1, 1), payload(1))
    request = one.request
    assert given == ["cancelled", (request, 1, payload(1), slice_of)]
    assert one.fetches[1].given[1:] == (Job(1, 1), ["piece"], one.news)


def complete(one, commit):
    """The arrays of a record that is found."""
    one._fetch_all(commit)
    one.commit = commit
    return one.arrays_of(commit)


def test_a_record_that_we_find_is_completed_from_what_is_here():
    one, around, _ = waiting()
    around.timing = SimpleNamespace(answer_s=5.0)
    one.host_payload = SimpleNamespace(rest={"x": 0})
    begun, looked = [], []
    arrays = {r: fetched(r, got=[{"x": r}], refused=None) for r in (1, 2)}
    for each in arrays.values():
        each._context, each._pieces = around, [SimpleNamespace(key="k")]
        each.arrived = functools.partial(Fetch.arrived, each)
    one.fetches = {1: arrays[1]}
    one.look = lambda: looked.append(one.reduces)

    def fetch(job, wanted):
        begun.append((job, wanted, one.reduces))
        arrays[job.region].job = job
        one.fetches[job.region] = arrays[job.region]

    one._fetch = fetch
    commit = commit_of({r: payload(r) for r in range(3)}, {}, 1, (1, 2))
    assert complete(one, commit) == {0: {"x": 0}, 1: {"x": 1}, 2: {"x": 2}}
    assert begun == [(Job(2, 1), payload(2), False)] and not looked, "it announced: it has looked"
    one.announcements.clear()
    other = commit_of({1: payload(1)}, {}, 1, (0, 1), job=2)
    other.present[0] = 1
    complete(one, other)
    assert begun[1:] == [(Job(1, 2), payload(1), True)] and looked == [True], "another job's"
    arrays[1].got = []
    assert one.arrays_of(other) is None
    arrays[1].missing_s = 10.5
    with pytest.raises(Lost, match="payload of region 1 for 'k' is agreed on"):
        complete(one, other)


@pytest.mark.parametrize(("job", "fetched_anew"), [(1, False), (9, True)])
def test_equal_bytes_of_the_job_before_are_fetched_and_not_taken_for_ours(job, fetched_anew):
    """Its payload had the same digest; whose it is the record says."""
    one, around, _ = waiting()
    around.timing = SimpleNamespace(answer_s=5.0)
    one.host_payload = SimpleNamespace(rest={"x": 0})
    begun = []

    def fetch(whose, wanted):
        begun.append((whose, one.reduces))
        there = SimpleNamespace(job=whose, payload=wanted, got=[{"x": 9}], arrived=lambda: True)
        one.fetches[whose.region] = there

    one._fetch = fetch
    found = complete(one, commit_of({0: payload(0)}, {}, 1, (0,), job=job))
    assert found == ({0: {"x": 9}} if fetched_anew else {0: {"x": 0}})
    assert begun == ([(Job(0, 9), False)] if fetched_anew else [])


# -- the second exchange of slices ------------------------------------------------------------


class Sums:
    """Slices of one number each, which are added up."""

    parts, like, rest = R, {"x": ("float32", ())}, {"weight": ("float32", ())}

    def average_all(self, slices, rest):
        return {"x": np.zeros(R, np.float32) + sum(x["x"] for x in slices.values())}


def two_shot(joins=True, living=(0, 1, 2)):
    around = context(living)
    around.count = R
    request = dataclasses.replace(REQUEST, reduction=Sums(), joins=joins)
    one = TwoShotExchange(around, request)
    one.announcements[0] = Announced(1, payload(0), {})
    return one, around


@pytest.mark.parametrize(
    ("present", "joins", "ours"),
    [
        ((0, 1, 2), True, [0]),
        ((0, 1), True, [0, 2]),  # of a region that is not there: slice 2 % 2
        ((1, 2), True, []),
        ((0, 1, 2), False, []),
    ],
)
def test_whose_averages_a_region_makes_and_whose_it_takes(monkeypatch, present, joins, ours):
    one, _ = two_shot(joins)
    commit = commit_of({r: payload(r) for r in present}, {}, 1, present)
    owner = [s if s in present else present[s % len(present)] for s in range(R)]
    made, sent = [], {}

    def averages(commit, rest, numbers):
        made.append(numbers)
        return {f"{s}/x": np.float32(s) for s in numbers}

    def follow_up(suffix, awaited, **more):
        sent.update(more, suffix=suffix)
        arrays = {r: {} for r in present}
        for s, r in enumerate(owner):
            arrays[r][f"{s}/x"] = np.float32(10 + s)
        return commit, arrays

    monkeypatch.setattr(one, "_averages", averages)
    monkeypatch.setattr(one, "_follow_up", follow_up)
    found = one._exchange_averages(commit, {})
    assert made == [ours] and found["x"].tolist() == [10, 11, 12]
    assert sent["suffix"] == "averages" and sent["takes_part"] is bool(ours)
    assert sent["arrays"].keys() == {f"{s}/x" for s in ours}
    expected = {r: {} for r in range(R)}
    for s, r in enumerate(owner):
        expected[r][f"{s}/x"] = ("float32", ())
    assert sent["like"] == expected
    second = commit_of({present[0]: payload(0)}, {}, 1, present)
    monkeypatch.setattr(one, "_follow_up", lambda *_, **__: (second, {}))
    assert one._exchange_averages(commit, {}) is None, "one brought none"


def test_averages_are_waited_for_also_of_one_that_was_not_observed_for_long():
    """Whether it lives is not certain yet; one that is dead for certain owes nothing."""
    one, around = two_shot()
    around.heartbeat.latest = lambda: {1: Beat(incarnation=1), 2: Beat(incarnation=1)}
    around.heartbeat.living = lambda certain: {0} if certain else {0, 1}
    owes = one._owes_averages(commit_of({}, {}, 0, (0, 1, 2)))
    assert owes(1) and not owes(2)


def test_a_contribution_comes_from_whom_it_is_due(monkeypatch):
    """Ours from the host; of our own number those that came with the payloads; else fetched."""
    one, around = two_shot()
    begun = []

    def fetch(context, job, pieces, news):
        begun.append((job.region, pieces[0].payload))
        return SimpleNamespace(arrived=lambda: True, got=[{"x": np.float32(100 + job.region)}])

    monkeypatch.setattr(two_shot_exchange, "Fetch", fetch)
    around.store = SimpleNamespace(pauses=lambda: iter([0.0]))
    one.host_payload = SimpleNamespace(slices={"x": np.float32([5, 6, 7])})
    slices = {
        r: tuple(None if s == r else Payload(f"{r}{s}", 4) for s in range(R)) for r in range(R)
    }
    named = {r: Payload(f"digest {r}", 100, slices[r]) for r in range(R)}
    one.announcements[0] = Announced(1, named[0], {})
    here = [{}, {"x": np.float32(50)}]
    one.fetches = {
        1: SimpleNamespace(complete=True, got=here),
        2: SimpleNamespace(complete=False, got=here[:1]),
    }
    commit = commit_of(named, {}, 0, (0, 1, 2))
    assert one._contributions(commit, 0) == {0: {"x": 5}, 1: {"x": 50}, 2: {"x": 102}}
    assert begun == [(2, slices[2][0])]
    begun.clear()
    # Of region 2's number, which is away: what came with payload 1 is slice 0.
    assert one._contributions(commit, 2)[1] == {"x": 101} and one._contributions(commit, 2)[0] == {
        "x": 7
    }

    def gone():
        raise Lost("gone")

    monkeypatch.setattr(two_shot_exchange, "Fetch", lambda *_: SimpleNamespace(arrived=gone))
    assert one._averages(commit, {}, [0]) == {}


def test_who_was_late_in_the_first_exchange_is_late_when_whole_payloads_follow(monkeypatch):
    one, _ = two_shot()
    one.host_payload = SimpleNamespace(whole={})
    third = commit_of({}, {}, 1, (0, 1))
    monkeypatch.setattr(one, "_follow_up", lambda *_, **__: (third, {}))
    assert one._fall_back_to_whole(commit_of({}, {}, 0, (0, 1), {2: Late(4, 1)})) == {}
    assert one.commit == commit_of({}, {}, 1, (0, 1), {2: Late(4, 1)})
