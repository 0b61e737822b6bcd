"""How the processes of a job are connected, and that a failure ends all of them with one line."""

import socket
import sys
import threading
import time

import jax
import pytest
from processes_in_threads import leaders, together

from lowcomm_jax import compat
from lowcomm_jax.mesh import launchers
from lowcomm_jax.mesh.leader import Leader, open_channel

leader = sys.modules["lowcomm_jax.mesh.leader"]  # its package has a function of that name


class Coordinator:
    """In place of `jax.distributed`'s, with the calls that are used."""

    def __init__(self):
        self._keys = {}
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            self._keys[key] = value
            self._changed.notify_all()

    key_value_set_bytes = key_value_set

    def key_value_dir_get(self, folder):
        with self._changed:
            return [(key, x) for key, x in self._keys.items() if key.startswith(f"{folder}/")]

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._keys, timeout_in_ms / 1e3):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._keys[key]


HERE = threading.local()


@pytest.fixture
def job(monkeypatch):
    """`job(host, count, members)`: what `Leader` comes to in these processes of a job of `count`,
    each a thread, where the coordinator's host is `host`."""
    made = []
    monkeypatch.setattr(compat, "process_index", lambda: HERE.index)
    monkeypatch.setattr(leader, "_LOOK_S", 0.05)

    def run(host, count, members=None, wait_s=20.0):
        coordinator = Coordinator()
        monkeypatch.setattr(compat, "coordination", lambda: coordinator)
        monkeypatch.setattr(compat, "coordinator_host", lambda: host)
        monkeypatch.setattr(compat, "process_count", lambda: count)

        def one(index):
            HERE.index = index
            return Leader(count, index, lambda hear: open_channel(hear, wait_s))

        found = together(one, range(count) if members is None else members)
        made.extend(x for x in found if isinstance(x, Leader))
        return found

    yield run
    for one in made:
        one._channel.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_all_are_connected_by_either_version_of_ip(job, host):
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    found = job(host, 3)
    assert together(lambda one: one.everyones("x", one.index), found) == [[0, 1, 2]] * 3
    assert all(one.address_elsewhere() is None for one in found)


def test_strangers_at_the_port_hold_up_nobody(job, monkeypatch):
    monkeypatch.setattr(leader, "_HANDSHAKE_S", 1.0)
    listener, strangers = leader.listener, []

    def visited(port=0, backlog=1):
        made = listener(port, backlog)
        address = "127.0.0.1", made.getsockname()[1]
        strangers.extend(socket.create_connection(address) for _ in range(3))
        strangers[0].close()  # of the others one says nothing, and one says nonsense
        strangers[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
        return made

    monkeypatch.setattr(leader, "listener", visited)
    found = job("127.0.0.1", 2)
    assert together(lambda one: one.everyones("x", one.index), found) == [[0, 1], [0, 1]]
    port = strangers[1].getpeername()[1]
    for one in strangers:
        one.close()
    with pytest.raises(ConnectionRefusedError):  # nor does anything listen there any more
        socket.create_connection(("127.0.0.1", port))


def test_who_cannot_reach_the_first_is_named_in_all(job, monkeypatch):
    connect = socket.create_connection

    def one_is_cut_off(address, timeout):
        if HERE.index == 2:
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", one_is_cut_off)
    began = time.monotonic()
    first, *others = map(str, job("127.0.0.1", 3, wait_s=300.0))
    assert first.startswith("process 2 does not reach process 0 at 127.0.0.1, port ")
    assert "Connection refused" in first and others == [first, first]
    assert time.monotonic() - began < 100


def test_who_does_not_come_is_named_in_all(job):
    found = job("127.0.0.1", 3, members=[0, 1], wait_s=0.5)
    first, second = map(str, found)
    assert first == second and first.startswith("process 2 has not come to port ")


def test_that_the_first_cannot_listen_is_told_to_the_others(job, monkeypatch):
    def full(port=0, backlog=1):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(leader, "listener", full)
    assert {str(one) for one in job("127.0.0.1", 2)} == {"[Errno 24] Too many open files"}


def test_a_coordinators_port_must_be_free():
    with leader.listener() as taken:
        where = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"{where} .*in use.*: give another coordinator"):
            launchers.connect_processes(where, 2, 0)
    with pytest.raises(ConnectionError, match="give another coordinator"):
        launchers.connect_processes("localhost:70000", 2, 0)


