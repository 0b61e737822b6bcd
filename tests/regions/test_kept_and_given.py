"""Which payloads are kept, who gives a state and to whom: decided from beats, without threads."""

import itertools
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rounds import payloads
from lowcomm_jax.rounds.fetch import pieces
from lowcomm_jax.rounds.payloads import PayloadGC
from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.rounds.state_transfer import StateTransfer
from lowcomm_jax.store import wire
from lowcomm_jax.store.background import Background
from lowcomm_jax.store.commits import CommitLog, Job
from lowcomm_jax.store.errors import Parted, StoreUnavailable
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.records import Announcement, Beat, Payload, State
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.timing import Pace, Timing


class Beats:
    """What is known of the others: beats by region, and who lives; region 0 is this one."""

    def __init__(self, region=0, **beats):
        self.region, self.own, self.clock_s = region, Beat(1, awaited=True, epoch=1), 100.0
        self.others = {int(name[1:]): beat for name, beat in beats.items()}
        self.dead, self.unsure, self.told = set(), set(), []

    def check(self):
        """Nothing has ended."""

    @property
    def job(self):
        return Job(self.region, self.own.incarnation)

    def latest(self):
        return self.others | {self.region: self.own}

    def living(self, certain=True):
        return {self.region, *self.others} - self.dead - (self.unsure if certain else set())

    def update(self, **changes):
        self.told.append(changes)


class Transport:
    """Holds bytes, and notes what is dropped."""

    def __init__(self):
        self.held, self.dropped = {}, []

    def put(self, name, data):
        self.held[name] = data

    def get(self, name, nbytes, holders):
        return self.held[name]

    def drop(self, name, shared):
        self.dropped.append((name, shared))


def context(beats, folder=None):
    store = None if folder is None else Store(f"file://{folder}", "run", MetricsCounter())
    slots = Slots(store, Seal("run", b""))
    return SimpleNamespace(
        region=beats.region,
        count=4,
        run_id="run",
        heal="stop",
        heartbeat=beats,
        store=store,
        slots=slots,
        serials=itertools.count(1),
        counter=MetricsCounter(),
        commit_log=None if store is None else CommitLog(store, slots),
        transport=Transport(),
        closing=threading.Event(),
        halted=threading.Event(),
        pace=Pace(Timing()),
        timing=Timing(),
        background=Background(pytest.fail),
    )


# -- payloads that are kept -------------------------------------------------------------------


def collecting(keep=2, done=8, **beats):
    """A collector of region 0, which has everything of the keys before `done`."""
    around = context(Beats(**beats))
    gc = PayloadGC(around, keep)
    for number in range(12):
        gc.begin(f"{number}")
    for number in range(done):
        gc.done(f"{number}", {f"1/{number}": {Job(0, 1): [f"digest {number}"]}})
    return gc, around


def passed(gc):
    return [int(name.removeprefix("1/")) for name in gc._passed()]


def at(passed, **more):
    return Beat(1, passed=passed, **{"awaited": True, **more})


@pytest.mark.parametrize(
    ("beat", "first_kept"),
    [
        (None, 6),  # alone: the newest two, of eight
        (at("7"), 6),
        (at("6"), 5),
        (at("5"), 4),
        (at("4"), 6),  # more than two behind: it takes a state
        (at("4", wants=True), 3),
        (at("4", awaited=False), 6),
        (at("6", awaited=False), 6),  # that compiles is given a newer state
        (at("9"), 6),
        (at(""), 6),
        (at("unknown", wants=True), 0),
    ],
)
def test_payloads_are_kept_for_the_slowest_that_needs_them(beat, first_kept):
    gc, _ = collecting(**({} if beat is None else {"r1": beat}))
    assert passed(gc) == list(range(first_kept))


def test_payloads_are_kept_for_who_may_live_and_not_for_the_dead():
    gc, around = collecting(r1=at("5"))
    around.heartbeat.unsure = {1}
    assert passed(gc) == list(range(4))
    around.heartbeat.dead = {1}
    assert passed(gc) == list(range(6))


