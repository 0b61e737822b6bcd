"""Payloads by Arrow Flight with mutual TLS: who is let in, what strangers can do, what breaks."""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pyarrow.flight as flight
import pytest
from runtime import made_certificates
from runtime.faults import folder, forge, vanish
from runtime.party import LIKE, TIMING, Party, at_once, check, land, rounds, send, until
from runtime.proxy import Proxy
from runtime.test_same_numbers import METHODS, assert_same, expected
from runtime.test_separate_processes import start
from runtime.together import in_jobs

from experiments.processes import free_port
from lowcomm_jax import exchange
from lowcomm_jax.runtime import connect, serving
from lowcomm_jax.runtime.certificates import Authority, Credentials, fingerprint, host_name
from lowcomm_jax.runtime.payload_server import PayloadServer
from lowcomm_jax.runtime.streams import DeniedError, Partial, Streams

__all__ = ["start"]  # a fixture

JUNK = {
    "4 NULs": bytes(4),
    "16 NULs": bytes(16),
    "length of 2^62": (1 << 62).to_bytes(8, "little"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "half a hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "random": np.random.default_rng(0).bytes(1 << 16),
}


@pytest.fixture
def party(tmp_path):
    """Makes regions that pull from each other by Flight."""
    made = Party(exchange.peers, f"file://{tmp_path}/meet")
    yield made
    made.close()


def served(region):
    """The process that serves a region's payloads."""
    return region._context.transport._server


def throw(address, junk):
    """What a stranger does: connect, say something, and read what is answered."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    except OSError:
        pass  # It is shown the door, or there is none any more.


# -- strangers ----------------------------------------------------------------------------------


def test_junk_bytes_end_nothing(party):
    regions = party.run(2)
    before = [served(x).pid for x in regions]
    for number, junk in enumerate(JUNK.values()):
        for x in regions:
            throw(served(x).address, junk)
        rounds(regions, number, number + 1)
    # Not even the process that they reach.
    assert [served(x).pid for x in regions] == before


def test_two_jobs_under_junk_end_with_the_bits_of_the_run_in_one_process(between):
    addresses, thrown, over = [], [], threading.Event()
    make = between(2, kind=exchange.peers)

    def noted(region):
        made = make(region)
        addresses.append(served(made).address)
        return made

    def strangers():
        while not over.wait(0.01):
            for address in list(addresses):
                for junk in JUNK.values():
                    throw(address, junk)
                    thrown.append(junk)

    thrower = threading.Thread(target=strangers)
    thrower.start()
    try:
        jobs = in_jobs(noted, METHODS["local_sgd"](), 2, 9)
    finally:
        over.set()
        thrower.join()
    assert len(thrown) >= 2 * len(JUNK)
    assert_same(jobs, expected(METHODS["local_sgd"](), 2, 9), own_anchors=False)


@pytest.mark.slow
def test_real_jobs_survive_junk_and_leave_no_process_behind(start, tmp_path):
    jobs = [start("peers", f"file://{tmp_path}/meet", region, 2) for region in range(2)]
    jobs[0].wait_for(lambda landed: len(landed) >= 3)
    beats = [json.loads((tmp_path / f"meet/run/beat/{r}").read_bytes()) for r in range(2)]
    addresses = [json.loads(x["body"])["address"].removeprefix("grpc+tls://") for x in beats]
    for _ in range(20):
        for address in addresses:
            for junk in JUNK.values():
                throw(address, junk)
    reached = len(jobs[0].landed)
    for job in jobs:
        job.wait_for(lambda landed: len(landed) >= reached + 10)
    ends = [job.landed for job in jobs]
    for number in ends[0].keys() & ends[1].keys():
        assert [x[number]["part"] for x in ends] == [[0, 1]] * 2
        assert ends[0][number]["digest"] == ends[1][number]["digest"]
    for job, address in zip(jobs, addresses, strict=True):
        job.process.kill()
        until(lambda a=address: refused(a))


def refused(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("by", ["a kill", "no descriptors"])
def test_a_serving_process_that_ends_is_started_again_with_what_it_held(party, by):
    """As a fault of the library would end it; or because strangers hold all it may open."""
    regions = party.run(2)
    rounds(regions, 0, 1)
    server = served(regions[0])
    before, held, crowd = server.pid, server.names, []
    if by == "a kill":
        send(regions[:1], "1", 1)
        until(lambda: server.names > held)
        os.kill(before, signal.SIGKILL)
    else:
        many = len(os.listdir(f"/proc/{before}/fd")) + 8
        resource.prlimit(before, resource.RLIMIT_NOFILE, (many, many))
        host, _, port = server.address.rpartition(":")
        crowd = [socket.create_connection((host, int(port))) for _ in range(30)]
        until(lambda: len(os.listdir(f"/proc/{before}/fd")) >= many - 1)
        send(regions[:1], "1", 1)
    send(regions[1:], "1", 1)
    for arrived in land(regions, "1"):
        check(arrived, 2, [0, 1], 1)
    assert server.pid != before and server.names > held
    for stranger in crowd:
        stranger.close()
    rounds(regions, 2, 4)


def connected(region, **changes):
    """A client with what region 1 uses to reach `region`, but for some of it."""
    made, certificates = Authority(1), region._context.transport._authority
    theirs = certificates.certificate
    options = {
        "tls_root_certs": theirs,
        "cert_chain": certificates.issue(made.certificate.decode(), 1),
        "private_key": made.key,
        "override_hostname": host_name(region.region),
        "generic_options": [("grpc.use_local_subchannel_pool", 1)],
    }
    address = changes.pop("address", f"grpc+tls://{served(region).address}")
    return flight.FlightClient(address, **{**options, **changes})


def asked(client, name, nbytes):
    """All bytes of a payload."""
    ask = {"name": name, "nbytes": nbytes, "start": 0, "stop": nbytes, "chunk": nbytes}
    ticket = flight.Ticket(json.dumps(ask))
    table = client.do_get(ticket, flight.FlightCallOptions(timeout=5)).read_all()
    return table.column(0).to_numpy().tobytes()


def test_only_who_was_given_a_pass_is_let_in(party):
    (region,) = party.run(1)
    region._context.transport.keep("name", b"of the run")
    assert asked(connected(region), "name", 10) == b"of the run"
    stranger, other = Authority(1), Authority(0)
    own = {"cert_chain": stranger.certificate, "private_key": stranger.key}
    issued = {"cert_chain": other.issue(stranger.certificate.decode(), 1)}
    refused = {
        "no certificate": {"cert_chain": None, "private_key": None},
        "a certificate of one's own": own,
        "one of another authority of that name": {**own, **issued},
        "no TLS": {"address": f"grpc+tcp://{served(region).address}"},
    }
    for what, changes in refused.items():
        with pytest.raises(flight.FlightUnavailableError):
            asked(connected(region, **changes), "name", 10)
            pytest.fail(what)
    # A pass is worth nothing without its key, which never leaves the process that made it.
    with pytest.raises((flight.FlightUnavailableError, OSError)):
        asked(connected(region, private_key=stranger.key), "name", 10)


def test_a_region_does_not_take_payloads_from_a_stranger_at_the_others_address(party):
    """Whose certificate is not that of the heartbeat."""
    regions = party.run(2)
    stranger = Authority(1)
    end = Credentials(regions[0]._context.transport._authority.certificate, *stranger_end(stranger))
    server = PayloadServer("127.0.0.1:0", end, lambda nbytes: None)
    try:
        server.hold("name", b"forged")
        beat = regions[1]._context.heartbeat.own
        fake = msgspec.structs.replace(beat, address=f"grpc+tls://{server.address}")
        assert not regions[0]._context.transport._pull(1, fake, "name", Partial(6))
    finally:
        server.close()


def stranger_end(made):
    return made.certificate, made.key


def test_a_forged_certificate_lets_nobody_in(party):
    """A stranger who can write to the store says that it is a region."""
    regions = party.run(2)
    rounds(regions, 0, 1)
    stranger = Authority(1).certificate.decode()
    beat = regions[1]._context.heartbeat.own
    changes = {"counter": beat.counter + 1000, "certificate": stranger}
    forged = msgspec.structs.replace(beat, **changes)
    for _ in range(10):
        forge(party, "beat/1", forged)
        time.sleep(TIMING.beat_s / 4)
    assert regions[0].counts()["rejected_record"] > 0
    assert fingerprint(stranger) not in regions[0]._context.heartbeat.own.passes
    rounds(regions, 1, 2)


def alive(name):
    return [one for one in threading.enumerate() if one.name == name]


@pytest.mark.parametrize("mute", ["from the first", pytest.param("later", marks=pytest.mark.slow)])
def test_no_read_of_a_mute_host_outlives_its_connections(ends, mute):
    """The interpreter would end in the middle of Arrow: a completed process crashed so."""
    server, credentials = ends()
    server.hold("name", b"12345678")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "127.0.0.1:{1}".format(*silent.getsockname())
        address = server.address if mute == "later" else address
        streams = Streams(address, credentials, host_name(0), 1.0)
        if mute == "later":
            assert streams.get("name", Partial(8), 5.0, lambda pause: True)
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(0.5)
        until_s = time.monotonic() + 0.3
        check = lambda pause: time.monotonic() < until_s  # noqa: E731
        assert not streams.get("name", Partial(8), 300.0, check)
        assert alive("lowcomm-stream")
        began = time.monotonic()
        streams.close()
        assert time.monotonic() - began < 120 and not alive("lowcomm-stream")


def test_regions_with_certificates_of_two_kinds_say_so(tmp_path, party):
    made_certificates.write(tmp_path / "of the run", ["127.0.0.1"])
    regions = [party.region(0, 2), party.region(1, 2, certificates=f"{tmp_path}/of the run")]
    at_once(lambda x: x.join(20.0), regions)
    send(regions, "k")
    for x in regions:
        with pytest.raises(ValueError, match=r"another kind .* a folder of certificates, or none"):
            x.finish("k", LIKE)


# -- what breaks --------------------------------------------------------------------------------


@pytest.fixture
def ends():
    """`ends(sent)`: a serving process, and the credentials that reach it as region 0."""
    servers = []

    def make(sent=lambda nbytes: None):
        theirs, ours = Authority(0), Authority(1)
        roots = theirs.certificate
        server = PayloadServer("127.0.0.1:0", Credentials(roots, roots, theirs.key), sent)
        servers.append(server)
        chain = theirs.issue(ours.certificate.decode(), 1)
        return server, Credentials(roots, chain, ours.key)

    yield make
    for server in servers:
        server.close()


def pulled(address, credentials, name, partial, allowed_s=20.0):
    """Whether all of a payload came from region 0."""
    made = Streams(address, credentials, host_name(0), connect_s=5.0)
    try:
        waiter = threading.Event()
        return made.get(name, partial, allowed_s, lambda pause: not waiter.wait(pause))
    finally:
        made.close()


class Nothing(list):
    """What a server answers that does not hold a payload."""

    def cancel(self):
        pass


class Connection:
    """A `FlightClient` whose calls last until they are released."""

    ended = threading.Event()
    asked = threading.Event()
    released = threading.Event()

    def __init__(self, *_, **__):
        self.closed = False

    def do_get(self, *_):
        self.asked.set()
        self.released.wait(20)
        assert not self.closed
        return Nothing()

    def close(self):
        self.closed = True

    def __del__(self):  # as `FlightClient` does
        self.close()
        self.ended.set()


@pytest.mark.parametrize("ends_it", [lambda made: made.drop(0), lambda made: made.close()])
def test_a_connection_in_use_is_not_closed_under_a_call(ends_it, monkeypatch):
    """pyarrow's own client would end the process: a stream fails while another begins to read."""
    for event in (Connection.ended, Connection.asked, Connection.released):
        event.clear()
    monkeypatch.setattr(flight, "FlightClient", Connection)
    made, waiter = Streams("host:1", Credentials(b"", b"", b""), None, 1.0), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(made.get, "x", Partial(8), 20.0, lambda pause: not waiter.wait(pause))
        assert Connection.asked.wait(20)
        ended = pool.submit(ends_it, made)  # `close` waits for the call
        assert not Connection.ended.wait(0.2)
        Connection.released.set()
        ended.result(20)
        with pytest.raises(DeniedError):
            done.result(20)
    assert Connection.ended.wait(20)  # and is closed as soon as nobody uses it


def test_a_transfer_that_breaks_goes_on_where_it_was(ends):
    left = []
    server, credentials = ends(left.append)
    data = np.random.default_rng(1).bytes(24 << 20)
    server.hold("large", data)
    partial = Partial(len(data))
    with Proxy(server.address, cut_after=3 << 20, cuts=5) as proxy:
        # On a busy machine all that a cut call had brought may be lost, which ends its stream.
        assert any(pulled(proxy.address, credentials, "large", partial) for _ in range(2))
        assert proxy.cuts == 0 and proxy.connections > len(partial.ranges)
        assert proxy.passed < 1.5 * len(data)
    assert partial.whole() == data


def test_what_has_come_from_one_region_is_not_asked_of_the_next(ends):
    servers, counts = [ends(), ends()], []
    data = np.random.default_rng(2).bytes(16 << 20)
    partial = Partial(len(data))
    for number, (server, credentials) in enumerate(servers):
        server.hold("large", data)
        with Proxy(server.address, cut_after=2 << 20, cuts=99 * (1 - number)) as proxy:
            if number == 0:  # it dies once it has given something
                threading.Thread(target=die, args=(server, partial)).start()
            complete = pulled(proxy.address, credentials, "large", partial)
            assert complete == (number == 1)
            counts.append((partial.arrived, proxy.passed))
    (first, _), (_, second) = counts
    assert first > 0 and second < len(data) - first + (2 << 20)
    assert partial.whole() == data


def die(server, partial):
    until(lambda: partial.arrived)
    server.close()


@pytest.mark.parametrize("unread", [b"", b"sent"])
def test_the_serving_process_ends_with_the_job_that_began_it(unread, monkeypatch):
    """Without a traceback also where a killed job has not read what it was told."""
    ours, jobs = socket.socketpair()
    ours.sendall(unread)
    jobs.close()

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(serving.os, "_exit", end)
    with ours, pytest.raises(SystemExit) as ended:
        serving.receive(ours)
    assert ended.value.code == 0


def test_several_streams_bring_one_payload(ends):
    server, credentials = ends()
    for nbytes, streams in ((1 << 20, 1), (9 << 20, 2), (64 << 20, 4)):
        data = bytes(nbytes)
        server.hold(f"{nbytes}", data)
        with Proxy(server.address) as proxy:
            assert pulled(proxy.address, credentials, f"{nbytes}", partial := Partial(nbytes))
            assert proxy.connections == len(partial.ranges) == streams
        assert partial.whole() == data


def test_a_payload_that_is_not_held_is_denied(ends):
    server, credentials = ends()
    server.hold("name", b"seven..")
    for name, nbytes in (("other", 7), ("name", 6)):
        with pytest.raises(DeniedError):
            pulled(server.address, credentials, name, Partial(nbytes))
    server.drop("name")
    with pytest.raises(DeniedError):
        pulled(server.address, credentials, "name", Partial(7))


def test_a_server_that_hangs_is_given_up_after_the_time_it_has(ends):
    server, credentials = ends()
    server.hold("name", b"seven..")
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"no bytes came for 0\.5 s"):
        pulled(server.address, credentials, "name", Partial(7), allowed_s=0.5)


