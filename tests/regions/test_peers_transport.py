"""Payloads by HTTPS with certificates: who is let in, what strangers can do, what breaks."""

import contextlib
import dataclasses
import http.client
import os
import pathlib
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from regions import made_certificates
from regions.faults import folder, forge, vanish
from regions.party import (
    LIKE,
    TIMING,
    Party,
    at_once,
    check,
    land,
    listen_to,
    over_peers,
    rounds,
    send,
    until,
)
from regions.proxy import Proxy
from regions.test_same_numbers import METHODS, assert_same, expected
from regions.together import in_jobs

from experiments.processes import free_port
from lowcomm_jax import exchange
from lowcomm_jax.store import serving
from lowcomm_jax.store.certificates import make_credentials, read_credentials
from lowcomm_jax.store.pulling import DeniedError, Partial, Port
from lowcomm_jax.store.serving import PayloadServer, tls_context

JUNK = {
    "4 NULs": bytes(4),
    "16 NULs": bytes(16),
    "length of 2^62": (1 << 62).to_bytes(8, "little"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "random": np.random.default_rng(0).bytes(1 << 16),
}


@pytest.fixture
def party(tmp_path):
    """Makes regions that pull from each other."""
    made = Party(over_peers, f"file://{tmp_path}/meet")
    yield made
    made.close()


def served(region):
    """The process that serves a region's payloads."""
    return region._context.transport._server


def connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def throw(address, junk):
    """What a stranger does: connect, say something, and read what is answered."""
    try:
        with connect(address) as stranger:
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    except OSError:
        pass  # It is shown the door, or there is none any more.


# -- strangers ----------------------------------------------------------------------------------


def test_two_jobs_under_junk_end_with_the_bits_of_the_run_in_one_process(between):
    """Nothing ends: not even the processes that it reaches."""
    servers, thrown, over = {}, [], threading.Event()
    make = between(2, kind=over_peers)

    def noted(region):
        made = make(region)
        servers[served(made)] = served(made).process.pid
        return made

    def strangers():
        while not over.wait(0.01):
            for server in list(servers):
                for junk in JUNK.values():
                    throw(server.address, junk)
                    thrown.append(junk)

    thrower = threading.Thread(target=strangers)
    thrower.start()
    try:
        jobs = in_jobs(noted, METHODS["local_sgd"](), 2, 9)
    finally:
        over.set()
        thrower.join()
    assert len(thrown) >= 2 * len(JUNK)
    assert [server.process.pid for server in servers] == [*servers.values()]
    assert_same(jobs, expected(METHODS["local_sgd"](), 2, 9), own_anchors=False)


def refused(address):
    try:
        connect(address).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("by", ["a kill", "a stop", "no descriptors"])
def test_a_serving_process_that_ends_or_hangs_is_started_again_with_what_it_held(
    party, by, monkeypatch
):
    """As a fault of a library would end it; or because it has no descriptor left."""
    monkeypatch.setattr(serving, "_ANSWERS_WITHIN_S", 2.0)
    regions = party.run(2)
    rounds(regions, 0, 1)
    server = served(regions[0])
    before, held, crowd = server.process.pid, set(server._kept), []
    if by == "no descriptors":
        many = len(os.listdir(f"/proc/{before}/fd")) + 8
        resource.prlimit(before, resource.RLIMIT_NOFILE, (many, many))
        crowd = [connect(server.address) for _ in range(30)]
        until(lambda: len(os.listdir(f"/proc/{before}/fd")) >= many - 1)
        send(regions[:1], "1", 1)
    else:
        send(regions[:1], "1", 1)
        until(lambda: set(server._kept) > held)
        os.kill(before, signal.SIGKILL if by == "a kill" else signal.SIGSTOP)
    send(regions[1:], "1", 1)
    for arrived in land(regions, "1"):
        check(arrived, 2, [0, 1], 1)
    assert server.process.pid != before
    for stranger in crowd:
        stranger.close()
    rounds(regions, 2, 4)


def asked(port, name, nbytes):
    """All bytes of a payload."""
    with port.connected(5.0) as connection:
        connection.request("GET", f"/{name}", headers={"Range": f"bytes=0-{nbytes - 1}"})
        return connection.getresponse().read()


def test_only_who_shows_a_certificate_that_is_trusted_is_let_in(ends):
    server, port, theirs = ends()
    server.hold("name", b"of the run")
    assert asked(port, "name", 10) == b"of the run"
    stranger = tls_context(ssl.PROTOCOL_TLS_CLIENT, make_credentials(1), check_host=False)
    stranger.load_verify_locations(cadata=theirs)

    def without(most):
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.maximum_version = False, most
        made.load_verify_locations(cadata=theirs)
        return made

    refused = {
        "its own": stranger,
        "none": without(ssl.TLSVersion.TLSv1_3),
        "old TLS": without(ssl.TLSVersion.TLSv1_2),
    }
    for what, context in refused.items():
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asked(Port(server.address, context), "name", 10)
            pytest.fail(what)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain = http.client.HTTPConnection(server.address, timeout=5)
        plain.request("GET", "/name")
        plain.getresponse()
    assert asked(port, "name", 10) == b"of the run"


def test_no_key_is_written_readable(tmp_path):
    made_certificates.write(tmp_path / "given", ["127.0.0.1"])
    for own in (make_credentials(0), read_credentials(str(tmp_path / "given"))):
        assert "BEGIN ENCRYPTED PRIVATE KEY" in own.chain
        assert "BEGIN PRIVATE KEY" not in own.chain and own.passphrase not in own.chain
        with pytest.raises(ssl.SSLError):
            tls_context(ssl.PROTOCOL_TLS_CLIENT, own._replace(passphrase="guessed"))


def test_strangers_that_say_nothing_keep_no_region_out(ends):
    """The oldest of them make way."""
    server, port, _ = ends()
    server.hold("name", b"of the run")
    crowd = []
    for _ in range(3 * serving._MOST_STRANGERS):
        crowd.append(connect(server.address))
    assert asked(port, "name", 10) == b"of the run"
    gone = 0
    for stranger in crowd[: serving._MOST_STRANGERS]:
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
        gone += 1
    assert gone == serving._MOST_STRANGERS
    for stranger in crowd:
        stranger.close()


def test_a_handshake_has_a_limit_of_time_in_all(monkeypatch):
    """Also for who sends a byte now and then."""
    monkeypatch.setattr(serving, "_HANDSHAKE_S", 0.5)
    server = serving._Served("127.0.0.1", 0, make_credentials(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with connect("{}:{}".format(*server.server_address)) as stranger:
            began, hello = time.monotonic(), iter(JUNK["half a hello"] + bytes(400))
            with pytest.raises(ConnectionError):
                for one in hello:
                    stranger.sendall(bytes([one]))
                    time.sleep(0.05)
        assert time.monotonic() - began > 0.4 and len(list(hello)) > 200, "long before the last"
    finally:
        server.shutdown()
        server.server_close()


def test_a_region_does_not_take_payloads_from_a_stranger_at_the_others_address(party):
    """Whose certificate is not that of the heartbeat."""
    regions = party.run(2)
    stranger = make_credentials(1)
    server = PayloadServer("127.0.0.1:0", stranger, lambda nbytes: None, kept=9)
    server.trust(regions[0]._context.transport._certificate)
    try:
        server.hold("name", b"forged")
        transport = regions[0]._context.transport
        theirs = transport._others()[1]
        fake = msgspec.structs.replace(theirs, address=f"https://{server.address}")
        port = transport._port(1, fake)
        partial = Partial(6)
        assert not partial.pull(port, "name", 5.0, lambda: True)
        assert "certificate verify failed" in partial.problem
        # And with the stranger's own certificate it would.
        port = transport._port(1, msgspec.structs.replace(fake, certificate=stranger.roots))
        assert Partial(6).pull(port, "name", 5.0, lambda: True)
    finally:
        server.close()


def test_a_forged_certificate_lets_nobody_in(party):
    """A stranger who can write to the store says that it is a region."""
    regions = party.run(2)
    rounds(regions, 0, 1)
    stranger = make_credentials(1).roots
    beat = regions[1]._context.heartbeat.own
    changes = {"counter": beat.counter + 1000, "certificate": stranger}
    forged = msgspec.structs.replace(beat, **changes)
    for _ in range(10):
        forge(party, "beat/1", forged)
        time.sleep(TIMING.beat_s / 4)
    assert regions[0].counts()["rejected_record"] > 0
    trusted = served(regions[0])._settings["own"].roots
    assert beat.certificate in trusted and stranger not in trusted
    rounds(regions, 1, 2)


def test_regions_with_certificates_of_two_kinds_say_so(tmp_path, party):
    made_certificates.write(tmp_path / "of the run", ["127.0.0.1"])
    regions = [party.region(0, 2), party.region(1, 2, certificates=f"{tmp_path}/of the run")]
    at_once(lambda x: x.join(20.0), regions)
    send(regions, "k")
    for x in regions:
        with pytest.raises(ValueError, match=r"another kind .* a folder of certificates, or none"):
            x.finish("k")


# -- what breaks --------------------------------------------------------------------------------


@pytest.fixture
def ends():
    """`ends(sent)`: a serving process, its port as region 1 reaches it, and its certificate."""
    servers = []

    def make(sent=lambda nbytes: None):
        theirs, ours = make_credentials(0), make_credentials(1)
        server = PayloadServer("127.0.0.1:0", theirs, sent, kept=9)
        servers.append(server)
        server.trust(ours.roots)
        ours = ours._replace(roots=theirs.roots)
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, ours, check_host=False)
        return server, Port(server.address, context), theirs.roots

    yield make
    for server in servers:
        server.close()


def pulled(port, name, partial, allowed_s=20.0, at=None):
    """Whether all of a payload came; `at`: through a proxy there."""
    port = Port(port.address, port._context, at)
    return partial.pull(port, name, allowed_s, lambda: True)


def test_a_transfer_that_breaks_goes_on_where_it_was(ends):
    server, port, _ = ends()
    data = np.random.default_rng(1).bytes(24 << 20)
    server.hold("large", data)
    partial = Partial(len(data))
    with Proxy(server.address, cut_after=3 << 20, cuts=5) as proxy:
        # On a busy machine all that a cut call had brought may be lost, which ends its range.
        assert any(pulled(port, "large", partial, at=proxy.address) for _ in range(2))
        assert proxy.cuts == 0 and proxy.connections > len(partial.ranges)
        assert proxy.passed < 1.5 * len(data)
    assert partial.data.tobytes() == data


def test_what_has_come_from_one_region_is_not_asked_of_the_next(ends):
    made, counts = [ends(), ends()], []
    data = np.random.default_rng(2).bytes(16 << 20)
    partial = Partial(len(data))
    for number, (server, port, _) in enumerate(made):
        server.hold("large", data)
        with Proxy(server.address, cut_after=2 << 20, cuts=99 * (1 - number)) as proxy:
            if number == 0:  # it dies once it has given something
                threading.Thread(target=die, args=(server, partial)).start()
            assert pulled(port, "large", partial, at=proxy.address) == (number == 1)
            counts.append((len(data) - partial.missing, proxy.passed))
    (first, _), (_, second) = counts
    assert first > 0 and second < len(data) - first + (2 << 20)
    assert partial.data.tobytes() == data


def test_a_slow_link_on_which_bytes_come_is_not_broken(ends):
    server, port, _ = ends()
    data = np.random.default_rng(3).bytes(1 << 20)
    server.hold("slow", data)
    with Proxy(server.address, bytes_per_s=500_000) as proxy:
        partial, began = Partial(len(data)), time.monotonic()
        assert pulled(port, "slow", partial, allowed_s=1.0, at=proxy.address)
        assert time.monotonic() - began > 2.0 and proxy.connections == 1
    assert partial.data.tobytes() == data


def die(server, partial):
    until(lambda: partial.missing < partial.data.size)
    server.close()


def test_the_serving_process_ends_with_the_job_that_began_it():
    """Without a traceback also where a killed job has not read what it was told."""
    program = """
import os
from lowcomm_jax.store import certificates, serving
server = serving.PayloadServer("127.0.0.1:0", certificates.make_credentials(0), print, 9)
server._pipe.send_bytes(b"{}")
print(server.address, flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    address = done.stdout.split()[-1]
    until(lambda: refused(address))
    assert "Traceback" not in done.stderr


def test_several_connections_bring_one_payload_and_what_has_left_is_counted(ends):
    left, sizes = [], {1 << 20: 1, 9 << 20: 2, 64 << 20: 4}
    server, port, _ = ends(left.append)
    for nbytes, streams in sizes.items():
        data = bytes(nbytes)
        server.hold(f"{nbytes}", data)
        with Proxy(server.address) as proxy:
            assert pulled(port, f"{nbytes}", partial := Partial(nbytes), at=proxy.address)
            assert proxy.connections == len(partial.ranges) == streams
        assert partial.data.tobytes() == data
    server.close()
    assert sum(left) == sum(sizes)


def test_a_payload_that_is_not_held_is_denied(ends):
    server, port, _ = ends()
    server.hold("name", b"seven..")
    for name, nbytes in (("other", 7), ("name", 6), ("name", 8)):
        with pytest.raises(DeniedError):
            pulled(port, name, Partial(nbytes))
    server.drop("name")
    with pytest.raises(DeniedError):
        pulled(port, "name", Partial(7))


@pytest.mark.parametrize("mute", ["from the first", "after a while"])
def test_a_mute_host_is_given_up_after_the_time_it_has(ends, mute):
    server, port, _ = ends()
    data = np.random.default_rng(4).bytes(1 << 20)
    server.hold("name", data)
    partial = Partial(len(data))
    if mute == "from the first":
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"no bytes came for 0\.5 s"):
            pulled(port, "name", partial, allowed_s=0.5)
        return
    with Proxy(server.address, bytes_per_s=500_000) as proxy:
        stop = lambda: partial.missing < len(data) and proxy.pause()  # noqa: E731
        thread = threading.Thread(target=until, args=(stop,))
        thread.start()
        with pytest.raises(TimeoutError, match=r"no bytes came for 0\.5 s"):
            pulled(port, "name", partial, allowed_s=0.5, at=proxy.address)
        thread.join()
        assert 0 < partial.missing < len(data)
        proxy.go_on()
        assert pulled(port, "name", partial, at=proxy.address)
    assert partial.data.tobytes() == data


def test_a_pull_that_is_given_up_adds_nothing_and_keeps_no_process_from_ending(ends):
    server, port, _ = ends()
    server.hold("name", bytes(1 << 20))
    partial = Partial(1 << 20)
    with Proxy(server.address, bytes_per_s=200_000) as proxy:
        at = Port(port.address, port._context, proxy.address)
        assert not partial.pull(at, "name", 60.0, lambda: partial.missing == 1 << 20)
        assert not [x for x in threading.enumerate() if x.name == "lowcomm-read"]
    # A connection that broke is made again, and hangs: that is not waited for, either.
    with Proxy(server.address, cut_after=1 << 18, cuts=1, bytes_per_s=1_000_000) as proxy:
        at, began = Port(port.address, port._context, proxy.address), time.monotonic()
        check = lambda: proxy.cuts or (proxy.pause() and proxy.connections < 2)  # noqa: E731
        assert not Partial(1 << 20).pull(at, "name", 60.0, check)
        assert time.monotonic() - began < 30.0
        proxy.go_on()
    # A host that says nothing: the thread still connects, and nobody waits for it.
    program = """
import socket, ssl, sys
from lowcomm_jax.store.pulling import Partial, Port
mute = socket.create_server(("127.0.0.1", 0))
address = "{}:{}".format(*mute.getsockname())
looks = iter(range(9))
context = ssl.create_default_context()
print(Partial(8).pull(Port(address, context), "x", 300.0, lambda: next(looks) < 8))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"] and done.returncode == 0, done.stderr


def test_who_fetches_does_not_keep_a_region_from_ending(ends):
    server, port, _ = ends()
    server.hold("large", bytes(64 << 20))
    with port.connected(20.0) as connection:
        connection.request("GET", "/large", headers={"Range": f"bytes=0-{(64 << 20) - 1}"})
        answer = connection.getresponse()
        assert len(answer.read(1 << 20)) == 1 << 20  # and no more of it is read
        server.close()
        with pytest.raises((http.client.IncompleteRead, OSError)):
            answer.read()


@pytest.mark.slow
def test_a_payload_of_more_than_two_gigabytes(ends):
    server, port, _ = ends()
    data = np.random.default_rng(3).bytes(1 << 20) * 2100
    server.hold("larger", data)
    partial = Partial(len(data))
    assert pulled(port, "larger", partial)
    assert len(data) > 2**31 and partial.data.tobytes() == data


def test_memory_holds_no_more_than_the_kept_payloads(party):
    regions = party.run(2, keep=2)
    for number in range(8):
        rounds(regions, number, number + 1)
        time.sleep(1.5 * TIMING.beat_s)
    for x in regions:
        maps = pathlib.Path(f"/proc/{served(x).process.pid}/maps").read_text()
        assert 0 < maps.count("memfd:payload") <= 2 * 3
    assert not any(x._context.transport._partials for x in regions)


def test_a_payload_outlives_its_region_with_those_who_hold_it(party):
    regions = party.run(3, timing=dataclasses.replace(TIMING, deadline_s=1.0))
    send(regions[:2], "k")
    land(regions[:2], "k")
    vanish(regions[0])
    check(listen_to(regions[2], "k", LIKE), 3, [0, 1])


def test_what_is_gone_with_everyone_who_held_it_is_said_to_be_lost(party):
    timing = dataclasses.replace(TIMING, deadline_s=0.5, answer_s=0.3)
    regions = party.run(2, timing=timing)
    send(regions[:1], "k")
    land(regions[:1], "k")
    vanish(regions[0])
    with pytest.raises(exchange.Lost, match="region 0 for 'k'"):
        listen_to(regions[1], "k", LIKE)


def test_a_region_that_ends_waits_for_those_who_still_fetch(monkeypatch, party):
    regions = party.run(2, timing=dataclasses.replace(TIMING, deadline_s=0.5, dead_after_s=5.0))
    waited = regions[0]._context.wait_list
    note = waited.note
    # What the exchange does at last takes long: the region closes as soon as it has the payloads.
    monkeypatch.setattr(waited, "note", lambda *given: (time.sleep(0.1), note(*given)))
    send(regions[:1], "k")
    check(land(regions[:1], "k")[0], 2, [0])
    with ThreadPoolExecutor(1) as pool:
        closes = pool.submit(regions[0].close, linger_s=60.0)
        with pytest.raises(TimeoutError):
            closes.result(10 * TIMING.beat_s)
        check(listen_to(regions[1], "k", LIKE), 2, [0])
        closes.result(30.0)


# -- certificates of one's own, and refusals ----------------------------------------------------


def test_regions_use_certificates_that_they_were_given(tmp_path, party):
    made_certificates.write(tmp_path / "of the run", ["127.0.0.1"])
    made_certificates.write(tmp_path / "of strangers", ["127.0.0.1"])
    given = {"certificates": f"{tmp_path}/of the run"}
    regions = party.run(2, **given)
    rounds(regions, 0, 2)
    assert not (folder(party) / "run" / "pass").exists()
    address = served(regions[0]).address
    for whose, let_in in (("of the run", True), ("of strangers", False)):
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, read_credentials(f"{tmp_path}/{whose}"))
        context.load_verify_locations(tmp_path / "of the run" / "ca.crt")
        partial = Partial(1)
        with contextlib.suppress(DeniedError):
            assert not pulled(Port(address, context), "name", partial)
        assert (partial.problem == "") is let_in


def test_certificates_that_cannot_be_used_are_refused(tmp_path, party):
    for name in ("one", "two"):
        made_certificates.write(tmp_path / name, ["127.0.0.1"])

    def is_refused(*parts):
        with pytest.raises(ValueError) as caught:
            party.region(0, 1, certificates=f"{tmp_path}/one")
        for part in (f"certificates='{tmp_path}/one'", "put the authority's", *parts):
            assert part in str(caught.value)

    (tmp_path / "one" / "tls.key").write_bytes((tmp_path / "two" / "tls.key").read_bytes())
    is_refused("KEY_VALUES_MISMATCH")
    (tmp_path / "one" / "tls.key").write_bytes(b"\0junk")
    is_refused("PEM")
    (tmp_path / "one" / "ca.crt").unlink()
    is_refused("No such file", "one/ca.crt")


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
        assert told == [f"https://{one.address}" for one in maps]
        assert all(one.connections for one in maps)


def test_a_free_port_is_announced_also_where_all_addresses_are_listened_on(party):
    made = party.joined(0, 1, address="127.0.0.1:0", listen="0.0.0.0:0")
    assert made._context.heartbeat.own.address == f"https://127.0.0.1:{served(made).port}"


def test_addresses_that_nobody_reaches_are_refused(party):
    with pytest.raises(ValueError) as caught:
        party.region(0, 1, address="0.0.0.0:7000", listen="nowhere")
    assert "address='0.0.0.0:7000' is no address of one machine" in str(caught.value)
    assert "listen='nowhere': give HOST:PORT" in str(caught.value)
