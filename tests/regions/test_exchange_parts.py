"""The small parts of the exchange between jobs, each on its own."""

import collections
import dataclasses
import hashlib
import hmac
import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from regions.party import KINDS, at_once

from lowcomm_jax import exchange
from lowcomm_jax.rounds import remote, request
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import CommitLog, Job, name_of
from lowcomm_jax.store.errors import Unreadable
from lowcomm_jax.store.kv import POLL_FAR_S, MetricsCounter, Store
from lowcomm_jax.store.records import FORMAT, Admitted, Agreed, Announcement, Beat, Commit, Payload
from lowcomm_jax.store.secret import Seal, read_secret
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.timing import Pace, Timing
from lowcomm_jax.store.transport import StoreTransport
from lowcomm_jax.store.wait_list import WaitList

ABOUT = {"run_id": "run", "job": Job(1, 3)}
ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1],
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "c": np.zeros((2, 0), np.int8),
    "d": np.array(3, np.uint32),
    "e": np.array([1, -8, 7], ml_dtypes.float8_e4m3fn),
}


@pytest.fixture
def store(tmp_path):
    """A store in an empty folder."""
    return Store(f"file://{tmp_path}/meet", "run", MetricsCounter())


@pytest.fixture
def slots(store):
    return Slots(store, Seal("run", b"x" * 16))


@pytest.fixture
def forged(store):
    """As `slots`, of a stranger."""
    return Slots(store, Seal("run", b"y" * 16))


# -- wire -------------------------------------------------------------------------------------


def packed(arrays=ARRAYS, serial=7):
    return wire.pack(**ABOUT, serial=serial, arrays=arrays)


def test_payloads_come_back_bit_for_bit_and_are_reproducible():
    data = packed()
    assert data == packed(dict(reversed(ARRAYS.items()))) != packed(serial=8)
    arrays = wire.unpack(data, **ABOUT, like=wire.shapes_of(ARRAYS))
    assert arrays.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert arrays[name].dtype == x.dtype and arrays[name].shape == x.shape
        np.testing.assert_array_equal(arrays[name], x)
        assert arrays[name].flags.writeable


def test_payloads_are_plain_safetensors():
    """Anyone can read them with the public library, an oracle for the bytes."""
    flat = dict(safetensors.deserialize(packed()))
    dtypes = {"a": "F32", "b": "BF16", "c": "I8", "d": "U32", "e": "F8_E4M3"}
    assert {name: x["dtype"] for name, x in flat.items()} == dtypes
    assert {name: tuple(x["shape"]) for name, x in flat.items()} == {
        name: x.shape for name, x in ARRAYS.items()
    }
    assert all(bytes(flat[name]["data"]) == x.tobytes() for name, x in ARRAYS.items())
    wide = {name: ARRAYS[name] for name in "acd"}
    for name, x in safetensors.numpy.load(packed(wide)).items():
        np.testing.assert_array_equal(x, ARRAYS[name])


@pytest.mark.parametrize("dtype", wire.DTYPES)
def test_every_dtype_travels_under_its_own_name(dtype):
    x = np.arange(4).astype(jnp.dtype(wire.DTYPES[dtype]))
    data = packed({"x": x})
    assert safetensors.deserialize(data)[0][1]["dtype"] == dtype == wire.NAMES[x.dtype.name]
    np.testing.assert_array_equal(wire.unpack(data, **ABOUT, like=None)["x"], x)


def test_codes_of_less_than_a_byte_are_for_the_codec_to_pack():
    with pytest.raises(ValueError, match=r"x is int4, which no payload can hold: .* into uint8"):
        packed({"x": np.zeros(3, ml_dtypes.int4)})


def test_any_cut_and_any_flipped_byte_of_the_head_is_refused_and_nothing_else_is_raised():
    data = packed()
    like = wire.shapes_of(ARRAYS)
    for size in range(len(data)):
        with pytest.raises(exchange.Rejected):
            wire.unpack(data[:size], **ABOUT, like=like)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x15
        assert wire.digest(bytes(changed)) != wire.digest(data)
        try:
            wire.unpack(bytes(changed), **ABOUT, like=like)
        except exchange.Rejected:
            continue


