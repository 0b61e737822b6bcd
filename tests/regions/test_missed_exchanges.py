"""Exchanges that this region missed: read at once, sat out at once, closed where nobody came."""

import itertools
import threading
from types import SimpleNamespace

import pytest
from regions.made_records import commit_of, knows_jobs
from regions.test_proposals import arrive, confirms, waiting

from lowcomm_jax.rounds import remote as remote_exchange
from lowcomm_jax.rounds.agreed_round import AgreedRound
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.commits import Announced, CommitLog, Job
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.records import Announcement, Beat, Commit, Late, Payload
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.timing import Pace, Timing
from lowcomm_jax.store.wait_list import WaitList

R, EPOCH = 3, 2
PAYLOAD = Payload("a" * 64, 8)
ABSENT = Announced(7, None, {})
OURS = Job(0, 7)


@pytest.fixture
def store(tmp_path):
    """A store in an empty folder."""
    return Store(f"file://{tmp_path}/meet", "run", MetricsCounter())


def remote(store, awaited=(0, 1, 2), living=(0, 1, 2)):
    """Region 0's exchange, which waits for these regions."""
    beats = {r: Beat(incarnation=1, epoch=EPOCH, awaited=r in awaited) for r in range(R)}
    heartbeat = SimpleNamespace(
        region=0,
        job=OURS,
        clock_s=0.0,
        own=Beat(incarnation=7, epoch=EPOCH),
        latest=lambda: beats,
        living=lambda certain=True: set(living),
        check=lambda: None,
    )
    knows_jobs(heartbeat, 0, 7)
    context = SimpleNamespace(
        region=0,
        wait_list=WaitList(heartbeat),
        count=R,
        heal="stop",
        store=store,
        commit_log=CommitLog(store, Slots(store, Seal("run", b"x" * 16))),
        heartbeat=heartbeat,
        pace=Pace(Timing()),
        closing=threading.Event(),
        halted=threading.Event(),
        transport=SimpleNamespace(name="store", lingers=False, get_ahead=lambda sizes: None),
    )
    one = RemoteExchange(0, R, "stop", lambda: context, 4)
    return one, context.commit_log


def announce(log, numbers, regions=(1, 2), payload=None, terms=None):
    for number in numbers:
        for region in regions:
            made = Announcement(payload, terms or {})
            log.announce(f"{EPOCH}/{number}", Job(region, 1), made)


def announced(log, number):
    """What this job has announced."""
    return log.announced(f"{EPOCH}/{number}", {0: [7]}).get(0)


def empty_of(*regions):
    """The record of an exchange in which nobody has a part."""
    present = {r: 7 if r == 0 else 1 for r in regions}
    return Commit({}, {r: {} for r in regions}, 0, present, {})


def records(log, numbers):
    return [log.committed(f"{EPOCH}/{number}") for number in numbers]


def test_a_region_sits_out_what_it_missed_and_keeps_what_it_has_announced(store):
    one, log = remote(store)
    log.announce(f"{EPOCH}/6", OURS, Announcement(PAYLOAD, {"step": 4}))
    assert one.fetch_ahead(5, 9, missed=3) == 0
    said = {n: announced(log, n) for n in range(4, 9)}
    assert said == {4: None, 5: ABSENT, 6: Announced(7, PAYLOAD, {"step": 4})} | {
        7: ABSENT,
        8: None,
    }
    assert records(log, range(5, 8)) == [None] * 3, "the others have not said anything"


def test_what_the_job_before_has_sent_is_found(store):
    one, log = remote(store)
    assert one.sent_before() == 0
    for name, region, incarnation, payload, step in (
        (f"{EPOCH}/3", 0, 6, PAYLOAD, 12),
        (f"{EPOCH}/1.4", 0, 5, PAYLOAD, 16),  # of a trainer
        (f"{EPOCH}/2", 0, 6, None, 8),
        (f"{EPOCH}/6", 0, 7, PAYLOAD, 24),  # our own
        (f"{EPOCH}/7", 1, 6, PAYLOAD, 28),
        (f"{EPOCH - 1}/8", 0, 6, PAYLOAD, 32),
        (f"{EPOCH}/9@0-1", 0, 6, PAYLOAD, 36),
    ):
        log.announce(name, Job(region, incarnation), Announcement(payload, {"step": step}))
    log.announce(f"{EPOCH}/10", Job(0, 6), Announcement(PAYLOAD))  # of a round, without a step
    assert one.sent_before() == 16
    log.announce(f"{EPOCH}/5", Job(0, 6), Announcement(None, {"step": 20}))
    assert one.sent_before() == 20