def test_whoever_asked_is_near_for_so_many_keys_since_then():
    gc, around = collecting(done=6, r1=at("1", wants=True))
    assert passed(gc) == []
    around.heartbeat.others[1] = at("1")  # it has its state, and comes in
    for number, kept in ((6, True), (7, True), (8, False)):
        gc.done(f"{number}", {f"1/{number}": {}})
        assert (passed(gc) == []) is kept, number


def test_of_whom_nothing_is_known_has_nothing():
    gc, _ = collecting(keep=1, r1=at("unknown", wants=True))
    assert passed(gc) == []


def test_where_all_are_waited_for_however_far_behind_payloads_stay():
    gc, _ = collecting(r1=at("2"))
    gc.for_all = True
    assert passed(gc) == [0]


def test_a_place_never_goes_back():
    gc, around = collecting(r1=at("6"))
    assert passed(gc) == list(range(5))
    around.heartbeat.others[1] = at("3")
    assert passed(gc) == list(range(5))
    gc.begin("3")
    assert gc._positions["3"] == 3, "keys are ordered by when they began first"


@pytest.mark.parametrize(
    ("places", "lacking"), [((7, 7), set()), ((7, 8), set()), ((7, 6), {2}), ((6, 7), {1})]
)
def test_who_lacks_what_we_have(places, lacking):
    """Whether it lives or not."""
    gc, around = collecting(r1=at(f"{places[0]}"), r2=at(f"{places[1]}"))
    assert gc.lacking() == lacking
    around.heartbeat.dead = {1, 2}
    assert gc.lacking() == lacking


def test_what_is_done_is_told():
    gc, around = collecting(done=0)
    gc.done("3", {}, at_once=False)
    gc.done("5", {})
    gc.done("4", {})  # exchanges end in any order: the newest stands
    told = [{"at_once": False, "passed": "3"}, {"at_once": True, "passed": "5"}]
    assert around.heartbeat.told == told


@pytest.mark.parametrize(
    ("region", "dead", "ours"),
    [
        (0, (), {0}),
        (0, (2,), {0, 2}),
        (0, (1, 2), {0, 1, 2}),
        (1, (2,), {1}),
        (1, (0, 2), {0, 1, 2}),
    ],
)
def test_each_removes_its_own_and_the_lowest_those_of_the_dead(region, dead, ours):
    others = {f"r{r}": at("9") for r in range(3) if r != region}
    around = context(Beats(region, **others))
    around.heartbeat.dead = set(dead)
    forgotten = []
    around.commit_log = SimpleNamespace(forget=lambda *given: forgotten.append(given))
    gc = PayloadGC(around, 1)
    for number in range(3):
        gc.begin(f"{number}")
    gc.done("0", {"1/0": {Job(r, 4): [f"{r}", f"slice of {r}"] for r in range(3)}})
    gc.done("2", {})
    gc.sweep(), gc.sweep()
    names = [(x, r in ours) for r in range(3) for x in (f"{r}", f"slice of {r}")]
    assert around.transport.dropped == names, "our copies go in any case"
    assert forgotten == [("1/0", Job(r, 4)) for r in sorted(ours)]


def test_what_could_not_be_removed_is_tried_again():
    gc, around = collecting(done=8)
    fails = [True]

    def forget(name, job):
        if name == "1/2" and fails:
            fails.pop()
            raise StoreUnavailable("away")

    around.commit_log = SimpleNamespace(forget=forget)
    gc.sweep()
    assert sorted(gc._done) == [f"1/{n}" for n in range(2, 8)]
    gc.sweep()
    assert sorted(gc._done) == ["1/6", "1/7"]


def test_what_earlier_jobs_have_left_is_taken_over_in_one_reading(tmp_path, monkeypatch):
    around = context(Beats(r1=at("9")), tmp_path)
    store, log, payload = around.store, around.commit_log, Payload("a" * 64, 8)
    for number in range(3):
        log.announce(f"1/{number}", Job(1, 3), Announcement(payload))
    log.announce("1/2", Job(0, 1), Announcement(None))
    store.write("round/1/7/announce.2.1.0", b"no record")
    monkeypatch.setattr(store, "read", lambda key: None if key.endswith(".1") else 1 / 0)
    gc = PayloadGC(around, 1)
    gc.adopt()
    one, other = {Job(1, 3): ["a" * 64]}, {Job(2, 1): []}
    found = {name: done.digests for name, done in gc._done.items()}
    assert found == {"1/0": one, "1/1": one, "1/2": {Job(0, 1): []} | one, "1/7": other}