@pytest.mark.parametrize(
    ("count", "told"), [(1, "a0"), (3, "a0; a1; a2"), (4, "a0; a1; a2; and 1 more")]
)
def test_three_arrays_that_differ_are_named(count, told):
    found = {f"a{i}": ("int8", (i,)) for i in range(5)}
    like = {name: ("int8", (9,)) if i < count else x for i, (name, x) in enumerate(found.items())}
    parts = [f"a{i} is ('int8', ({i},)), expected ('int8', (9,))" for i in range(min(count, 3))]
    more = ["and 1 more"] if "more" in told else []
    assert wire._difference(found, like) == "; ".join(parts + more)
    assert wire._difference({}, {"x": 1}) == "x is None, expected 1"


# -- secrets ----------------------------------------------------------------------------------


def test_secrets_are_read_from_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARED", " from the environment \n")
    (tmp_path / "secret").write_text("from the file system\n")
    assert read_secret("env:SHARED") == b"from the environment"
    assert read_secret(f"file:{tmp_path}/secret") == b"from the file system"
    assert read_secret(b"0123456789abcdef") == b"0123456789abcdef", "long enough"
    assert read_secret(None) == b""


@pytest.mark.parametrize(
    "source, reason",
    [
        ("env:SHARED", "^secret 'env:SHARED' has 15 bytes: use 16 or more"),
        (b"x" * 15, "^the secret has 15 bytes"),
        ("file:/no/such/place", "file:/no/such/place.*No such file"),
        ("env:NO_SUCH_NAME", "env:NO_SUCH_NAME.*no such variable"),
        ("x" * 15, "^give the secret as bytes"),
    ],
)
def test_bad_secrets_are_refused_with_the_reason_and_not_shown(source, reason, monkeypatch):
    monkeypatch.setenv("SHARED", "x" * 15)
    with pytest.raises(ValueError, match=reason) as caught:
        read_secret(source)
    assert "x" * 15 not in str(caught.value)


def test_records_bind_the_format_the_run_the_key_and_the_secret():
    seal, body = Seal("run", b"x" * 16), Agreed({"a": 1, "b": "x"})
    record = seal.close("key", body)
    assert seal.open("key", record, Agreed) == body
    others = [(Seal("ran", b"x" * 16), "key"), (seal, "yek"), (Seal("run", b"y" * 16), "key")]
    for other, key in others:
        with pytest.raises(exchange.Rejected):
            other.open(key, record, Agreed)
    with pytest.raises(exchange.Rejected):
        seal.open("key", seal.close("key", body, FORMAT + 1), Agreed)


def test_a_record_is_what_the_page_says():
    """One line with the HMAC in hex, then JSON."""
    data = Seal("run", b"x" * 16).close("key", Agreed({"a": 1}))
    message = f"{FORMAT}\nrun\nkey\n".encode() + b'{"value":{"a":1}}'
    mac = hmac.new(b"x" * 16, message, hashlib.sha256).hexdigest().encode()
    assert data == mac + b'\n{"value":{"a":1}}'


@pytest.mark.parametrize(
    "junk", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"body": 1, "mac": 2}', b"null", b"\n{}"]
)
def test_junk_is_no_record(junk):
    with pytest.raises(exchange.Rejected):
        Seal("run", b"x" * 16).open("key", junk, Agreed)


def test_secrets_are_not_shown_by_accident():
    assert "0123456789abcdef" not in repr(vars(exchange)) + repr(Seal("run", b"0123456789abcdef"))


# -- store ------------------------------------------------------------------------------------


def test_a_key_is_created_once(store):
    assert store.read("a/b") is None
    assert store.create("a/b", b"first") and not store.create("a/b", b"second")
    assert store.read("a/b") == b"first"
    store.write("a/b", b"third")
    assert store.read("a/b") == b"third"
    assert store.list("a/") == ["a/b"] and store.list("b/") == []
    store.delete("a/b")
    store.delete("a/b")
    assert store.read("a/b") is None


def test_a_lost_race_is_seen(store):
    """Just before us another one writes: the store does not raise by itself."""
    kv = store._kv

    class Raced:
        def write(self, key, value, if_equal):
            kv.write(key, b"the other").result()
            return kv.write(key, value, if_equal=if_equal)

    store._kv = Raced()
    store._folder = None  # As for a store that is not a folder.
    assert not store.create("k", b"ours")
    assert kv.read("k").result().value == b"the other"


