"""Whom a region asks for a payload by Flight, for how long, and with which pass: no connections."""

import itertools
import json
import threading
import time
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest
from cryptography import x509

from lowcomm_jax import exchange
from lowcomm_jax.runtime import flight_transport, payload_server, streams
from lowcomm_jax.runtime.certificates import Authority, Credentials, fingerprint, host_name
from lowcomm_jax.runtime.errors import Missing, Rejected
from lowcomm_jax.runtime.flight_transport import FlightTransport
from lowcomm_jax.runtime.kv import MetricsCounter
from lowcomm_jax.runtime.payload_server import PayloadServer
from lowcomm_jax.runtime.records import Beat
from lowcomm_jax.runtime.streams import DeniedError, Partial
from lowcomm_jax.runtime.timing import Pace, Timing


class Beats:
    """What is known of other regions; region 0 is this one."""

    def __init__(self, **beats):
        self.region, self.told = 0, []
        self.others = {int(name[1:]): beat for name, beat in beats.items()}
        self.alive = {0, *self.others}

    def latest(self):
        return self.others

    def living(self, certain=True):
        return self.alive

    def update(self, **changes):
        self.told.append(changes)


def apart(beats):
    """A transport of these beats, without a server and without connections."""
    made = FlightTransport.__new__(FlightTransport)
    made._heartbeat, made._counter, made._pace = beats, MetricsCounter(), Pace(Timing())
    made._timing, made._closing = Timing(beat_s=0.01, answer_s=1.0), threading.Event()
    made._passes, made._streams, made._partials, made._patience = {}, {}, {}, {}
    made._left = []
    made._lock = threading.Lock()
    made._authority = Authority(0)
    made._credentials = Credentials(b"roots", b"chain", b"key")
    return made


def test_a_pass_is_issued_once_to_each_that_may_live():
    theirs = {r: Authority(r).certificate.decode() for r in (1, 2)}
    beats = Beats(r1=Beat(1, certificate=theirs[1]), r2=Beat(1), r3=Beat(1, certificate=theirs[2]))
    made = apart(beats)
    beats.alive = {0, 1, 2}
    made._issue_all(made._authority), made._issue_all(made._authority)
    (first,) = beats.told
    assert first["passes"].keys() == {fingerprint(theirs[1])}
    beats.alive = {0, 1, 3}
    made._issue_all(made._authority)
    assert beats.told[1]["passes"].keys() == {fingerprint(x) for x in theirs.values()}
    assert beats.told[1]["passes"].items() > first["passes"].items(), "the first one stands"
    beats.alive = {0, 3}
    made._issue_all(made._authority)
    assert beats.told[2]["passes"].keys() == {fingerprint(theirs[2])}


def test_who_has_a_pass_can_issue_none():
    """A region signs as an authority; what it signs for others is none."""
    ours, theirs = Authority(0), Authority(1)
    issued = ours.issue(theirs.certificate.decode(), 1)
    for pem, may in ((ours.certificate, True), (issued, False)):
        found = x509.load_pem_x509_certificate(pem).extensions
        basic = found.get_extension_for_class(x509.BasicConstraints)
        assert basic.critical and basic.value.ca is may
        assert basic.value.path_length == (0 if may else None)
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host_name(1)]


def test_a_pass_is_the_one_for_our_certificate():
    made = apart(beats := Beats(r1=Beat(1, certificate="theirs")))
    mine = fingerprint(made._certificate)
    for passes in ({"other": "x"}, {mine: "ours"}):
        beats.others[1] = Beat(1, certificate="theirs", passes=passes)
        made._timing = Timing(beat_s=0.01, answer_s=0.05)
        assert made._pass(1, "theirs") == passes.get(mine)
    assert made._pass(1, "another") is None
    beats.alive = {0}
    assert made._pass(1, "theirs") is None


