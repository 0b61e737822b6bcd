"""When a round closes, for whom, and what a learner has observed: without threads or a store."""

import logging
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from regions.made_records import commit_of, knows_jobs

from lowcomm_jax.rounds import round
from lowcomm_jax.rounds.fetch import Fetch
from lowcomm_jax.rounds.paced_rounds import RoundExchange, RoundTimes
from lowcomm_jax.rounds.payloads import HostPayload
from lowcomm_jax.schedule import Admission
from lowcomm_jax.store.commits import Announced, Job
from lowcomm_jax.store.errors import Lost, Parted, Rejected, StoreUnavailable
from lowcomm_jax.store.records import Admitted, Payload

R, OVERLAP = 4, 3
LIKE = {"x": jax.ShapeDtypeStruct((1, 1), np.float32)}


# -- times ------------------------------------------------------------------------------------


def test_times_are_averages_that_forget():
    times = RoundTimes()
    times.note("step_s", 4.0)
    assert times.step_s == 4.0 and times.quorum_s is None
    times.note("step_s", 14.0)
    assert times.step_s == pytest.approx(0.9 * 4.0 + 0.1 * 14.0)


def test_slack_is_what_an_overlap_leaves_beside_an_exchange():
    assert RoundTimes().slack_s(5) == 0.0
    assert RoundTimes(step_s=2.0).slack_s(5) == 10.0
    assert RoundTimes(step_s=2.0, quorum_s=3.0, sync_s=1.5).slack_s(5) == 10.0 - 3.0 - 1.5


@pytest.mark.parametrize(
    ("times", "grace", "window_s"),
    [
        (RoundTimes(2.0, 3.0, 1.0), 0.5, 0.5 * (OVERLAP * 2.0 - 4.0)),
        (RoundTimes(2.0, 3.0, 1.0), 0.0, 0.0),
        (RoundTimes(1.0, 3.0, 1.0), 0.5, 0.0),  # the exchange takes longer than the overlap
        (RoundTimes(), 0.5, math.inf),  # how long a step takes is not known yet
        (RoundTimes(), 0.0, 0.0),
    ],
)
def test_the_window_is_a_share_of_the_slack(times, grace, window_s):
    assert times.window_s(grace, OVERLAP) == window_s


# -- closing ----------------------------------------------------------------------------------


class Now:
    """A clock that is set by hand."""

    s = 100.0

    def __call__(self):
        return self.s


class Log:
    """Records by name, and what is announced."""

    def __init__(self):
        self.records, self.said = {}, {}

    def committed(self, name):
        return self.records.get(name)

    def commit(self, name, commit):
        return self.records.setdefault(name, commit)

    def announced(self, name, jobs):
        return {r: self.said[name, r] for r in jobs if (name, r) in self.said}


@pytest.fixture
def learner(monkeypatch):
    """`learner(quorum, grace, ...)`: region 0 of four, whose fetches are complete when told so."""

    def make(
        quorum=2,
        grace=0.0,
        heal="stop",
        living=range(R),
        awaited=range(R),
        first=0,
        most=R,
        like_K=(LIKE, LIKE),
    ):
        monkeypatch.setattr(round, "Fetch", Fetched)
        heartbeat = SimpleNamespace(
            own=SimpleNamespace(epoch=1, incarnation=1),
            living=lambda certain=True: set(living),
            check=lambda: None,
        )
        knows_jobs(heartbeat)
        log = Log()
        context = SimpleNamespace(
            region=0,
            count=R,
            heal=heal,
            heartbeat=heartbeat,
            commit_log=log,
            timing=SimpleNamespace(answer_s=5.0),
            wait_list=SimpleNamespace(awaited=lambda region: region in set(awaited)),
            background=SimpleNamespace(begin=lambda *given: None),
        )
        gc = SimpleNamespace(calls=[], sweeps=0)
        gc.begin = lambda key: gc.calls.append(("begin", key))
        gc.done = lambda key, published, at_once=True: gc.calls.append(
            ("done", key, published, at_once)
        )

        gc.dropped = lambda published: gc.calls.append(("dropped", published))

        def sweep():
            gc.sweeps += 1

        gc.sweep = sweep
        now = Now()
        one = RoundExchange(Admission(quorum, grace), most, OVERLAP, like_K, first, now)
        one.begin(context, gc)
        return SimpleNamespace(one=one, now=now, log=log, gc=gc, heartbeat=heartbeat)

    return make