def test_one_of_many_creates_a_key_and_no_other_value_is_ever_seen(store):
    stores = [Store(store.root.removesuffix("run/"), "run", MetricsCounter()) for _ in range(4)]
    won = [at_once(lambda s, k=k: s.create(k, f"{id(s)}".encode()), stores) for k in "abcdefgh"]
    for key, results in zip("abcdefgh", won):
        (winner,) = [s for s, created in zip(stores, results) if created]
        assert store.read(key) == f"{id(winner)}".encode()
        assert store.list(key) == [key]


def test_everyone_who_writes_a_commit_record_gets_the_one_that_stands(store, slots):
    writers = [CommitLog(store, slots) for _ in range(4)]
    for name in "abcdefghijklmnop":
        made = at_once(lambda w, n=name: w.commit(n, Commit({}, {}, writers.index(w))), writers)
        assert len({commit.writer for commit in made}) == 1
        assert writers[0].committed(name) == made[0]
        assert writers[0].commit(name, Commit({}, {}, 9)) == made[0]


def test_payloads_with_other_slices_are_others():
    """Regions confirm what they hold by its content: one whose slice is damaged must tell."""
    whole = Payload("a", 8)
    pieces = [Payload(digest, 4) for digest in "bcd"]
    payloads = [whole, *(Payload("a", 8, (pieces[i], None, pieces[2])) for i in range(2))]
    assert len({payload.content for payload in payloads}) == 3
    assert whole.content == "a"
    assert payloads[1].content == Payload("a", 8, (pieces[0], None, pieces[2])).content


def test_a_store_without_its_anchor_is_unavailable(store):
    store.create("run", b"x")
    store.anchor("run")
    assert store.read("k") is None
    store.delete("run")
    for act in (
        lambda: store.read("k"),
        lambda: store.list("k"),
        lambda: store.create("k", b""),
        lambda: store.write("k", b""),
    ):
        with pytest.raises(exchange.StoreUnavailable, match="'run' is not there"):
            act()


def test_any_key_is_one_part_of_a_name():
    assert name_of(1, "a/b@c%", (0, 1), 2) == "1/a%2Fb%40c%25"
    assert name_of(1, "a", (0, 2), 3) == "1/a@0-2"


def test_pauses_grow_to_a_limit(store):
    pauses = store.pauses()
    seen = [next(pauses) for _ in range(30)]
    assert (seen[0], seen[-1]) == store.poll_s and seen == sorted(seen)
    store.poll_s = POLL_FAR_S  # as of a store that charges for requests
    far = list(itertools.islice(store.pauses(), 30))
    assert (far[0], far[1], far[-1]) == (0.05, 0.05 * 1.5, 1.0)


# -- timing -----------------------------------------------------------------------------------


def test_deadlines_are_generous_before_and_derived_after_something_was_observed():
    pace = Pace(Timing(floor_s=2.0, first_s=100.0))
    assert pace.deadline_s(10**9) == 100.0
    for late_s in (1.0, 3.0, 2.0):
        pace.announced(late_s)
    for _ in range(3):
        pace.transferred(50_000_000, 0.5)
    # median 2, median absolute deviation 1, 100 MB/s
    assert pace.deadline_s(10**9) == pytest.approx(2.0 + 2.0 + 6 * 1.0 + 3 * 10.0)


@pytest.mark.parametrize(
    ("missed", "expected"), [(0, 3.0), (1, 6.0), (4, 48.0), (5, 48.0), (10**6, 48.0)]
)
def test_a_deadline_is_doubled_for_each_exchange_that_was_missed(missed, expected):
    pace = Pace(Timing(floor_s=2.0, first_s=100.0))
    for _ in range(3):
        pace.announced(1.0)
    assert pace.deadline_s(0, missed) == expected
    pace._timing = Timing(floor_s=2.0, first_s=10.0)
    assert pace.deadline_s(0, missed) == min(expected, 10.0)
    for _ in range(32):
        pace.announced(500.0)
    assert pace.deadline_s(0, missed) == 502.0, "no less than usual, and no more than `first_s`"


def test_one_slow_round_moves_no_deadline_and_a_slow_region_does():
    pace = Pace(Timing(floor_s=2.0))
    for _ in range(9):
        pace.announced(1.0)
    pace.announced(500.0)
    assert pace.deadline_s(0) == 3.0
    for _ in range(32):
        pace.announced(20.0)
    assert pace.deadline_s(0) == 22.0


