"""Messages between the first process of a job and the others, over TCP.

Not by collectives of the devices: those wait for what the devices have still to compute, and a word
must not.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lowcomm_jax import compat
from lowcomm_jax.processes import words

_KEY_BYTES = 32
Hear = Callable[[int, tuple], None]


class Line:
    """One process's end: what it says goes to all its peers, in order.

    The first process has all others as peers, each of them the first one; a peer has shown that it
    knows a key which only the processes of this job were given. Messages are what `words` can say.

    Args:
      hear: called as `hear(peer, message)` on threads of the line; `("gone",)` when a peer's end is
        closed, after `("bye",)` if it closed it itself.
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
          TypeError: it holds a value that cannot be told.
        """
        self._outbox.put(words.encode(message))

    def close(self, wait_s: float = 10.0) -> None:
        """Send what is left, for `wait_s` at most, and close this end."""
        self.say("bye")
        self._outbox.put(None)
        self._sender.join(wait_s)
        self._closed = True
        for connection in self._peers.values():
            # Closing alone would not wake a thread that reads.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(connection.fileno())) as s,
            ):
                s.shutdown(socket.SHUT_RDWR)

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
                self._hear(peer, words.decode(connection.recv_bytes(), receive))
        except (EOFError, OSError):
            if not self._closed:  # else it is we who are
                self._hear(peer, ("gone",))
        except Exception as error:  # no process of ours has said this
            self._hear(peer, ("raised", error))


def open_line(hear: Hear) -> Line:
    """Connect the processes of this job; all of them call it together."""
    leads, count = jax.process_index() == 0, jax.process_count()
    card = np.zeros(4 + _KEY_BYTES, np.uint8)
    if leads:
        key = secrets.token_bytes(_KEY_BYTES)
        listener = Listener(("", 0), backlog=count, authkey=key)
        port = listener.address[1].to_bytes(4, "little")
        card = np.frombuffer(port + key, np.uint8)
    data = multihost_utils.broadcast_one_to_all(card).tobytes()
    if leads:
        with listener:
            accepted = (listener.accept() for _ in range(count - 1))
            return Line({int(c.recv_bytes()): c for c in accepted}, hear)
    address = compat.coordinator_host(), int.from_bytes(data[:4], "little")
    connection = Client(address, authkey=data[4:])
    connection.send_bytes(b"%d" % jax.process_index())
    return Line({0: connection}, hear)