def test_what_was_sent_is_read_again_while_the_store_is_away(store, monkeypatch):
    one, log = remote(store)
    log.announce(f"{EPOCH}/3", Job(0, 6), Announcement(PAYLOAD, {"step": 12}))
    read, tries = log.left, []

    def away(region):
        tries.append(None)
        if len(tries) < 3:
            raise StoreUnavailable("away")
        return read(region)

    monkeypatch.setattr(log, "left", away)
    assert one.sent_before() == 12 and len(tries) == 3
    one._context.closing.set()
    tries.clear()
    with pytest.raises(RuntimeError, match="reading what was sent before was not finished"):
        one.sent_before()


def test_it_says_so_once(store, monkeypatch):
    one, log = remote(store)
    said = []
    monkeypatch.setattr(log, "announce", lambda name, *given: said.append((name, *given)))

    def says(*numbers, epoch=EPOCH):
        """It has just announced its absence in these, at once, and in no others."""
        expected = [(f"{epoch}/{n}", OURS, Announcement(None)) for n in numbers]
        just_now, said[:] = sorted(said), []
        return just_now == sorted(expected)

    one.fetch_ahead(5, 9, missed=3)
    assert says(5, 6, 7)
    one.fetch_ahead(5, 9, missed=3)
    assert says()
    one.fetch_ahead(6, 9, missed=4)
    assert says(8, 9)
    one.fetch_ahead(12, 9)
    assert says(), "of nothing is it known that it was missed"
    one._context.heartbeat.own = Beat(incarnation=7, epoch=EPOCH + 1)
    one.fetch_ahead(5, 9, missed=1)
    assert says(5, epoch=EPOCH + 1), "of another past"


@pytest.mark.parametrize(("regions", "closed", "made"), [((1, 2), 1000, 1000), ((1,), 0, 5)])
def test_work_for_what_was_missed_does_not_grow_with_the_looks(
    store, monkeypatch, regions, closed, made
):
    """A look makes a round of each exchange that it ends, and of the first that it cannot end."""
    one, log = remote(store)
    said, landed, rounds = [], {}, []
    others = {r: Announced(1, None, {}) for r in regions}

    def read_ahead(names, jobs):
        return {x: landed[x] for x in itertools.takewhile(landed.__contains__, names)}

    def counted(*given):
        rounds.append(None)
        return AgreedRound(*given)

    monkeypatch.setattr(log, "announce", lambda name, *given: said.append(name))
    monkeypatch.setattr(
        log, "all_announced", lambda names, _: {x: {0: ABSENT} | others for x in names}
    )
    monkeypatch.setattr(log, "commit", landed.setdefault)
    monkeypatch.setattr(log, "read_ahead", read_ahead)
    monkeypatch.setattr(remote_exchange, "AgreedRound", counted)
    for _ in range(5):
        assert one.fetch_ahead(5, 1000, missed=1000) == closed == len(landed)
    assert sorted(said) == sorted(f"{EPOCH}/{n}" for n in range(5, 1005))
    assert len(rounds) == made


def test_ending_what_was_missed_teaches_no_pace(store):
    """Nobody was waited for, and this region sent nothing: first steps may still compile."""
    one, log = remote(store)
    announce(log, range(5, 9))
    assert one.fetch_ahead(5, 4, missed=4) == 4
    pace = one._context.pace
    assert pace.deadline_s(0) == Timing().first_s
    for _ in range(3):
        pace.announced(0.0)
    assert pace.deadline_s(0) == Timing().floor_s


@pytest.mark.parametrize(("heard_s", "taught"), [(3.0, [3.0]), (None, [])])
def test_an_absence_teaches_how_late_the_others_were(heard_s, taught):
    """Where none of the others announced, and none is waited for, nothing is known of them."""
    one, around, notes = waiting(awaited=(0,), takes_part=False)
    one.announcements[0] = Announced(1, None, {})
    if heard_s is not None:
        around.heartbeat.clock_s = heard_s
        arrive(one, around, 1)
    assert confirms(one) and notes.late_s == taught


def test_the_last_to_say_so_closes_them_all_at_once(store):
    one, log = remote(store)
    announce(log, range(5, 80))
    assert one.fetch_ahead(5, 100, missed=75) == 75
    empty = empty_of(0, 1, 2)
    assert records(log, range(5, 80)) == [empty] * 75
    assert store.read(f"round/{EPOCH}/80/commit.0") is None


