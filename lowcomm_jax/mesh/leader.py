"""Lock-step of the processes of one job: the first one, the leader, decides for all.

All processes run the same program and launch the same device programs in the same order. That order
may depend on facts of one host: an arrival, who is alive, a signal, the time, a file. The leader
decides by its own and sends the decision to the others (`Leader.broadcast_from_leader`).

`leader()` gives this process's `Leader`. In a job of one process every method returns at once.

Messages go over TCP (`LeaderChannel`), not by collectives of the devices: a collective would wait
for the programs queued on the devices.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import logging
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NoReturn, TypeVar

import jax

from lowcomm_jax import compat
from lowcomm_jax.mesh import serialization

_KEY_BYTES = 32
_PATIENCE_S = 10.0
_MEET_S, _HANDSHAKE_S, _LOOK_S = 60.0, 10.0, 0.5
_STRANGERS = 64  # that may connect at once, beside the processes
# Keys of the coordinator: where the leader listens, and what has failed before all were connected.
_CARD, _FAILED = "lowcomm_jax/leader", "lowcomm_jax/failed"
log = logging.getLogger(__name__)
T = TypeVar("T")
Hear = Callable[[int, tuple], None]


class ProcessLostError(RuntimeError):
    """Another process of this job has ended, or has failed: this one cannot go on without it."""


# -- messages between the processes ------------------------------------------------------------


class LeaderChannel:
    """One process's end of the connections: each message goes to all its peers, in order.

    The first process has all others as peers; each of these has the first one. A peer has proved
    that it knows a key which the coordinator gives to its processes. Messages hold values that
    `serialization` can encode.

    Args:
      hear: called as `hear(peer, message)` on threads of the channel; `("gone",)` when a peer's end
        is closed, after `("bye",)` if the peer closed it itself.
    """

    def __init__(self, peers: Mapping[int, Connection], hear: Hear):
        self._peers, self._hear = dict(peers), hear
        self._outbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._closed = False
        self._sender = threading.Thread(target=self._send, name="lowcomm-say", daemon=True)
        self._sender.start()
        for peer in self._peers:
            threading.Thread(target=self._read, args=(peer,), daemon=True).start()

    def say(self, *message: Any) -> None:
        """Send a message; returns at once, and may be called by a handler of signals.

        Raises:
          TypeError: the message holds a value that `serialization` cannot encode.
        """
        self._outbox.put(serialization.encode(message))

    def close(self, wait_s: float = 10.0) -> None:
        """Send remaining messages, for at most `wait_s` seconds, and close this end."""
        self.say("bye")
        self._outbox.put(None)
        self._sender.join(wait_s)
        self._closed = True
        for connection in self._peers.values():
            with contextlib.suppress(OSError), _socket_of(connection) as s:
                _shut(s)

    def address_elsewhere(self) -> str | None:
        """This host's address as a peer on another host sees it; None = there is no such peer."""
        for connection in self._peers.values():
            with _socket_of(connection) as s:
                own, peer = (
                    x[0].removeprefix("::ffff:") for x in (s.getsockname(), s.getpeername())
                )
            if own != peer and not ipaddress.ip_address(peer.partition("%")[0]).is_loopback:
                return own
        return None

    def _send(self) -> None:
        while (frames := self._outbox.get()) is not None:
            for connection in self._peers.values():
                with contextlib.suppress(OSError):  # whoever reads there notices that it is gone
                    for data in frames:
                        connection.send_bytes(data)

    def _read(self, peer: int) -> None:
        connection = self._peers[peer]

        def receive(size: int) -> bytearray:
            data = bytearray(size)
            if connection.recv_bytes_into(data) != size:
                raise EOFError("an array is not as long as announced")
            return data

        try:
            while True:
                self._hear(peer, serialization.decode(connection.recv_bytes(), receive))
        except (EOFError, OSError):
            if not self._closed:  # else it is we who are
                self._hear(peer, ("gone",))
        except Exception as error:  # no process of ours has sent this
            self._hear(peer, ("raised", error))


def open_channel(hear: Hear, wait_s: float = _MEET_S) -> LeaderChannel:
    """Connect the processes of this job, which have met at their coordinator; all call it together.

    Where one of them fails, all do, and each says what that one has said.

    Args:
      hear: see `LeaderChannel`.
      wait_s: seconds to wait for the others.

    Raises:
      ConnectionError: in one line, which process cannot be reached, and where.
    """
    index, until = compat.process_index(), time.monotonic() + wait_s
    try:
        peers = _accept_all(until) if index == 0 else {0: _reach_leader(index, until)}
    except _ToldError:
        raise
    except OSError as error:
        compat.coordination().key_value_set(f"{_FAILED}/{index}", str(error))
        time.sleep(2 * _LOOK_S if index == 0 else 0)  # its end ends the coordinator
        raise
    return LeaderChannel(peers, hear)