def test_payloads_that_no_exchange_names_go_with_those_of_earlier_jobs():
    gc, around = collecting(keep=1, done=2)
    gc._done["1/early"] = payloads._Done(-1, {Job(1, 3): ["theirs"]})
    gc.dropped({"1/early": {Job(0, 1): ["ours"]}})
    assert passed(gc) == [0] and gc._done["1/early"].position == 1
    gc.done("2", {})
    around.commit_log = SimpleNamespace(forget=lambda *given: None)
    gc.sweep()
    dropped = [name for name, _ in around.transport.dropped]
    assert set(dropped[-2:]) == {"theirs", "ours"} and "1/early" not in gc._done


# -- pieces of a payload ----------------------------------------------------------------------


def test_which_pieces_of_a_payload_a_region_fetches_and_from_whom():
    slices = (None, Payload("s1", 4), Payload("s2", 5))
    payload = Payload("whole", 9, slices)
    reduction = SimpleNamespace(like={"x": ("int8", (2,))})
    request = ExchangeRequest("k", "1/k", (0, 1, 2), reduction=reduction, like={2: {}})

    def found(request, slice_of):
        return pieces(request, 2, payload, slice_of)

    whole, piece = found(request, 1)
    assert whole == ("k", payload, {}, [2, 0, 1])
    assert piece == ("k", slices[1], reduction.like, [2])
    assert len(found(request, 0)) == 1, "there is none of that number"
    assert len(found(request, None)) == 1
    [whole] = found(ExchangeRequest("k", "1/k", (0, 1, 2)), 1)
    assert whole.like is None, "any"
    assert payload.nbytes_for(1) == 9 + 4 and payload.nbytes_for(0) == 9
    assert payload.digests == ["whole", "s1", "s2"]


def test_every_slice_is_published_and_damage_reaches_the_right_ones():
    """The fault hook gets all bytes one after the other, and what it returns is published."""
    around = context(Beats(region=1))
    host = payloads.HostPayload({}, {"w": np.float32([1])}, {"x": np.arange(3, dtype=np.int8)})
    seen = []
    around.fault_hooks = SimpleNamespace(sent=lambda key, data: seen.append((key, data)) or data)
    record, files = payloads.pack(around, "k", host)
    first, own, last = record.slices
    assert own is None and list(files) == [first.digest, last.digest, record.digest]
    assert seen == [("k", b"".join(files.values()))]
    whole = [wire.parse(data)[1] for data in files.values()]
    assert [x.get("x", x.get("w")).tolist() for x in whole] == [0, 2, [1]]
    around.fault_hooks.sent = lambda key, data: data[:-1] + b"!"
    _, damaged = payloads.pack(around, "k", host)
    assert [data[-1:] == b"!" for data in damaged.values()] == [False, False, True]


# -- states -----------------------------------------------------------------------------------

TRAINS, ASKS = Beat(1, awaited=True), Beat(4, wants=True)


def giving(beats, folder=None, behind=False, left=()):
    waiting = SimpleNamespace(behind=behind, left_behind=lambda region: region in left)
    around = context(beats, folder)
    around.wait_list = waiting
    return StateTransfer(around)


@pytest.mark.parametrize(
    ("region", "beats", "how", "owed"),
    [
        (0, {}, {}, False),
        (0, {"r1": TRAINS}, {}, False),
        (0, {"r1": ASKS}, {}, True),
        (1, {"r0": ASKS}, {}, True),
        (1, {"r0": TRAINS, "r2": ASKS}, {}, False),  # the lowest one does
        (1, {"r0": TRAINS, "r2": ASKS}, {"left": (0,)}, True),
        (0, {"r1": TRAINS, "r2": ASKS}, {"behind": True}, False),
        (0, {"r2": ASKS}, {"behind": True}, True),  # there is no other
        (1, {"r0": Beat(1), "r2": ASKS}, {}, True),  # 0 is coming in itself
    ],
)
def test_who_owes_a_state(region, beats, how, owed):
    assert giving(Beats(region, **beats), **how).owed() is owed