def test_who_fetches_does_not_keep_a_region_from_ending(ends):
    server, credentials = ends()
    server.hold("large", bytes(64 << 20))
    client = flight.FlightClient(
        f"grpc+tls://{server.address}",
        tls_root_certs=credentials.roots,
        cert_chain=credentials.chain,
        private_key=credentials.key,
        override_hostname=host_name(0),
    )
    ask = {"name": "large", "nbytes": 64 << 20, "start": 0, "stop": 64 << 20, "chunk": 1 << 20}
    reader = client.do_get(flight.Ticket(json.dumps(ask)))
    assert reader.read_chunk().data.num_rows == 1 << 20  # and no more of it is read
    server.close()
    with pytest.raises(flight.FlightError):
        reader.read_all()


def test_more_than_was_asked_for_is_refused():
    partial = Partial(10)
    with pytest.raises(ValueError, match="11 bytes came, 10 were due"):
        partial.ranges[0].add(bytes(11))


@pytest.mark.slow
def test_a_payload_of_more_than_two_gigabytes(ends):
    server, credentials = ends()
    data = np.random.default_rng(3).bytes(1 << 20) * 2100
    server.hold("larger", data)
    partial = Partial(len(data))
    assert pulled(server.address, credentials, "larger", partial)
    assert len(data) > 2**31 and partial.whole() == data