class _ToldError(ConnectionError):
    """What another process has failed with."""


def _look_for_failures() -> None:
    """Raise what another process has failed with, if any has."""
    try:
        for _, line in compat.coordination().key_value_dir_get(_FAILED):
            raise _ToldError(line)
    except jax.errors.JaxRuntimeError as error:
        raise _ToldError("process 0, the coordinator, has ended") from error


def _accept_all(until: float) -> dict[int, Connection]:
    """The connections of all others to this process, the first one."""
    count, key = compat.process_count(), secrets.token_bytes(_KEY_BYTES)
    peers: dict[int, Connection] = {}
    with listener(backlog=count + _STRANGERS) as opened, contextlib.ExitStack() as at_last:
        at_last.callback(_shut, opened)
        port = opened.getsockname()[1]
        compat.coordination().key_value_set_bytes(_CARD, port.to_bytes(4, "little") + key)
        arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        threading.Thread(target=_accept, args=(opened, key, arrived), daemon=True).start()
        while len(peers) < count - 1:
            _look_for_failures()
            if time.monotonic() > until:
                missing = ", ".join(str(i) for i in range(1, count) if i not in peers)
                raise ConnectionError(
                    f"process {missing} has not come to port {port} of process 0; the processes of "
                    "a job must reach one another at all ports"
                )
            with contextlib.suppress(queue.Empty):
                process, connection = arrived.get(timeout=_LOOK_S)
                peers[process] = connection
    for connection in peers.values():
        connection.send_bytes(b"all")
        _limit(connection, 0)
    return peers


def _accept(opened: socket.socket, key: bytes, arrived: queue.SimpleQueue) -> None:
    """Put (process, connection) of everyone who knows the key, until the socket is closed."""

    def greet(one: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):
            connection = _greeted(one, key, leads=True)
            arrived.put((int(connection.recv_bytes(20)), connection))

    with contextlib.suppress(OSError):
        while True:
            one, _ = opened.accept()
            # Anybody may connect, and say nothing.
            threading.Thread(target=greet, args=(one,), daemon=True).start()


def _reach_leader(index: int, until: float) -> Connection:
    """The connection to the first process, which has all others then."""
    card = None
    while card is None:
        _look_for_failures()
        if time.monotonic() > until:
            raise ConnectionError("process 0 does not say where it listens")
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # not there yet
            card = compat.coordination().blocking_key_value_get_bytes(_CARD, int(1e3 * _LOOK_S))
    address = compat.coordinator_host(), int.from_bytes(card[:4], "little")
    try:
        opened = socket.create_connection(address, timeout=_HANDSHAKE_S)
        connection = _greeted(opened, card[4:], leads=False)
        connection.send_bytes(b"%d" % index)
        while not connection.poll(_LOOK_S):
            _look_for_failures()
        connection.recv_bytes(20)
    except _ToldError:
        raise
    except (OSError, EOFError, AuthenticationError) as error:
        time.sleep(_LOOK_S)  # where process 0 has failed, it says so now
        _look_for_failures()
        raise ConnectionError(
            f"process {index} does not reach process 0 at {address[0]}, port {address[1]} "
            f"({error or type(error).__name__}); the processes of a job must reach one another at "
            "all ports"
        ) from error
    _limit(connection, 0)
    return connection