@pytest.mark.parametrize("own", [Beat(1), Beat(1, awaited=True, wants=True)])
def test_who_has_no_state_owes_none(own):
    beats = Beats(r1=ASKS)
    beats.own = own
    assert not giving(beats).owed()


def test_who_is_giving_one_owes_no_other():
    transfer = giving(Beats(r1=ASKS))
    transfer._giving = SimpleNamespace(is_alive=lambda: True)
    assert not transfer.owed()
    transfer._giving = SimpleNamespace(is_alive=lambda: False)
    assert transfer.owed()


def test_a_state_that_was_given_is_fetched_for_so_long(tmp_path):
    """Half a minute, and four times as long as its bytes take."""
    beats = Beats(r1=ASKS)
    transfer = giving(beats, tmp_path)
    transfer._context.pace.transferred(100, 1.0)
    transfer.give(7, {"x": np.zeros(1000, np.uint8)}, {})
    beats.clock_s = 100.0 + 30.0 + 4 * 10.0 - 0.5
    assert not transfer.owed()
    beats.clock_s += 0.5
    assert transfer.owed()
    beats.clock_s = 100.0
    beats.others[2] = ASKS
    assert transfer.owed(), "another one asks, too"
    beats.others = {1: Beat(5, wants=True)}
    assert transfer.owed(), "another job in that place"


def test_a_state_that_was_not_given_is_tried_again_soon(monkeypatch, caplog):
    beats = Beats(r1=ASKS)
    transfer = giving(beats)

    def away(*state):
        raise StoreUnavailable("away")

    monkeypatch.setattr(transfer, "give", away)
    transfer.give_soon(7, {}, {})
    transfer._context.background.join()
    assert not transfer.owed() and "it is tried again: away" in caplog.text
    beats.clock_s += 5.0
    assert transfer.owed()


def test_a_state_is_written_for_nobody_where_who_asked_has_gone(monkeypatch):
    beats, given = Beats(r1=ASKS), []
    transfer = giving(beats)
    monkeypatch.setattr(transfer, "give", lambda *state: given.append(state))
    for one, expected in ((ASKS, 1), (TRAINS, 1)):
        beats.others[1] = one
        transfer.give_soon(7, {}, {})
        transfer._context.background.join()
        assert len(given) == expected


def test_who_asks_and_who_may_give():
    beats = Beats(r1=ASKS, r2=TRAINS, r3=Beat(1), r4=Beat(1, awaited=True, wants=True))
    transfer = giving(beats)
    assert transfer.asking() == {1: 4, 4: 1} and transfer.donors() == {2}
    beats.unsure = {1, 2}
    assert transfer.asking() == {4: 1} and transfer.donors() == set()


def test_a_state_is_for_those_that_ask_and_numbered_where_there_is_one(tmp_path):
    """And no piece of one is a piece of another: else it would be removed with the older one."""
    beats = Beats(r1=ASKS)
    transfer = giving(beats, tmp_path)
    transfer.give(7, {"x": np.arange(3), "same": np.arange(2)}, {})
    assert not transfer.owed(), "it has one to fetch"
    beats.others[2] = Beat(2, wants=True)
    transfer.give(7, {"x": np.arange(4), "same": np.arange(2)}, {})
    assert transfer._context.store.list("state/") == ["state/1/7.0.1.0.0", "state/1/7.0.1.1.0"]
    pieces = [name[:10] for name in transfer._context.transport.held]
    assert pieces == ["1.7.0.1.0."] * 2 + ["1.7.0.1.1."] * 2
    assert transfer.newest()[1]["x"].size == 4
    beats.own = Beat(4, wants=True, epoch=1)
    beats.region = transfer._context.region = 1
    assert transfer.newest()[1]["x"].size == 4
    beats.own = Beat(5, wants=True, epoch=1)
    assert transfer.newest() is None, "given to the job before"
    beats.own = Beat(5, epoch=2)
    assert transfer.newest() is None, "of another past"