def test_a_pace_forgets_and_knows_no_time_before_it_has_seen_some():
    pace = Pace(Timing(floor_s=2.0, first_s=1.0))
    assert pace.transfer_s(10**9) == 0.0 and pace.deadline_s(0) == 2.0, "no less than the floor"
    pace.announced(-5.0), pace.announced(0.0)
    assert pace.deadline_s(0) == 2.0
    pace.announced(0.0)
    assert pace.deadline_s(0) == 2.0, "who comes before us is not late"
    pace.transferred(100, 1.0)
    assert pace.transfer_s(50) == 0.5 and pace.deadline_s(50) == 2.0 + 3 * 0.5
    for _ in range(32):
        pace.transferred(300, 1.0), pace.announced(1.0)
    assert pace.transfer_s(300) == 1.0 and pace.deadline_s(0) == 3.0
    assert len(pace._late_s) == len(pace._bytes_per_s) == 32
    pace.transferred(100, 0.0)  # of which the clock saw no time


@pytest.mark.parametrize(("dead_after_s", "wrong"), [(2.0, 0), (1.99, 1), (0.0, 1)])
def test_two_heartbeats_at_least_make_a_death(dead_after_s, wrong):
    assert len(Timing(beat_s=1.0, dead_after_s=dead_after_s).violations()) == wrong


def test_a_given_deadline_is_used():
    assert Pace(Timing(deadline_s=7.0)).deadline_s(10**12, 3) == 7.0


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_all_that_is_wrong_is_listed_before_anything_is_opened(make):
    with pytest.raises(ValueError) as caught:
        make(
            "memory://",
            3,
            3,
            "../up",
            b"short",
            timing=Timing(beat_s=0.0, deadline_s=-1.0),
            keep=0,
        )
    for part in ("memory://", "region 3 of 3", "../up", "5 bytes", "beat_s=0.0", "deadline_s=-1.0"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="less than two heartbeats"):
        make("file:///x", 0, 1, "run", timing=Timing(beat_s=3.0))


@pytest.mark.parametrize("name", ["a%20b", "a b", "a#b", "a?b", "100%", "%2F", "a|b", "[*]", "ü"])
def test_a_folder_of_any_name_has_one_url(tmp_path, name):
    """Files are created by links, and read by TensorStore."""
    store = Store((tmp_path / name).as_uri(), "run", MetricsCounter())
    assert store.create("a/b", b"1") and store.read("a/b") == b"1"
    store.write("c", b"2")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == [tmp_path / name / "run/a/b", tmp_path / name / "run/c"]


@pytest.mark.parametrize(
    "url, fix",
    [
        ("file:///data/100%/meet", "write % as %25"),
        ("file:///data/a#b", "write # as %23"),
        ("gs://bucket/a?b", "write ? as %3F"),
        ("file:///data/a|b", "write | as %7C"),
        ("file://data/meet", "give the whole path"),
        ("file:///data/a\\b", "choose another folder"),
        ("file:///data/a%5Cb", "choose another folder"),
    ],
)
def test_a_url_that_means_no_folder_is_refused_with_its_fix(url, fix):
    with pytest.raises(ValueError) as caught:
        exchange.store(url, 0, 2, "run")
    assert fix in str(caught.value)


@pytest.mark.parametrize("who", ["writes", "reads", "lists"])
def test_a_record_behind_false_ones_is_removed_with_them(store, slots, forged, who):
    """By the job that wrote it, and by another one, which removes what the dead have left."""
    job, slot = Job(1, 3), "round/1/2/announce.1.3"
    forged.create(slot, Announcement(None)), forged.create(slot, Announcement(None, {"step": 1}))
    store.write(f"{slot}.1", b"junk")
    log = CommitLog(store, slots)
    log.announce("1/2", job, Announcement(None, {"step": 4}))
    assert store.list("round/") == [f"{slot}.{n}" for n in range(3)]
    if who != "writes":
        slots = Slots(store, Seal("run", b"x" * 16))
        log = CommitLog(store, slots)
    if who == "reads":
        assert log.announced("1/2", {1: [3]})[1].terms == {"step": 4}
    if who == "lists":
        assert slots.numbered("round/1/2/announce.", 2) == {slot: (1, 3)}
    log.forget("1/2", job)
    assert store.list("round/") == []