def listener(port: int = 0, backlog: int = 1) -> socket.socket:
    """A socket that listens at all addresses of this host, of both versions of IP where it has two.

    Args:
      port: 0 = a free one.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            return socket.create_server(("", port), backlog=backlog, **both)
    return socket.create_server(("", port), backlog=backlog)


def _greeted(opened: socket.socket, key: bytes, leads: bool) -> Connection:
    """The connection of a socket once both ends have proved that they know the key."""
    opened.setblocking(True)
    connection = Connection(opened.detach())
    _limit(connection, _HANDSHAKE_S)
    challenges = deliver_challenge, answer_challenge
    for challenge in challenges if leads else reversed(challenges):
        challenge(connection, key)
    return connection


def _limit(connection: Connection, seconds: float) -> None:
    """Let reads fail (`OSError`) that take so long; 0 = none."""
    with _socket_of(connection) as s:
        limit = struct.pack("ll", int(seconds), 0)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _shut(s: socket.socket) -> None:
    """Wake who waits there; closing alone would not."""
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Connection) -> socket.socket:
    """Another handle of the socket, to be closed after use."""
    return socket.socket(fileno=os.dup(connection.fileno()))


# -- decisions of the leader -------------------------------------------------------------------


class Leader:
    """This process among those of its job; in a job of one process methods return at once.

    All processes call the same methods in the same order, each from one thread.

    Args:
      connect: opens the channel to the others, as `open_channel` does.

    Attributes:
      leads: whether this is the first process, the leader, which decides.
      count: number of processes.
      index: number of this one, from 0.
    """

    def __init__(
        self, count: int = 1, index: int = 0, connect: Callable[..., LeaderChannel] = open_channel
    ):
        self.count: int = count
        self.index: int = index
        self.leads: bool = index == 0
        self._inbox: queue.Queue[tuple[int, tuple]] = queue.Queue()
        self._deciding = False
        # What ended which process; what ended the leader as soon as we have read so far.
        self._failed: dict[int, BaseException | None] = {}
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._parted = False  # not all are in step, nor will be
        self._round = 0  # of the errors that all have left a block with
        self._change = threading.Condition()
        self._on_failure: Callable[[Exception], None] | None = None
        self._when_lost: tuple[float, int] | None = None
        self._on_signal: Callable[[int], None] | None = None
        self._channel: LeaderChannel | None = None  # it may hear before it is returned
        self._channel = connect(self._hear) if count > 1 else None
        if self._channel is not None:
            # Before jax.distributed waits for all: it must not wait for who listens here.
            atexit.register(self._channel.close)

    # -- decisions ----------------------------------------------------------------------------

    def broadcast_from_leader(self, what: str, act: Callable[[], T]) -> T:
        """Give all processes the value that `act` returns in the leader, or the error it raises.

        The other processes do not call `act`. A nested call inside `act` sends nothing: all of it
        is one decision.

        Args:
          what: names the decision; the same in all processes.

        Raises:
          ProcessLostError: a process has ended, or failed.
          RuntimeError: this process asks for another decision than the leader sends.
        """
        if self._channel is None or self._deciding:
            return act()
        return self._decide(what, act) if self.leads else self._receive(what)

    def everyones(self, what: str, value: Any) -> list[Any]:
        """The values of all processes, in their order; see `broadcast_from_leader`."""
        if self._channel is None:
            return [value]
        if self.leads:
            return self._decide(what, lambda: self._collect(value))
        self._channel.say("value", self._round, value)
        return self._receive(what)

    def _decide(self, what: str, act: Callable[[], T]) -> T:
        self._deciding = True  # first: who fails from now on ends what we may wait for
        try:
            if not self._parted:
                self.check()
            result = act()
        except BaseException as error:  # whatever it is, the others wait for this decision
            self._channel.say("decided", what, None, error)
            raise
        finally:
            self._deciding = False
        self._channel.say("decided", what, result, None)
        return result

    def _receive(self, what: str) -> Any:
        self.check()
        found, result, error = self._next()
        if found != what:
            raise RuntimeError(
                f"process {self.index} is at {what!r}, process 0 of its job at {found!r}: all "
                "processes of a job must run the same program, with the same arguments"
            )
        if error is not None:
            raise error
        return result

    def _next(self, timeout_s: float | None = None) -> tuple:
        """The leader's next message: (what, result, error)."""
        _, (kind, *rest) = self._inbox.get(timeout=timeout_s)
        if kind != "decided":
            self._note_failure(0, kind, rest)
            self.check()
        return tuple(rest)

    def _collect(self, own: Any) -> list[Any]:
        values = {0: own}
        while len(values) < self.count:
            process, (kind, *rest) = self._inbox.get()
            self.check()
            if kind == "value" and rest[0] == self._round:
                values[process] = rest[1]
        return [values[process] for process in range(self.count)]

    # -- failures -----------------------------------------------------------------------------

    def check(self) -> None:
        """Return if no process is known to have ended.

        Raises:
          ProcessLostError: a process has ended, or failed; says which, and why.
        """
        if self._failed:
            raise self._loss(next(iter(self._failed)))

    def _loss(self, process: int) -> ProcessLostError:
        cause = self._failed[process]
        what = "has ended" if cause is None else f"failed: {type(cause).__name__}: {cause}"
        error = ProcessLostError(f"process {process} of this job {what}")
        error.__cause__ = cause
        return error

    def on_failure(self, act: Callable[[Exception], None]) -> None:
        """Set a function that the leader calls, on another thread, if a process fails meanwhile."""
        self._on_failure = act

    def end_when_lost(self, grace_s: float, code: int) -> None:
        """Let this process end when another one has ended without a message.

        Its main thread may wait for ever, in a collective without the other one.

        Args:
          grace_s: seconds in which this process may end by itself.
          code: its exit code.
        """
        self._when_lost = grace_s, code

    def _end_soon(self, process: int) -> None:
        grace_s, code = self._when_lost
        time.sleep(grace_s)
        print(f"process {process} of this job has ended; this one ends, too", file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)

    def end_all(self, line: str, code: int) -> NoReturn:
        """End all processes of this job, wherever they wait, each with this line on stderr."""
        print(line, file=sys.stderr, flush=True)
        if self._channel is not None:
            self._channel.say("ends", line, code)
            self._channel.close()
            time.sleep(1.0 if self.leads else 0.0)  # JAX ends the others when its coordinator ends
        os._exit(code)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context that all processes leave together: an error in one is raised in all.

        In the others it is a `ProcessLostError` that names it, at the next decision. After the
        block all living processes are at the same point.
        """
        try:
            yield
        except BaseException as error:  # whatever it is, the others must not wait for this process
            if self._channel is not None:
                self._fail_together(error)
                if self._failed:
                    # It may be what has failed here, too: collectives do.
                    raise self._loss(next(iter(self._failed))) from error
            raise

    def _fail_together(self, error: BaseException) -> None:
        self._channel.say("raised", error)
        if self.leads:
            others = set(range(1, self.count))
            with self._change:
                self._change.wait_for(lambda: others <= self._failed.keys(), _PATIENCE_S)
        else:
            others = {0}
            with contextlib.suppress(queue.Empty, ProcessLostError):
                while not self._failed:
                    self._next(_PATIENCE_S)
        silent = others - self._failed.keys()
        self._failed = {p: cause for p, cause in self._failed.items() if p in self._gone}
        self._failed |= dict.fromkeys(silent)
        self._parted = bool(self._failed)
        self._round += 1

    def _hear(self, process: int, message: tuple) -> None:
        """Called on a thread of the channel."""
        kind, *rest = message
        if kind == "signal":
            if self._on_signal is not None:
                self._on_signal(*rest)
            return
        if kind == "ends":
            self.end_all(*rest)
        if kind == "bye":
            self._left.add(process)
            return
        if kind == "gone" and process not in self._left:
            # Said at once: we may hang in a collective, or be ended by JAX, before we raise it.
            log.error("process %d of this job has ended without a word", process)
            if self._when_lost is not None:
                threading.Thread(target=self._end_soon, args=(process,), daemon=True).start()
        if self.leads and kind != "value":
            with self._change:
                self._note_failure(process, kind, rest)
                self._change.notify_all()
            if self._deciding and self._on_failure is not None:
                self._on_failure(self._loss(process))
        self._inbox.put((process, message))

    def _note_failure(self, process: int, kind: str, rest: list) -> None:
        self._failed.setdefault(process, rest[0] if rest else None)
        self._gone |= {process} if kind == "gone" else set()

    def address_elsewhere(self) -> str | None:
        """See `LeaderChannel`; None in a job of one process."""
        return None if self._channel is None else self._channel.address_elsewhere()

    # -- signals ------------------------------------------------------------------------------

    def on_signal(self, act: Callable[[int], None] | None) -> None:
        """Set a function that is called, on another thread, with a signal from another process."""
        self._on_signal = act

    def pass_on(self, number: int) -> None:
        """Send the leader a signal that this process has received."""
        self._channel.say("signal", number)


# -- this process's leader ---------------------------------------------------------------------

_SINGLE = Leader()
_opened: Leader | None = None


def led(method: Callable[..., T]) -> Callable[..., T]:
    """A method that the first process calls for all: they return its value, or raise its error.

    Arrays that lie in several processes are to be put together before (`mesh.arrays.whole`).
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> T:
        act = functools.partial(method, *args, **kwargs)
        return leader().broadcast_from_leader(method.__name__, act)

    return call


def leader() -> Leader:
    """The `Leader` of this process; all processes of the job make the first call together.

      The first call connects them. It starts no backend.

    Raises:
      ConnectionError: see `open_channel`.
    """
    global _opened
    if _opened is None and compat.process_count() > 1:
        _opened = Leader(compat.process_count(), compat.process_index())
    elif _opened is None and jax.process_count() > 1:
        compat.coordination()  # raises
    return opened()


def opened() -> Leader:
    """The `Leader`, if `leader` has been called; else one of this process alone."""
    return _opened or _SINGLE