class Fetched:
    """A fetch whose end the test sets."""

    def __init__(self, context, job, pieces, news):
        self._context, self.job, self._pieces, self.got = context, job, pieces, []
        self.region, self.moved = job.region, (0, 0.0)
        self.complete = self.hopeless = self.cancelled = False
        self.refused = self.missing_s = None

    @property
    def payload(self):
        return self._pieces[0].payload

    arrived = Fetch.arrived

    def cancel(self):
        self.cancelled = True


def payload(region, job=1):
    return Payload(f"{region}.{job}", 8)


def advance(made):
    """Hear, and agree; whether there is anything new."""
    heard = made.one._hear()
    return made.one._agree() or heard


def says(made, number, *regions, terms=None, job=1, here=True):
    """These regions announce, and their payloads are here at once."""
    name = f"1/round{number}"
    for region in regions:
        said = Announced(job, payload(region, job), terms or {})
        if region == 0:
            round = made.one._round(number)
            round.host_payload = HostPayload({}, {"x": np.float32([0.0])}, {})
            round.announcements[0] = said
        else:
            made.log.said[name, region] = said
    made.one._hear()
    for region in set(regions) - {0}:
        fetch = made.one._round(number).fetches[region]
        fetch.complete, fetch.got = here, [{"x": np.float32([region])}]


def closed(made, number=0):
    """Who was admitted to a round after a look; None = it is open."""
    advance(made)
    record = made.log.records.get(f"1/round{number}")
    return None if record is None else sorted(record.admitted)


def test_a_round_closes_with_its_quorum_and_with_all_whose_payloads_are_here(learner):
    made = learner(quorum=2)
    says(made, 0, 1)
    assert closed(made) is None
    says(made, 0, 2, here=False)  # announced, and not here yet
    assert closed(made) is None
    made.one._rounds[0].fetches[2].complete = True
    says(made, 0, 0)
    assert closed(made) == [0, 1, 2]
    record = made.log.records["1/round0"]
    assert (
        tuple(record.present) == (0, 1, 2) and record.writer == 0 and set(record.terms) == {0, 1, 2}
    )
    assert (made.one.committed, made.one.newest) == (1, 0)


def test_what_is_fetched_has_the_shapes_of_the_rounds_fragment(learner):
    made = learner(like_K=[LIKE, {"x": jax.ShapeDtypeStruct((1, 2, 5), np.float32)}])
    for number in range(3):
        says(made, number, 1)
    shapes = [made.one._rounds[n].fetches[1]._pieces[0].like for n in range(3)]
    assert [found["x"][1] for found in shapes] == [(1,), (2, 5), (1,)]


def test_what_one_job_has_sent_is_not_what_the_job_after_it_announced(learner):
    made = learner()
    says(made, 0, 0, 1)
    found = made.one._rounds[0]
    for region, x in ((0, 0.0), (1, 1.0)):
        same = commit_of({region: payload(region)}, {}, 1, (region,))
        assert found.arrays_of(same)[region]["x"] == x
        assert found.arrays_of(commit_of({region: payload(region)}, {}, 1, (), job=2)) is None


@pytest.mark.parametrize(("job", "ours"), [(1, True), (2, False)])
def test_a_record_that_names_equal_bytes_of_the_job_before_names_not_ours(learner, job, ours):
    """An arrival that adopted so would drop what it has reported itself."""
    made = learner(quorum=2)
    says(made, 0, 0)
    made.log.records["1/round0"] = commit_of({0: payload(0)}, {}, 1, (0,), job=job)
    advance(made)
    for fetch in made.one._round(0).fetches.values():
        fetch.got = [{"x": np.float32([0.0])}]
    assert made.one.names_ours(0) is ours


