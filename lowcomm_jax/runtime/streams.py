"""`Streams`: gets a payload from a server of `serving`, over several connections at once.

One TCP connection does not use a long link fully, so that a payload is cut into as many ranges as
there are streams. The part of a range that has arrived is kept (`Partial`). The next try asks for
the rest, from the same region or from another one that holds the payload.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read once, by the import that follows

import pyarrow as pa
import pyarrow.flight as flight

from lowcomm_jax.runtime.certificates import Credentials
from lowcomm_jax.runtime.kv import pauses

STREAMS = 4
_LEAST_A_STREAM = 4 << 20
_CHUNKS = 64
_CHUNK = (256 << 10, 16 << 20)
"""Least and most bytes of a chunk. A break loses one a stream; none tells of progress sooner."""
_LOOK_S = (0.0005, 0.02)
_SILENT_MS = 10_000
"""A connection on which nothing comes is asked for a sign of life. So a call to a host that has
gone mute ends, whatever its own time limit: after 65 s, as seen. gRPC itself decides how long the
answer may take. Over a slow link through a proxy it queues behind data, and a limit of ours would
break transfers."""
log = logging.getLogger(__name__)


class Range:
    """Bytes [at, stop) of a payload that are still to come, and the chunks before them."""

    def __init__(self, start: int, stop: int):
        self.at, self.stop = start, stop
        self.chunks: list = []

    def add(self, chunk) -> None:
        """Append bytes (a buffer).

        Raises:
          ValueError: more than were asked for.
        """
        if not 0 < len(chunk) <= self.stop - self.at:
            raise ValueError(f"{len(chunk)} bytes came, {self.stop - self.at} were due")
        self.chunks.append(chunk)
        self.at += len(chunk)


class Partial:
    """A payload of which a part has arrived.

    Attributes:
      nbytes: of the whole.
      chunk: bytes that are asked for at a time.
      ranges: one for each stream.
      touched_s: when it was last asked for or added to, by `time.monotonic`.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.chunk = min(max(nbytes // _CHUNKS, _CHUNK[0]), _CHUNK[1])
        count = min(max(nbytes // _LEAST_A_STREAM, 1), STREAMS)
        ends = [nbytes * i // count for i in range(count + 1)]
        self.ranges = [Range(*pair) for pair in itertools.pairwise(ends)]
        self.touched_s = time.monotonic()

    @property
    def arrived(self) -> int:
        """How many bytes are here."""
        return self.nbytes - sum(part.stop - part.at for part in self.ranges)

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return all(part.at == part.stop for part in self.ranges)

    def whole(self) -> bytes:
        """All of it."""
        return b"".join(chunk for part in self.ranges for chunk in part.chunks)


class DeniedError(Exception):
    """The server was reached, and does not hold the payload."""


class Streams:
    """Connections to one server.

    Args:
      address: "host:port".
      credentials: ours.
      host_name: the name in the server's certificate; None = the host of `address`.
      connect_s: how long a connection may take.
    """

    def __init__(
        self, address: str, credentials: Credentials, host_name: str | None, connect_s: float
    ):
        self._address = address
        self._options = {
            "tls_root_certs": credentials.roots,
            "cert_chain": credentials.chain,
            "private_key": credentials.key,
            "override_hostname": host_name,
            "generic_options": [
                ("grpc.use_local_subchannel_pool", 1),  # each client has a connection of its own
                ("grpc.enable_http_proxy", 0),
                ("grpc.min_reconnect_backoff_ms", max(int(1000 * connect_s), 100)),
                ("grpc.keepalive_time_ms", _SILENT_MS),
                ("grpc.keepalive_timeout_ms", _SILENT_MS),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        }
        self._reads: list[_Read] = []
        self._clients: dict[int, flight.FlightClient] = {}
        self._lock = threading.Lock()

    def get(
        self,
        name: str,
        partial: Partial,
        allowed_s: float,
        check: Callable[[float], bool],
    ) -> bool:
        """Get the rest of a payload; returns whether it is complete.

        Args:
          allowed_s: longest time without progress of any stream, seconds.
          check: called with seconds to wait; False = give up.

        Raises:
          DeniedError: the server does not hold it.
          TimeoutError: no byte came for `allowed_s`.
        """
        reads = [
            _Read(self, number, name, partial, part, allowed_s)
            for number, part in enumerate(partial.ranges)
            if part.at < part.stop
        ]
        self._reads = [one for one in self._reads if one.running] + reads
        waits, arrived = pauses(*_LOOK_S), partial.arrived
        partial.touched_s = time.monotonic()
        try:
            while any(read.running for read in reads):
                if partial.arrived != arrived:
                    arrived, partial.touched_s = partial.arrived, time.monotonic()
                if time.monotonic() - partial.touched_s > allowed_s:
                    raise TimeoutError(f"no bytes came for {allowed_s:.1f} s")
                if not check(next(waits)):
                    return False
        finally:
            for read in reads:
                read.cancel()
        if any(read.denied for read in reads):
            raise DeniedError(name)
        return partial.complete

    def probe(self, within_s: float) -> None:
        """Test a server by asking for a payload that does not exist.

        Raises:
          ConnectionError: the server cannot be reached, or refuses this region.
        """
        ask = {"name": "", "nbytes": 0, "start": 0, "stop": 0, "chunk": 1}
        options, client = flight.FlightCallOptions(timeout=within_s), self.client(0)
        try:
            client.do_get(flight.Ticket(json.dumps(ask)), options).read_all()
        except pa.ArrowException as error:
            self.drop(0)
            raise ConnectionError(str(error)) from None

    def client(self, number: int) -> flight.FlightClient:
        """The connection of a stream."""
        with self._lock:
            if number not in self._clients:
                made = flight.FlightClient(f"grpc+tls://{self._address}", **self._options)
                self._clients[number] = made
            return self._clients[number]

    def drop(self, number: int) -> None:
        """Let go of a connection that has failed: the next one is tried at once.

        It ends when the last thread that uses it lets go. Closing it under a `do_get` of another
        thread ends the process (pyarrow 26: segmentation fault).
        """
        with self._lock:
            self._clients.pop(number, None)

    def close(self) -> None:
        """Cancel all reads, wait for them, and let go of all connections.

        A thread inside Arrow when the interpreter ends would bring the process down.
        """
        for read in self._reads:
            read.cancel()
            read.join()
        with self._lock:
            self._clients.clear()


class _Read:
    """One stream that brings a range, on a thread of its own.

    Attributes:
      denied: the server does not hold the payload.
    """

    def __init__(
        self,
        streams: Streams,
        number: int,
        name: str,
        partial: Partial,
        part: Range,
        allowed_s: float,
    ):
        self.denied = False
        self._streams, self._number, self._part = streams, number, part
        self._asked = {"name": name, "nbytes": partial.nbytes, "chunk": partial.chunk}
        # A call that ends is followed by one for the rest: none lasts for ever on the other side.
        self._options = flight.FlightCallOptions(timeout=8 * allowed_s)
        self._reader: flight.FlightStreamReader | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="lowcomm-stream", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def cancel(self) -> None:
        """End it; returns when nothing is added any more, or its call has not begun to answer."""
        self._cancelled = True
        if self._reader is not None:
            self._reader.cancel()
            self._thread.join()

    def _run(self) -> None:
        """Ask for the rest again and again, as long as that brings something."""
        while self._part.at < self._part.stop and not self._cancelled:
            before = self._part.at
            try:
                self._ask()
            except (pa.ArrowException, OSError, ValueError) as error:
                log.info("%s: stream %d: %s", self._asked["name"], self._number, error)
                self._streams.drop(self._number)
            if self._part.at == before:
                return

    def _ask(self) -> None:
        where = {"start": self._part.at, "stop": self._part.stop}
        ticket = flight.Ticket(json.dumps({**self._asked, **where}))
        client = self._streams.client(self._number)
        reader = self._reader = client.do_get(ticket, self._options)
        empty = True
        for chunk in reader:
            if self._cancelled:
                reader.cancel()
                return
            empty = False
            self._part.add(chunk.data.column(0).to_numpy(zero_copy_only=True))
        self.denied = empty