def test_memory_holds_no_more_than_the_kept_payloads(party):
    regions = party.run(2, keep=2)
    for number in range(8):
        rounds(regions, number, number + 1)
        time.sleep(1.5 * TIMING.beat_s)
    assert all(len(served(x).names) <= 2 * 3 for x in regions)
    assert not any(x._context.transport._partials for x in regions)


def test_a_payload_outlives_its_region_with_those_who_hold_it(party):
    regions = party.run(3, timing=dataclasses.replace(TIMING, deadline_s=1.0))
    send(regions[:2], "k")
    land(regions[:2], "k")
    vanish(regions[0])
    check(regions[2].skip("k", LIKE), 3, [0, 1])


def test_what_is_gone_with_everyone_who_held_it_is_said_to_be_lost(party):
    timing = dataclasses.replace(TIMING, deadline_s=0.5, answer_s=0.3)
    regions = party.run(2, timing=timing)
    send(regions[:1], "k")
    land(regions[:1], "k")
    vanish(regions[0])
    with pytest.raises(exchange.Lost, match="region 0 for 'k'"):
        regions[1].skip("k", LIKE)


def test_a_region_that_ends_waits_for_those_who_still_fetch(party):
    regions = party.run(2, timing=dataclasses.replace(TIMING, deadline_s=0.5))
    send(regions[:1], "k")
    check(land(regions[:1], "k")[0], 2, [0])
    with ThreadPoolExecutor(1) as pool:
        closes = pool.submit(regions[0].close, linger_s=60.0)
        with pytest.raises(TimeoutError):
            closes.result(4 * TIMING.beat_s)
        check(regions[1].skip("k", LIKE), 2, [0])
        closes.result(30.0)