def test_of_those_that_are_here_the_first_that_reported_is_admitted(learner):
    made = learner(quorum=1, most=1)
    says(made, 0, 2, here=False)
    says(made, 0, 3)
    says(made, 0, 1)
    assert closed(made) == [3] and made.one.names_ours(0) is False


def test_of_terms_that_differ_those_that_hold_count_for_the_quorum(learner):
    made = learner(quorum=3, heal="majority")
    says(made, 0, 1, 2, terms={"step": 4})
    says(made, 0, 3, terms={"step": 5})
    assert closed(made) is None, "two agree, of a quorum of three"
    says(made, 0, 0, terms={"step": 4})
    assert closed(made) == [0, 1, 2]


def test_the_window_is_for_those_who_may_still_come(learner):
    """It begins when the quorum is there, not when the round opens."""
    made = learner(quorum=2, grace=0.5)
    made.one.times = RoundTimes(10.0, None, 2.0)
    says(made, 0, 0)
    assert closed(made) is None
    made.now.s += 6.0
    says(made, 0, 1)
    assert closed(made) is None and made.one.times.quorum_s == 6.0
    made.now.s += 0.5 * (OVERLAP * 10.0 - 2.0 - 6.0) - 0.25
    assert closed(made) is None
    made.now.s += 0.25
    assert closed(made) == [0, 1]
    assert made.one.times.quorum_s == 6.0, "noted once"


@pytest.mark.parametrize("case", ["nobody else is awaited", "hopeless", "all are here"])
def test_nobody_waits_for_who_cannot_come(learner, case):
    made = learner(2, 0.5, awaited=(0, 1) if case == "nobody else is awaited" else range(R))
    made.one.times = RoundTimes(10.0)
    says(made, 0, 0, 1)
    if case == "hopeless":
        assert closed(made) is None
        says(made, 0, 2, 3, here=False)
        made.one._rounds[0].fetches[2].hopeless = True
        assert closed(made) is None
        made.one._rounds[0].fetches[3].hopeless = True
    elif case == "all are here":
        says(made, 0, 2, 3)
    assert closed(made) == ([0, 1, 2, 3] if case == "all are here" else [0, 1])


def test_who_sits_out_is_no_part_of_a_round(learner):
    made = learner(quorum=1)
    made.log.said["1/round0", 1] = Announced(1, None, {})
    advance(made)
    assert closed(made) is None and not made.one._rounds[0].fetches


def test_a_record_that_stands_is_read_and_its_payloads_are_fetched(learner):
    """Of another job than the one that was heard of: that fetch is replaced."""
    made = learner(quorum=4)
    says(made, 0, 1, 2, here=False)
    before = dict(made.one._rounds[0].fetches)
    record = commit_of({1: payload(1, job=2), 2: payload(2)}, {}, 2, (1, 2))
    record.admitted[1] = Admitted(2, payload(1, job=2))
    made.log.records["1/round0"] = record
    assert advance(made)
    fetches = made.one._rounds[0].fetches
    assert before[1].cancelled and fetches[1].payload == payload(1, job=2)
    assert fetches[2] is before[2] and not before[2].cancelled
    assert fetches[1]._pieces[0].holders[0] == 1
    assert (made.one.committed, made.one.newest) == (1, 0)


def test_several_records_are_read_at_one_look(learner):
    made = learner(quorum=4)
    for number in range(3):
        made.log.records[f"1/round{number}"] = commit_of({1: payload(1)}, {}, 1, (1,))
    assert advance(made) and made.one.committed == 3 and made.one.newest == 2
    assert not advance(made)