@pytest.mark.parametrize(
    ("said", "closed"),
    [
        ({"regions": (1,)}, False),  # region 2 may still come with a payload
        ({"payload": PAYLOAD}, False),
        ({"terms": {"anchor": "1"}}, True),  # who names no terms agrees with them
    ],
)
def test_only_what_nobody_has_a_part_in_is_closed(store, said, closed):
    one, log = remote(store)
    announce(log, [5, 6]), announce(log, [7], **said), announce(log, [8])
    assert one.fetch_ahead(5, 4, missed=4) == (4 if closed else 2)
    assert [x is not None for x in records(log, range(5, 9))] == [True] * 2 + [closed] * 2


def test_who_is_not_waited_for_keeps_nothing_open(store):
    one, log = remote(store, awaited=(0, 1), living=(0, 1))
    announce(log, [5], regions=(1,)), announce(log, [6])
    assert one.fetch_ahead(5, 2, missed=2) == 2
    # The dead have no terms in a record, and are not present.
    assert records(log, [5, 6]) == [empty_of(0, 1)] * 2


def test_who_is_late_stays_late_in_what_nobody_has_a_part_in(store):
    one, log = remote(store)
    one._context.wait_list.late = {1: Late(30, 5), 2: Late(30, 4)}
    announce(log, [5], regions=(1,)), announce(log, [6])
    assert one.fetch_ahead(5, 2, missed=2) == 2
    assert [record.late for record in records(log, [5, 6])] == [{2: Late(30, 4)}, {}]


@pytest.mark.parametrize("heal", ["stop", "lowest"])
def test_regions_that_have_parted(store, heal):
    """They find it in the record, as in that of any exchange; it says who goes on."""
    one, log = remote(store)
    one._context.heal = heal
    for region, anchor in ((1, "1"), (2, "2")):
        announce(log, [5], (region,), terms={"anchor": anchor})
    assert one.fetch_ahead(5, 1, missed=1) == 1
    [record] = records(log, [5])
    assert record.terms == {0: {}, 1: {"anchor": "1"}, 2: {"anchor": "2"}}
    assert record.present.keys() == ({0, 1, 2} if heal == "stop" else {0, 1})


def test_what_the_others_landed_is_read_and_not_sat_out(store):
    one, log = remote(store)
    landed = commit_of({1: PAYLOAD}, {1: {}}, 1, (1, 2))
    for number in (5, 6):
        log.commit(f"{EPOCH}/{number}", landed)
    announce(log, [7])
    assert one.fetch_ahead(5, 9, missed=3) == 3
    assert records(log, [5, 6]) == [landed] * 2 and not records(log, [7])[0].admitted
    assert announced(log, 5) is None


def test_so_many_bytes_are_read_at_once_and_the_last_ones_when_it_is_their_turn(store, monkeypatch):
    one, log = remote(store)
    read = []
    one._context.transport.get_ahead = read.append
    monkeypatch.setattr(remote_exchange, "_MOST_AHEAD", 20)
    for number, digest in zip((5, 6, 7), ("a" * 64, "b" * 64, "c" * 64)):
        log.commit(f"{EPOCH}/{number}", commit_of({1: Payload(digest, 8)}, {1: {}}, 1, (1, 2)))
    assert one.fetch_ahead(5, 3) == 3
    assert read == [{"a" * 64: 8, "b" * 64: 8}]


def test_junk_in_the_place_of_a_record_takes_a_number_and_closes_no_round_for_ever(store):
    """Both of an announcement and of the record."""
    one, log = remote(store)
    announce(log, [5, 6])
    for number, slot in ((5, "commit"), (6, f"announce.{OURS.region}.{OURS.incarnation}")):
        store.create(f"round/{EPOCH}/{number}/{slot}.0", b"junk")
    assert one.fetch_ahead(5, 2, missed=2) == 2
    assert records(log, [5, 6]) == [empty_of(0, 1, 2)] * 2
    assert [store.read(f"round/{EPOCH}/{n}/commit.1") is not None for n in (5, 6)] == [True, False]
    assert [announced(log, n).payload for n in (5, 6)] == [None, None]


def test_a_store_that_goes_away_again_costs_nothing(store, monkeypatch):
    one, log = remote(store)

    def away(*given):
        raise StoreUnavailable("gone")

    monkeypatch.setattr(log, "announce", away)
    assert one.fetch_ahead(5, 9, missed=3) == 0
    monkeypatch.undo()
    announce(log, range(5, 8))
    assert one.fetch_ahead(5, 9, missed=3) == 3, "it had not said so yet"