# -- certificates of one's own, and refusals ----------------------------------------------------


def test_regions_use_certificates_that_they_were_given(tmp_path, party):
    made_certificates.write(tmp_path / "of the run", ["127.0.0.1"])
    made_certificates.write(tmp_path / "of strangers", ["127.0.0.1"])
    given = {"certificates": f"{tmp_path}/of the run"}
    regions = party.run(2, **given)
    rounds(regions, 0, 2)
    assert not (folder(party) / "run" / "pass").exists()
    with pytest.raises(flight.FlightUnavailableError):
        stranger = connect_with(tmp_path / "of strangers", served(regions[0]).address)
        asked(stranger, "name", 1)


def connect_with(place, address):
    files = [(place / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")]
    names = ("tls_root_certs", "cert_chain", "private_key")
    return flight.FlightClient(f"grpc+tls://{address}", **dict(zip(names, files)))


def test_certificates_that_cannot_be_used_are_refused_together(tmp_path, party):
    made_certificates.write(tmp_path / "one", ["127.0.0.1"])
    made_certificates.write(tmp_path / "two", ["127.0.0.1"])
    (tmp_path / "one" / "ca.crt").unlink()
    (tmp_path / "one" / "tls.key").write_bytes((tmp_path / "two" / "tls.key").read_bytes())
    with pytest.raises(ValueError) as caught:
        party.region(0, 1, certificates=f"{tmp_path}/one")
    for part in ("ca.crt cannot be read (No such file", "tls.key is not the key of tls.crt"):
        assert part in str(caught.value)
    (tmp_path / "two" / "tls.crt").write_bytes(b"\0junk")
    with pytest.raises(ValueError, match=r"tls.crt is not PEM of what it should be"):
        party.region(0, 1, certificates=f"{tmp_path}/two")


def test_certificates_for_another_host_are_refused_at_the_start(tmp_path, party):
    made_certificates.write(tmp_path / "certificates", ["elsewhere.example"])
    with pytest.raises(ValueError, match=r"cannot connect to itself .* name"):
        party.region(0, 1, certificates=f"{tmp_path}/certificates")


def test_an_address_that_is_taken_is_refused(party):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = "127.0.0.1:{1}".format(*other.getsockname())
        with pytest.raises(
            ValueError, match=f"'{address}' cannot be listened on .*: give HOST:PORT"
        ):
            party.region(0, 1, address=address)


@pytest.mark.parametrize("given", [False, True], ids=["passes", "certificates"])
def test_regions_behind_a_map_of_ports_listen_elsewhere(party, tmp_path, given):
    """Each announces the port of a proxy, which hands on to the one that it listens on."""
    options = {}
    if given:
        made_certificates.write(tmp_path / "of the run", ["127.0.0.1"])
        options["certificates"] = f"{tmp_path}/of the run"
    inside = [free_port() for _ in range(2)]
    with contextlib.ExitStack() as held:
        maps = [held.enter_context(Proxy(f"127.0.0.1:{port}")) for port in inside]
        regions = [
            party.region(r, 2, address=maps[r].address, listen=f"0.0.0.0:{inside[r]}", **options)
            for r in range(2)
        ]
        at_once(lambda x: x.join(20.0), regions)
        rounds(regions, 0, 2)
        told = [x._context.heartbeat.own.address for x in regions]
        assert told == [f"grpc+tls://{one.address}" for one in maps]
        assert all(one.connections for one in maps)


def test_a_free_port_is_announced_also_where_all_addresses_are_listened_on(party):
    made = party.region(0, 1, address="127.0.0.1:0", listen="0.0.0.0:0")
    made.join(20.0)
    assert made._context.heartbeat.own.address == f"grpc+tls://127.0.0.1:{served(made).port}"


def test_addresses_that_nobody_reaches_are_refused(party):
    with pytest.raises(ValueError) as caught:
        party.region(0, 1, address="0.0.0.0:7000", listen="nowhere")
    assert "address='0.0.0.0:7000' is no address of one machine" in str(caught.value)
    assert "listen='nowhere': give HOST:PORT" in str(caught.value)


def test_what_cannot_be_is_refused_with_its_fix(party, monkeypatch):
    def refused(*parts, **options):
        with pytest.raises(ValueError) as caught:
            party.region(0, 1, **options)
        for part in parts:
            assert part in str(caught.value)

    find = connect.importlib.util.find_spec
    monkeypatch.setattr(
        connect.importlib.util, "find_spec", lambda x: None if x == "pyarrow" else find(x)
    )
    refused(
        "needs pyarrow", "pip install 'lowcomm_jax[flight]'", "exchange=store", "keep=0", keep=0
    )