def test_a_round_is_agreed_on_after_the_one_before_it(learner):
    """Its reports are heard meanwhile; no record of it can stand, so none is looked for."""
    made = learner(quorum=2)
    made.one.newest = 1
    says(made, 1, 1, 2)
    read, committed = [], made.log.committed
    made.log.committed = lambda name: read.append(name) or committed(name)
    assert closed(made, 1) is None and read == ["1/round0"]
    says(made, 0, 1)
    says(made, 0, 2)
    assert closed(made, 0) == [1, 2] and closed(made, 1) == [1, 2]


def test_who_was_enough_may_be_so_no_longer_once_another_one_is_here(learner):
    """While the record could not be written, as the store was away."""
    made = learner(quorum=2, heal="lowest")
    says(made, 0, 1, 2, terms={"step": 4})
    commit = made.log.commit

    def away(name, record):
        raise StoreUnavailable("away")

    made.log.commit = away
    with pytest.raises(StoreUnavailable):
        made.one.look()
    made.log.commit = commit
    says(made, 0, 0, terms={"step": 5})
    assert closed(made) is None, "the lowest region's terms hold, and nobody agrees with it"
    says(made, 0, 3, terms={"step": 5})
    assert closed(made) == [0, 3]


def test_a_quorum_that_cannot_be_is_told_once(learner, caplog):
    living = {0, 1, 2}
    made = learner(quorum=3, living=living)
    says(made, 0, 0)
    with caplog.at_level(logging.WARNING):
        closed(made)
        assert not caplog.records, "three live: they may come"
        living.discard(2)
        closed(made), closed(made)
        assert [r.getMessage() for r in caplog.records] == [
            "round 1/round0 has no quorum: 3 learners are needed, 2 live; training goes on, and "
            "rounds do when more are back"
        ]
        living.add(2)
        closed(made)
        living.discard(2)
        closed(made)
        assert len(caplog.records) == 2, "again, once more were back"


# -- what comes of it -------------------------------------------------------------------------


def test_a_round_is_taken_when_all_its_payloads_are_here(learner):
    made = learner(quorum=3)
    says(made, 0, 0, 1)
    made.now.s += 2.0
    says(made, 0, 2)
    assert made.one.names_ours(0) is None and closed(made) == [0, 1, 2]
    fetch = made.one._rounds[0].fetches[2]
    fetch.got, here = [], fetch.got
    assert made.one.names_ours(0) is None
    fetch.got = here
    made.now.s += 3.0
    assert made.one.names_ours(0)
    arrived = made.one.take(0, {})
    assert arrived.participants.tolist() == [True, True, True, False]
    np.testing.assert_array_equal(arrived.arrays["x"], [[0], [1], [2], [0]])
    assert arrived.seconds == 5.0 and made.one.names_ours(1) is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"missing_s": 10.5}, Lost),
        ({"missing_s": 10.0}, None),  # twice the time to answer, and no longer
        ({"refused": Rejected("not this")}, Rejected),
        ({"missing_s": 99.0, "job": Job(1, 7)}, None),
    ],
)
def test_a_payload_of_the_record_that_can_never_come(learner, change, error):
    made = learner(quorum=2)
    says(made, 0, 0, 1)
    assert closed(made) == [0, 1]
    fetch = made.one._rounds[0].fetches[1]
    vars(fetch).update(complete=False, got=[], **change)
    if error is None:
        assert made.one.names_ours(0) is None
    else:
        with pytest.raises(error):
            made.one.names_ours(0)


def test_terms_are_compared_with_those_of_the_record(learner):
    made = learner(quorum=2)
    says(made, 0, 0, 1, terms={"fragment": 1})
    closed(made)
    with pytest.raises(Parted, match="round 0"):
        made.one.take(0, {"fragment": 2})
    assert made.one.first == 0, "it has not landed"
    made.one.take(0, {"fragment": 1})
    assert made.one.first == 1


