"""The process that serves one region's payloads by Arrow Flight with mutual TLS.

`PayloadServer` starts this file beside the training, and communicates with it over an inherited
socket. Other hosts that connect to the region's port reach this process only. An attack on it,
through a fault of gRPC or by using up its descriptors, does not stop or slow the training. It
imports no module of this package, so that it starts at once and stays small.

The other end sends one JSON object at a time, some with a descriptor, and waits for its answer:

- {"host", "port", "roots", "chain", "key"} -> {"port"} or {"error"}: listen; the first of all.
- {"hold": name, "nbytes"} and a descriptor of the payload's bytes -> {}: serve them.
- {"drop": name} -> {}: serve them no more.

This process also sends {"sent": nbytes} before such bytes leave. It ends when the other end closes
the socket.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading

import pyarrow as pa
import pyarrow.flight as flight

LARGEST_CHUNK = 16 << 20
_LARGEST_MESSAGE = 1 << 20
_SCHEMA = pa.schema([("bytes", pa.uint8())])


class Line:
    """Sends messages back over the socket, one JSON object a line; from several threads."""

    def __init__(self, connection: socket.socket):
        self._connection, self._lock = connection, threading.Lock()

    def tell(self, **what) -> None:
        """Send an object; nothing, where the other end is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(what).encode() + b"\n")


class Served(flight.FlightServerBase):
    """Serves ranges of held payloads to accepted clients.

    Attributes:
      held: payloads by name.
    """

    def __init__(self, settings: dict, line: Line):
        chain, key = settings["chain"].encode(), settings["key"].encode()
        super().__init__(
            f"grpc+tls://{settings['host']}:{settings['port']}",
            tls_certificates=[(chain, key)],
            verify_client=True,
            root_certificates=settings["roots"].encode(),
        )
        self.held: dict[str, pa.Buffer] = {}
        self._line = line

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """The bytes [start, stop) of a payload in chunks.

        Args:
          ticket: JSON with "name", "nbytes" of the whole, "start", "stop", "chunk".

        Returns:
          record batches of one column; none where that payload is not held.
        """
        asked = json.loads(ticket.ticket)
        name, nbytes, start, stop = (asked[k] for k in ("name", "nbytes", "start", "stop"))
        data = self.held.get(name)
        if data is None or data.size != nbytes:
            return flight.GeneratorStream(_SCHEMA, iter(()))
        if not 0 <= start <= stop <= nbytes:
            raise flight.FlightServerError(f"bytes {start} to {stop} of {nbytes}")
        chunk = min(max(asked["chunk"], 1), LARGEST_CHUNK)
        return flight.GeneratorStream(_SCHEMA, self._batches(data, start, stop, chunk))

    def _batches(self, data: pa.Buffer, start: int, stop: int, chunk: int):
        for at in range(start, stop, chunk):
            n = min(chunk, stop - at)
            column = pa.Array.from_buffers(pa.uint8(), n, [None, data.slice(at, n)])
            self._line.tell(sent=n)
            yield pa.record_batch([column], schema=_SCHEMA)


def main(descriptor: int) -> None:
    """Serve until the other end of the socket is closed."""
    # Ctrl-C, and what systemd or Slurm send to every process, are the training's to handle.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connection = socket.socket(fileno=descriptor)
    line = Line(connection)
    settings, _ = receive(connection)
    try:
        server = Served(settings, line)
    except (pa.ArrowException, OSError, ValueError) as error:
        line.tell(error=str(error))
        return
    line.tell(port=server.port)
    while True:
        asked, payload = receive(connection)
        if "hold" in asked:
            try:
                held = mmap.mmap(payload, asked["nbytes"], prot=mmap.PROT_READ)
                os.close(payload)
            except (OSError, TypeError):
                # Strangers hold all descriptors. The process that takes this one's place has some.
                os._exit(1)
            server.held[asked["hold"]] = pa.py_buffer(held)
        else:
            server.held.pop(asked["drop"], None)
        line.tell()


def receive(connection: socket.socket) -> tuple[dict, int | None]:
    """The next object, with its descriptor; ends this process where there is none."""
    data, descriptors = b"", []
    while not data.endswith(b"\n"):
        try:
            more, came, _, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, 1)
        except ConnectionResetError:  # the other end was killed before it had read our last words
            more = b""
        if not more:
            # At once: who still fetches must not keep this process.
            os._exit(0)
        data, descriptors = data + more, descriptors + came
    return json.loads(data), descriptors[0] if descriptors else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