def test_older_states_go_and_those_of_the_dead_by_the_lowest(tmp_path):
    beats = Beats(region=1, r2=TRAINS, r3=TRAINS)
    transfer = giving(beats, tmp_path)
    store, ours = transfer._context.store, transfer._context.transport
    for step in (4, 5, 6):
        transfer.give(step, {"x": np.arange(step)}, {})

    def left():
        return {key.split("/")[2].partition(".")[0] for key in store.list("state/")}

    assert left() == {"5", "6"}
    (gone,) = ours.dropped
    assert gone[0].startswith("1.4.1.1.0.") and gone[1]
    ours.dropped.clear()
    for donor in (2, 3):
        record = State(donor, donor, 1, {}, {}, {})
        transfer._context.slots.create(f"state/1/{donor}.{donor}.1.0", record)
        store.write(f"blob/1.9.{donor}.1.0.{'a' * 64}", b"")
    store.write("blob/" + "b" * 64, b"a payload")
    beats.dead = {3}
    for swept in (False, True):
        beats.own = Beat(1, awaited=True, epoch=1, wants=not swept)
        transfer.sweep()
        assert left() == ({"2", "5", "6"} if swept else {"2", "3", "5", "6"})
    assert ours.dropped == [(f"1.9.3.1.0.{'a' * 64}", True)], "of the dead, and no other"
    transfer.sweep()
    assert len(ours.dropped) == 1, "nothing has changed"
    beats.dead = {2, 3}
    transfer.sweep()
    assert left() == {"5", "6"}


@pytest.mark.parametrize("gives", [False, True])
def test_old_states_are_removed_later_where_one_is_being_given(gives):
    transfer, noted = giving(Beats(r1=TRAINS)), []

    def acquire(blocking=True):
        noted.append(f"waits: {blocking}")
        return not gives

    transfer._busy = SimpleNamespace(acquire=acquire, release=lambda: noted.append("released"))
    transfer._remove_left = noted.append
    transfer.sweep(), transfer.sweep()
    once = ["waits: False", {0, 1}, "released"]
    assert noted == (["waits: False"] * 2 if gives else once)


def test_old_states_are_removed_later_where_the_store_is_away():
    transfer, tries = giving(Beats(r1=TRAINS)), []

    def remove(living):
        tries.append(living)
        if len(tries) == 1:
            raise StoreUnavailable("away")

    transfer._remove_left = remove
    for _ in range(3):
        transfer.sweep()
    assert tries == [{0, 1}] * 2


# -- anchors that are compared ----------------------------------------------------------------


SAME, OTHER = ({"anchor": np.array([word], np.uint32)} for word in (5, 6))


@pytest.mark.parametrize(
    ("told", "agree"),
    [
        ({}, False),
        ({0: "8.2"}, False),
        ({0: "8.2", 1: "7.2"}, False),
        ({0: "8.2", 1: "9.1"}, False),  # as much has landed there, and it is no later one
        ({0: "8.2", 1: "9.2"}, True),  # it never had that version
        ({0: "8.2", 1: "8.1 9.2"}, True),
        ({0: "9.2", 1: "9.2"}, False),  # nobody has a vote
        ({0: "8.2", 1: "8.2"}, True),
    ],
)
def test_when_anchors_are_compared(caplog, told, agree):
    beats = Beats(2, r0=TRAINS, r1=TRAINS)
    transfer = giving(beats)
    for region, versions in told.items():
        anchors = {version: {"anchor": f"{5:08x}"} for version in versions.split()}
        beats.others[region] = Beat(1, awaited=True, anchors=anchors)
    assert transfer.anchors_agree(8, "8.2", SAME, at_last=False) is agree
    voters = "8.2" in told.values()
    if agree:
        with pytest.raises(Parted):
            transfer.anchors_agree(8, "8.2", OTHER, at_last=False)
    else:
        assert not transfer.anchors_agree(8, "8.2", OTHER, at_last=False)
    if voters:
        with pytest.raises(Parted, match="a state of step 8"):
            transfer.anchors_agree(8, "8.2", OTHER, at_last=True)
    assert transfer.anchors_agree(8, "8.2", SAME, at_last=True)
    assert ("nobody has told" in caplog.text) is not voters


