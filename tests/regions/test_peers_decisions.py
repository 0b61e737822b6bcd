"""Whom a region asks for a payload and lets in, for how long it waits: without connections."""

import itertools
import pathlib
import threading
import time
from types import SimpleNamespace

import pytest
from cryptography import x509

from lowcomm_jax import exchange
from lowcomm_jax.store import serving
from lowcomm_jax.store.certificates import make_credentials
from lowcomm_jax.store.errors import Missing, Rejected
from lowcomm_jax.store.file_handles import PAYLOADS_KEPT
from lowcomm_jax.store.kv import MetricsCounter
from lowcomm_jax.store.peers_transport import PeersTransport
from lowcomm_jax.store.pulling import DeniedError, Partial
from lowcomm_jax.store.records import Beat
from lowcomm_jax.store.timing import Timing


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
    made = PeersTransport.__new__(PeersTransport)
    made._heartbeat, made._counter = beats, MetricsCounter()
    made._timing, made._closing = Timing(beat_s=0.01, answer_s=1.0), threading.Event()
    made._partials, made._patience, made._lock = {}, {}, threading.Lock()
    made._certificate, made._tls = "ours", lambda certificate: f"context of {certificate}"
    return made


THERE = Beat(1, address="https://a:1", certificate="theirs")


def test_a_region_is_let_in_once_by_the_certificate_of_its_heartbeat(monkeypatch, caplog):
    made, problems = apart(Beats(r1=THERE)), ["refused", ""]
    trusted = []
    made._server = SimpleNamespace(trust=trusted.append)
    monkeypatch.setattr(made, "_problem", lambda port: problems.pop(0))
    made._meet(1, THERE)
    assert trusted == ["theirs"] and not problems
    problems += ["refused"] * 9
    made._heartbeat.alive = {0}  # it is gone meanwhile
    made._meet(1, THERE)
    assert len(problems) == 8
    made._heartbeat.alive, made._timing = {0, 1}, Timing(beat_s=0.01, answer_s=0.001)
    assert not caplog.records
    made._meet(1, THERE)
    assert "region 0 cannot reach region 1 at a:1" in caplog.text and "(refused)" in caplog.text


def test_who_is_let_in_can_let_in_nobody():
    """What a region signs is trusted nowhere."""
    (found,) = x509.load_pem_x509_certificates(make_credentials(1).roots.encode())
    basic = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical and basic.value.ca is False


def test_a_port_is_that_of_the_heartbeat_with_its_certificate():
    made = apart(Beats())
    port = made._port(1, THERE)
    assert (port.address, port._context) == ("a:1", "context of theirs")
    for ours, theirs in (("ours", ""), ("", "theirs")):
        made._certificate = ours
        with pytest.raises(ValueError, match="certificates of another kind"):
            made._port(1, Beat(1, address="https://a:1", certificate=theirs))


def test_who_is_slow_gets_twice_the_time_up_to_a_limit(monkeypatch):
    made, allowed, slow = apart(Beats(r1=THERE)), [], [True]

    def pull(partial, port, name, allowed_s, check):
        allowed.append(allowed_s)
        if slow[0]:
            raise TimeoutError
        return True

    monkeypatch.setattr(Partial, "pull", pull)
    partial = Partial(6)
    for _ in range(4):
        with pytest.raises(TimeoutError):
            made._pull(1, "x", partial)
    assert not made._pull(1, "x", partial), "far too slow"
    assert allowed == [1, 2, 4, 8, 16]
    slow[0] = False
    allowed.clear()
    for _ in range(6):  # and half of it when that was plenty
        assert made._pull(1, "x", partial)
    assert allowed == [16, 8, 4, 2, 1, 1]


def test_a_pull_ends_when_its_region_dies_and_when_this_one_closes(monkeypatch):
    made = apart(beats := Beats(r1=THERE))
    dies = [False]

    def pull(partial, port, name, allowed_s, check):
        if dies[0]:
            beats.alive = {0}
        return check()

    monkeypatch.setattr(Partial, "pull", pull)
    assert made._pull(1, "x", Partial(6))
    dies[0] = True
    assert not made._pull(1, "x", Partial(6))
    dies[0], beats.alive = False, {0, 1}
    made._closing.set()
    assert not made._pull(1, "x", Partial(6))


def test_whom_a_payload_is_asked_of(monkeypatch):
    """Of all that may live and have a port, in turn; what came is kept for the next try."""
    beats = Beats(r1=THERE, r2=Beat(1), r3=THERE, r4=THERE)
    made, asked, answers = apart(beats), [], {}
    beats.alive = {0, 1, 2, 4}

    def pull(partial, port, name, allowed_s, check):
        asked.append(port)
        if isinstance(answer := answers.get(asked[-1], False), type):
            raise answer
        return answer

    monkeypatch.setattr(Partial, "pull", pull)
    monkeypatch.setattr(made, "_port", lambda holder, beat: holder)
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
    answers |= {1: OSError, 4: True}
    made._partials["x"].data[:] = list(b"sixth.")
    assert made.get("x", 6, everyone) == b"sixth."
    assert made._counter.read() == {"received": 6} and not made._partials


def test_parts_that_have_arrived_are_kept_for_a_while(monkeypatch):
    made, now = apart(Beats()), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    old, new = Partial(6), Partial(6)
    made._partials = {"old": old, "new": new}

    def tried(name, nbytes):
        with pytest.raises(Missing):
            made.get(name, nbytes, [1])
        return made._partials[name]

    now[0] += 100.0
    new.touched_s = now[0]
    now[0] += 20.0
    assert tried("old", 6) is old, "two minutes are not over yet"
    now[0] += 0.5
    assert tried("new", 7) is not new, "of another size"
    assert made._partials.keys() == {"new"}


@pytest.mark.parametrize(
    ("nbytes", "streams"),
    [(0, 1), ((8 << 20) - 1, 1), (8 << 20, 2), ((16 << 20) + 3, 4), (1 << 30, 4)],
)
def test_a_payload_is_cut_into_ranges_without_a_gap(nbytes, streams):
    partial = Partial(nbytes)
    assert len(partial.ranges) == streams and partial.missing == nbytes
    assert partial.ranges[0][0] == 0 and partial.ranges[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(partial.ranges))
    sizes = [stop - at for at, stop in partial.ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_new_process_is_given_the_newest_128_payloads():
    """Each takes a descriptor, of which the job has few."""
    own, nothing = make_credentials(0), lambda nbytes: None
    server = serving.PayloadServer("127.0.0.1:0", own, nothing, PAYLOADS_KEPT)

    def held():
        maps = pathlib.Path(f"/proc/{server.process.pid}/maps").read_text()
        return maps.count("memfd:payload")

    try:
        for number in range(131):
            server.hold(str(number), b"x")
        assert held() == 131, "the process that holds them serves them all"
        server.process.kill()
        server.process.wait()
        server.tend()
        assert held() == 128 == len(server._kept) and "3" in server._kept
    finally:
        server.close()