def test_records_that_were_read_ahead_are_asked_for_no_more_until_they_are_forgotten(store, slots):
    log = CommitLog(store, slots)
    said = log.announce("1/2", Job(1, 3), Announcement(None, {"step": 4}))
    landed = Commit({}, {1: {"step": 4}}, 1, {1: 3})
    for name in ("1/2", "1/4"):
        log.commit(name, landed)
    jobs = {1: [3]}
    assert log.read_ahead(["1/2", "1/3", "1/4"], jobs) == {"1/2": landed}, "up to the first without"
    for key in store.list("round/"):
        store.delete(key)
    assert (log.committed("1/2"), log.committed("1/4")) == (landed, None)
    assert log.announced("1/2", jobs) == {1: said} and log.announced("1/2", {2: [1]}) == {}
    log.forget_ahead()
    assert log.committed("1/2") is None and log.announced("1/2", jobs) == {}


def test_bytes_that_were_read_ahead_are_given_once(store):
    """Who asks again gets what stands there now: they may have been damaged."""
    transport = StoreTransport(store, store.counter)
    transport.put("a", b"1")
    transport.get_ahead({"a": 1, "b": 1})
    transport.put("a", b"2"), transport.put("b", b"3")
    assert [transport.get("a", 1, [0]) for _ in range(2)] == [b"1", b"2"]
    assert transport.get("b", 1, [0]) == b"3", "it was not there"
    transport.get_ahead({"a": 1})
    transport.get_ahead({})
    transport.put("a", b"4")
    assert transport.get("a", 1, [0]) == b"4"


# -- requests and results ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "group", "wrong"),
    [
        ("k", (0, 1, 2), []),
        ("k", (1,), []),
        ("", (0, 1), ["the key is empty"]),
        ("k", (0, 2), ["must contain this region, 1"]),
        ("k", (1, 1), ["must be different regions of 0..2"]),
        ("k", (1, 3), ["must be different regions of 0..2"]),
        ("", (0, 3), ["empty", "different", "contain"]),
    ],
)
def test_groups_that_a_region_cannot_exchange_in(key, group, wrong):
    found = request.problems(key, group, region=1, count=3)
    assert len(found) == len(wrong) and all(part in one for part, one in zip(wrong, found))


def bare(heartbeat, **context):
    """The exchange of region 0 of two, which has these parts alone."""
    one = RemoteExchange.__new__(RemoteExchange)
    one.region, one.count, one._open, one._early = 0, 2, {}, {}
    one._context = SimpleNamespace(heartbeat=heartbeat, **context)
    return one


def test_shapes_that_payloads_of_an_exchange_must_have():
    """Those of this region's arrays that every region gets: all, or those beside the slices."""
    heartbeat = SimpleNamespace(own=Beat(1, epoch=1))
    one = bare(heartbeat, wait_list=WaitList(heartbeat))
    own, rest = {"x": ("int8", (2,))}, {"weight": ("float32", ())}
    given, reduction = {"x": np.zeros((1, 2), np.int8)}, SimpleNamespace(rest=rest)
    for arguments, expected in (
        ((given,), own),
        ((given, reduction), rest),
        (({}, reduction), rest),
        (({},), {}),
    ):
        found = one._make_request("k", None, *arguments).like
        assert found == {0: expected, 1: expected}


def test_what_arrives_is_put_into_rows():
    arrays = {r: {"x": np.float32([r, 10 * r])} for r in (0, 2)}
    like = {"x": ("float32", (2,))}
    found = request.arrange(arrays, like, 3, ours=True, seconds=1.5, waited=0.5)
    assert found.ours and found.participants.tolist() == [True, False, True]
    assert found.arrays["x"].tolist() == [[0, 0], [0, 0], [2, 20]]
    assert (found.seconds, found.waited, found.reduced) == (1.5, 0.5, None)
    none = request.arrange({}, like, 2)
    assert (
        not none.participants.any() and not none.ours and none.arrays["x"].tolist() == [[0, 0]] * 2
    )