def test_a_connection_is_kept_as_long_as_it_leads_to_the_same_place(monkeypatch):
    made = apart(Beats())
    given = []
    monkeypatch.setattr(flight_transport, "Streams", lambda *args: given.append(args) or object())
    monkeypatch.setattr(made, "_pass", lambda holder, certificate: "issued")
    beat = Beat(1, address="grpc+tls://a:1", certificate="theirs")
    first = made._to(1, beat)
    assert given == [("a:1", Credentials(b"theirs", b"issued", b"key"), host_name(1), 1.0)]
    assert made._to(1, msgspec.structs.replace(beat, counter=9)) is first
    for change in ({"address": "grpc+tls://a:2"}, {"certificate": "new"}):
        beat = msgspec.structs.replace(beat, **change)
        assert made._to(1, beat) is not first and made._to(1, beat) is made._to(1, beat)
    assert len(given) == 3
    with pytest.raises(ValueError, match="certificates of another kind"):
        made._to(1, msgspec.structs.replace(beat, certificate=""))
    monkeypatch.setattr(made, "_pass", lambda holder, certificate: None)
    assert made._to(2, beat) is None


def test_who_is_slow_gets_twice_the_time_up_to_a_limit(monkeypatch):
    made, allowed, slow = apart(Beats(r1=Beat(1, address="a"))), [], [True]

    def get(name, partial, allowed_s, check):
        allowed.append(allowed_s)
        if slow[0]:
            raise TimeoutError
        return True

    monkeypatch.setattr(made, "_to", lambda holder, beat: SimpleNamespace(get=get))
    partial = Partial(6)
    expected_s = 1.0 + 4 * partial.chunk / 1e6
    for _ in range(4):
        with pytest.raises(TimeoutError):
            made._pull(1, None, "x", partial)
    assert not made._pull(1, None, "x", partial), "far too slow"
    assert allowed == pytest.approx([expected_s * 2**n for n in range(5)])
    slow[0] = False
    allowed.clear()
    for _ in range(6):  # and half of it when that was plenty
        assert made._pull(1, None, "x", partial)
    assert allowed == pytest.approx([expected_s * max(2 ** (4 - n), 1) for n in range(6)])
    made._pace.transferred(partial.chunk, 2.0)
    allowed.clear()
    made._pull(1, None, "x", partial)
    assert allowed == pytest.approx([1.0 + 4 * 2.0])


def test_a_pull_ends_when_its_region_dies_and_when_this_one_closes(monkeypatch):
    made = apart(beats := Beats(r1=Beat(1, address="a")))
    streams = SimpleNamespace(get=lambda name, partial, allowed_s, check: check(0.0))
    monkeypatch.setattr(made, "_to", lambda holder, beat: streams)
    assert made._pull(1, None, "x", Partial(6))
    beats.alive = {0}
    assert not made._pull(1, None, "x", Partial(6))
    beats.alive = {0, 1}
    made._closing.set()
    assert not made._pull(1, None, "x", Partial(6))


def test_whom_a_payload_is_asked_of(monkeypatch):
    """Of all that may live and have a port, in turn; what came is kept for the next try."""
    there = Beat(1, address="a")
    beats = Beats(r1=there, r2=Beat(1), r3=there, r4=there)
    made, asked, answers = apart(beats), [], {}
    beats.alive = {0, 1, 2, 4}

    def pull(holder, beat, name, partial):
        asked.append(holder)
        if isinstance(answer := answers.get(holder, False), type):
            raise answer
        return answer

    monkeypatch.setattr(made, "_pull", pull)
    everyone = [1, 0, 2, 3, 4, 7]
    with pytest.raises(Missing):
        made.get("x", 6, everyone)
    assert asked == [1, 4] and made._partials.keys() == {"x"}
    cases = {
        Rejected: {1: DeniedError},  # who announced it does not have it
        Missing: {4: DeniedError},
        exchange.StoreUnavailable: {1: DeniedError, 4: TimeoutError},
    }
    for error, given in cases.items():
        answers.clear(), answers.update(given)
        with pytest.raises(error):
            made.get("x", 6, everyone)
    answers |= {1: TimeoutError, 4: True}
    made._partials["x"].ranges[0].add(b"sixth.")
    assert made.get("x", 6, everyone) == b"sixth."
    assert made._counter.read() == {"received": 6} and not made._partials