def test_anchors_are_told_while_somebody_asks_and_only_what_is_new():
    beats = Beats(r1=TRAINS)
    transfer = giving(beats)
    old, new = {"8.2": SAME}, {"9.2": OTHER, "10.2": SAME}
    transfer.tell_anchors(old)
    assert beats.told == [], "nobody asks"
    beats.others[1] = ASKS
    five, six = ({"anchor": f"{word:08x}"} for word in (5, 6))
    for versions, told in (
        (old, {"8.2": five}),
        (new, {"8.2": five, "9.2": six, "10.2": five}),  # a state may travel for long
    ):
        transfer.tell_anchors(versions)
        assert beats.told.pop() == {"at_once": False, "anchors": told}
        beats.own = Beat(1, awaited=True, anchors=told)
        transfer.tell_anchors(versions)
        assert beats.told == []
    beats.others[1] = TRAINS
    transfer.tell_anchors(new)
    assert beats.told == [{"at_once": False, "anchors": {}}]


FULL = {f"{n}.3": {"anchor": f"{6:08x}"} for n in range(9, 73)}


@pytest.mark.parametrize(
    ("answer", "agree"),
    [(None, False), ({}, True), ({"anchor": f"{5:08x}"}, True)],
)
def test_who_tells_of_the_newest_alone_is_asked_by_name(answer, agree):
    beats = Beats(2, r0=TRAINS, r1=TRAINS)
    transfer = giving(beats)
    beats.others[0] = Beat(1, awaited=True, anchors={"8.2": {"anchor": f"{5:08x}"}})
    told = FULL if answer is None else FULL | {"8.2": answer}
    beats.others[1] = Beat(1, awaited=True, anchors=told)
    assert transfer.anchors_agree(8, "8.2", SAME, at_last=False) is agree
    named = [] if agree else [{"anchors": {"8.2": {"anchor": f"{5:08x}"}}}]
    assert beats.told == named


def test_who_says_that_it_never_had_that_version_has_no_vote(caplog):
    beats = Beats(2, r0=TRAINS)
    transfer = giving(beats)
    beats.others[0] = Beat(1, awaited=True, anchors=FULL | {"8.2": {}})
    assert not transfer.anchors_agree(8, "8.2", SAME, at_last=False)
    assert transfer.anchors_agree(8, "8.2", OTHER, at_last=True)
    assert "nobody has told" in caplog.text


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("8.2", {"8.2": {"anchor": f"{5:08x}"}}),
        ("7.1", {"7.1": {}}),  # passed, and never had
        ("900.0", {}),  # still to come
        ("100.0", {"100.0": {"anchor": f"{6:08x}"}}),  # among the newest
    ],
)
def test_what_a_newcomer_names_is_told_of_beside_the_newest(name, answer):
    beats = Beats(r1=ASKS)
    transfer = giving(beats)
    for versions in ({"8.2": SAME}, {f"{n}.0": OTHER for n in range(11, 101)}):
        transfer.tell_anchors(versions)
        beats.own = Beat(1, awaited=True, anchors=beats.told.pop()["anchors"])
    newest = {f"{n}.0" for n in range(37, 101)}
    assert beats.own.anchors.keys() == newest
    beats.others[1] = Beat(1, wants=True, anchors={name: {"anchor": f"{5:08x}"}})
    transfer.tell_anchors({})
    told = beats.told.pop()["anchors"] if beats.told else beats.own.anchors
    assert told.keys() == newest | answer.keys()
    assert answer.items() <= told.items()


def test_what_the_device_still_computes_is_told_later(monkeypatch):
    """And nothing behind it: who has told of a later version never had those that it lacks."""
    beats, computed = Beats(r1=ASKS), []
    transfer = giving(beats)
    one = jnp.zeros(2, jnp.uint32)
    monkeypatch.setattr(type(one), "is_ready", lambda x: bool(computed))
    versions = {"8": SAME, "9": {"anchor": one}, "10": SAME}
    transfer.tell_anchors(versions)
    assert beats.told.pop()["anchors"].keys() == {"8"}
    computed.append(True)
    transfer.tell_anchors(versions)
    assert beats.told.pop()["anchors"].keys() == {"8", "9", "10"}