def test_processes_that_are_shown_the_same_gpus_take_equal_parts(monkeypatch):
    made, taken = leaders(2), {}
    monkeypatch.setattr(launchers, "_initialize", lambda *_: None)
    monkeypatch.setattr(launchers, "_require_free", lambda _: None)
    monkeypatch.setattr(compat, "process_count", lambda: 2)
    monkeypatch.setattr(launchers, "leader", lambda: made[HERE.index])
    monkeypatch.setattr(launchers, "shown_gpus", lambda: ("host", ["4", "5", "6", "7"]))
    monkeypatch.setattr(
        jax.config, "update", lambda name, value: taken.update({(HERE.index, name): value})
    )

    def met(one):
        HERE.index = one.index
        return launchers.meet_processes("localhost:1234", 2, one.index)

    first, second = together(met, made)
    for one in made:
        one._channel.close()
    assert (first.process, second.process) == (0, 1)
    visible = "jax_cuda_visible_devices"
    assert (taken[0, visible], taken[1, visible]) == ("0,1", "2,3")


# -- the first exchange of devices --------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch):
    """Two hosts, whose devices never find one another; the second one's name is a loopback one."""
    made = leaders(2)
    resolved = {"good": "10.0.0.1", "bad": "127.0.1.1"}
    monkeypatch.setattr(launchers, "NAME_S", 0.2)
    monkeypatch.setattr(socket, "gethostname", lambda: HERE.name)
    get = lambda name, *_, **__: [(0, 0, 0, "", (resolved[name], 0))]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", get)
    stuck = threading.Event()
    monkeypatch.setattr(
        launchers.multihost_utils, "sync_global_devices", lambda _: stuck.wait() and None
    )
    for i, one in enumerate(made):
        monkeypatch.setattr(one, "address_elsewhere", lambda i=i: f"10.0.0.{i + 1}")
    yield made
    stuck.set()
    for one in made:
        one._channel.close()


def started(one, names, wait_s=30.0):
    HERE.name = names[one.index]
    launchers.start_devices(one, wait_s)


def test_all_say_whose_name_leads_nowhere_and_what_to_set(apart):
    first, second = together(lambda one: started(one, ["good", "bad"]), apart)
    assert isinstance(first, ConnectionError) and str(first) == str(second)
    assert "bad, resolves to 127.0.1.1" in str(first)
    assert "in its /etc/hosts `10.0.0.2 bad`" in str(first)


def test_a_program_of_ones_own_hears_it_too(apart, monkeypatch):
    place = launchers.ProcessPlace("Slurm", 2)
    monkeypatch.setattr(launchers, "meet_processes", lambda *_, **__: place)
    monkeypatch.setattr(launchers, "leader", lambda: apart[HERE.index])

    def connected(one):
        HERE.index, HERE.name = one.index, ["good", "bad"][one.index]
        return launchers.connect_processes()

    for error in together(connected, apart):
        assert isinstance(error, ConnectionError) and "bad, resolves to 127.0.1.1" in str(error)
    monkeypatch.setattr(launchers.multihost_utils, "sync_global_devices", lambda _: None)
    assert together(connected, apart) == [place, place]


def test_an_error_of_devices_is_explained_by_a_name_at_once(apart, monkeypatch):
    def fails(_):
        raise RuntimeError("Gloo: connection refused")

    monkeypatch.setattr(launchers.multihost_utils, "sync_global_devices", fails)
    monkeypatch.setattr(launchers, "NAME_S", 30.0)
    for error in together(lambda one: started(one, ["bad", "good"]), apart):
        assert "resolves to 127.0.1.1" in str(error) and "Gloo" in str(error.__cause__)
    for error in together(lambda one: started(one, ["good", "good"]), apart):
        assert isinstance(error, RuntimeError) and "Gloo" in str(error)


def test_where_names_are_right_devices_have_longer_and_not_for_ever(apart):
    for error in together(lambda one: started(one, ["good", "good"], 0.5), apart):
        assert isinstance(error, TimeoutError) and "waited 0 s" in str(error)