def test_parts_that_have_arrived_are_kept_for_a_while(monkeypatch):
    made, now = apart(Beats()), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    old, new = Partial(6), Partial(6)
    made._partials = {"old": old, "new": new}
    now[0] += 100.0
    new.touched_s = now[0]
    now[0] += 20.0
    assert made._take_partial("old", 6) is old, "two minutes are not over yet"
    made._partials["old"] = old
    now[0] += 0.5
    assert made._take_partial("new", 7) is not new, "of another size"
    assert not made._partials


@pytest.mark.parametrize(
    ("nbytes", "streams", "chunk"),
    [
        (0, 1, 256 << 10),
        ((8 << 20) - 1, 1, 256 << 10),
        (8 << 20, 2, 256 << 10),
        ((16 << 20) + 3, 4, 256 << 10),
        (64 << 20, 4, 1 << 20),
        (4 << 30, 4, 16 << 20),
    ],
)
def test_a_payload_is_cut_into_ranges_without_a_gap(nbytes, streams, chunk):
    partial = Partial(nbytes)
    assert (len(partial.ranges), partial.chunk) == (streams, chunk)
    ends = [(part.at, part.stop) for part in partial.ranges]
    assert ends[0][0] == 0 and ends[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert max(b - a for a, b in ends) - min(b - a for a, b in ends) <= 1
    assert partial.arrived == 0 and partial.complete is (nbytes == 0)


def test_a_payload_is_complete_when_all_ranges_are():
    partial = Partial(8 << 20)
    first, second = partial.ranges
    second.add(bytes(4 << 20))
    assert partial.arrived == 4 << 20 and not partial.complete
    first.add(b"x" * (4 << 20))
    assert partial.complete and partial.whole() == b"x" * (4 << 20) + bytes(4 << 20)
    with pytest.raises(ValueError, match="0 bytes came, 0 were due"):
        first.add(b"")


def test_a_new_process_is_given_the_newest_128_payloads(monkeypatch):
    """Each takes a descriptor, of which a process has few."""
    process = SimpleNamespace(port=1, ended=False, end=lambda: None)
    monkeypatch.setattr(payload_server, "_Process", lambda settings, sent: process)
    server = PayloadServer("127.0.0.1:0", Credentials(b"roots", b"chain", b"key"), print)
    monkeypatch.setattr(server, "_tell", lambda asked, payload=None: None)
    for number in range(131):
        server.hold(str(number), b"x")
    assert list(server._kept) == [str(number) for number in range(3, 131)]
    assert len(server.names) == 131, "the process that holds them serves them all"
    server.close()


def test_a_connection_that_breaks_is_let_go_of_and_the_rest_asked_for_over_a_new_one():
    connections, asked = ["first", "second"], []

    def do_get(ticket, options):
        where = json.loads(ticket.ticket)
        asked.append((connections[0], where["start"], where["stop"]))
        yield SimpleNamespace(data=pa.record_batch({"x": pa.array([1, 2, 3, 4], pa.uint8())}))
        raise pa.ArrowException("the connection is reset")

    server = SimpleNamespace(
        client=lambda number: SimpleNamespace(do_get=do_get), drop=connections.pop
    )
    partial = Partial(8)
    read = streams._Read(server, 0, "name", partial, *partial.ranges, 1.0)
    read._thread.join(10)
    assert partial.whole() == bytes([1, 2, 3, 4]) * 2
    assert asked == [("first", 0, 8), ("second", 4, 8)] and not connections