@pytest.mark.parametrize("announced", [True, False])
def test_what_has_landed_is_published_by_its_digests_and_its_fetches_end(learner, announced):
    """Also an own report that was not announced, as its record came first."""
    made = learner(quorum=2, first=5)
    says(made, 5, 1)
    if announced:
        says(made, 5, 0)
    else:
        made.one._round(5)._own = payload(0)
    fetches = made.one._round(5).fetches
    closed(made, 5)
    made.one._landed(5)
    assert made.one.first == 6 and 5 not in made.one._rounds and fetches[1].cancelled
    digests = {"1/round5": {Job(0, 1): ["0.1"], Job(1, 1): ["1.1"]}}
    assert made.gc.calls[-1] == ("done", "round5", digests, False)


def test_payloads_stay_for_who_has_rounds_to_land_however_far_behind(learner):
    assert learner().gc.for_all is True, "nobody takes a state in their place"


def test_payloads_are_swept_once_after_each_landing(learner):
    made = learner()
    made.one.look(), made.one.look()
    assert made.gc.sweeps == 0
    made.one._round(0)
    made.one._landed(0)
    made.one.look(), made.one.look()
    assert made.gc.sweeps == 1


def test_steps_and_reads_are_timed(learner, caplog):
    """An exchange is a payload's writing and another one's reading; the overlap is to hide it."""
    made = learner(quorum=4)
    one = made.one
    one.stepped()
    assert one.times.step_s is None
    made.now.s += 2.0
    one.stepped()
    assert one.times.step_s == 2.0
    says(made, 0, 1, 2, here=False)
    found = one._round(0)
    found.write_s = 1.5
    one._note_reads(found)
    assert one.times.sync_s is None, "nothing is here"
    vars(found.fetches[1]).update(complete=True, moved=(8, 4.0))
    with caplog.at_level(logging.WARNING):
        one._landed(0)
        assert one.times.sync_s == 5.5 and not caplog.records
        says(made, 1, 0, 1, here=False)
        later = one._round(1)
        vars(later.fetches[1]).update(complete=True, moved=(8, 64.0))
        later.write_s = 1.5
        one._landed(1)
        assert one.times.sync_s == pytest.approx(0.9 * 5.5 + 0.1 * 65.5)
        one._note_reads(later)
    (told,) = caplog.records
    assert "takes 11.5 s, but overlap=3 inner steps take 6 s" in told.getMessage()


def test_what_a_payload_took_is_noted_once_before_its_round_has_landed(learner):
    """Windows of the rounds that are open meanwhile need it; `go_on` lands none."""
    made = learner(quorum=2)
    one = made.one
    says(made, 0, 0, 1)
    says(made, 0, 2, here=False)
    found = one._round(0)
    found.write_s, found.fetches[1].moved = 1.5, (8, 4.0)
    assert one.times.sync_s is None
    one.look()
    assert one.committed == 1 and one.times.sync_s == 5.5
    one.look(), one.look()
    assert one.times.sync_s == 5.5
    vars(found.fetches[2]).update(complete=True, moved=(8, 14.0))  # it came after the record
    one.look()
    after = one.times.sync_s
    assert after == pytest.approx(0.9 * 5.5 + 0.1 * 15.5)
    one.look(), one._landed(0)
    assert one.times.sync_s == after


def test_after_another_exchange_has_made_up_for_rounds_they_are_forgotten(learner):
    made = learner()
    says(made, 0, 0, 1)
    made.one.report(1, {}, {}, 3)
    made.one.go_on(7)
    assert (made.one.first, made.one.committed, made.one.newest) == (7, 7, 6)
    assert not made.one._rounds and not made.one._reports
    ours, theirs = {Job(0, 1): ["0.1"]}, {Job(1, 1): ["1.1"]}
    assert ("dropped", {"1/round0": ours | theirs}) in made.gc.calls, "no exchange will name them"


def test_reports_are_looked_for_in_open_rounds_and_in_the_one_after(learner):
    made = learner(quorum=4)
    asked = []
    made.log.announced = lambda name, jobs: asked.extend((name, r) for r in jobs) or {}
    made.one.newest = 1
    assert not advance(made)
    assert asked == [(f"1/round{n}", r) for n in range(3) for r in (1, 2, 3)]