def test_exchanges_that_land_together_are_waited_for_together():
    """Their deadlines run at the same time, not one after the other."""
    one = bare(SimpleNamespace(clock_s=7.0), timing=Timing(beat_s=0.01))
    dues = {k: SimpleNamespace(due=request.Due(), outcome=Future(), waited=0.0) for k in "abc"}
    one._open = dict(dues)
    one._stops, seen = lambda: False, []

    def reachable():
        seen.append([x.due.since_s for x in dues.values()])
        for key in "ab":
            if not one._open[key].outcome.done():
                one._open[key].outcome.set_result(None)
        return True

    one.reachable = reachable
    assert one.arrives(["a", "b"]) and seen == [[7.0, 7.0, None]]
    assert dues["a"].due.since_s == 7.0
    one.reachable = lambda: False
    assert not one.arrives(["a", "c"])
    assert [x.due.since_s for x in dues.values()] == [None, 7.0, None]


def test_the_wait_for_an_exchange_is_that_of_its_calls():
    record = Commit({0: Admitted(1, Payload("0", 8))}, {}, 0)
    arrays = {0: {"x": np.zeros(2, np.float32)}}
    asked = request.ExchangeRequest("k", "1/k", (0, 1))
    heartbeat = SimpleNamespace(clock_s=7.0, job=Job(0, 1))
    one = bare(heartbeat, counter=MetricsCounter())
    for waited, ours in ((0.0, True), (30.0, False)):
        outcome, heartbeat.job = Future(), Job(0, 1 if ours else 2)  # one came after it
        outcome.set_result(arrays)
        due = request.Due()
        waits = {"due": due, "outcome": outcome, "waited": waited, "request": asked}
        waits["shapes"] = {"x": ("float32", (2,))}
        one._open = {"k": SimpleNamespace(commit=record, reduced=None, seconds=1.5, **waits)}
        assert one.ready("k") and due.since_s is None
        found = one.finish("k")
        assert 0.0 <= found.waited - waited < 0.9 and found.seconds == 1.5 and not one._open
        assert found.ours is ours and found.participants.tolist() == [True, False]
        assert due.since_s == 7.0


def test_who_is_left_out_three_times_running_is_told_so_once(caplog):
    """And at the end of a run nothing has counted only where so many were sent."""
    one = bare(SimpleNamespace(job=Job(0, 1)))
    one._counted = collections.deque(maxlen=remote.RUNNING)
    ours = request.ExchangeRequest("k", "1/k", (0, 1), takes_part=True)
    theirs = Commit({1: Admitted(1, Payload("0", 8))}, {}, 1)
    both = Commit({0: Admitted(1, Payload("1", 8)), **theirs.admitted}, {}, 1)

    def told(*commits, how=ours):
        caplog.clear()
        for commit in commits:
            one._note_counted(how, commit)
        return caplog.text.count("was not counted in 3 exchanges running")

    assert not one.never_counted(0) and not one.never_counted(2)
    assert told(theirs, theirs, how=dataclasses.replace(ours, takes_part=False)) == 0
    assert told(theirs, theirs) == 0 and one.never_counted(2) and not one.never_counted(3)
    assert told(theirs, theirs) == 1 and one.never_counted(4)
    assert told(both, theirs, theirs) == 0 and not one.never_counted(7)
    assert told(theirs, theirs) == 1 and one.never_counted(9)


def test_a_false_record_takes_a_number_and_not_the_slot(store, slots, forged):
    """All readers find the same record, whenever the false one was written."""
    one, other = Agreed({"step": 1}), Agreed({"step": 2})
    assert slots.first("a", Agreed) is None and forged.create("a", other) == other
    assert slots.create("a", one) == one == slots.create("a", other) == slots.first("a", Agreed)
    assert slots.all_first({"a": Agreed, "b": Agreed}) == {"a": one}
    assert store.list("a") == ["a.0", "a.1"] and store.counter.read()["rejected_record"] >= 3


def test_a_signed_record_of_another_kind_is_passed_over_by_nobody(store, slots):
    slots.create("a", Agreed({"step": 1}))
    for read in (
        lambda: slots.first("a", Commit),
        lambda: slots.all_first({"a": Commit}),
        lambda: slots.create("a", Commit({}, {}, 0)),
    ):
        with pytest.raises(Unreadable, match="is signed as a record of this run"):
            read()
    assert store.list("a") == ["a.0"]
