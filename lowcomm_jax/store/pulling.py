"""`Partial`: a payload on its way from another region's port, over several connections at once.

One TCP connection does not use a long link fully, so a payload is cut into ranges, one for each.
What has arrived of a range is kept. The next try asks for the rest, from the same region or from
another one that holds the payload.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

STREAMS = 4
_LEAST_A_STREAM = 4 << 20
_MOST_A_READ = 1 << 16
_LOOK_S = 0.02
log = logging.getLogger(__name__)


class DeniedError(Exception):
    """The region was reached, and does not hold the payload."""


class Port:
    """Where a region serves its payloads.

    Args:
      address: "host:port"; its certificate names the host, where the context looks at that.
      context: of TLS.
      at: where it is reached, if not there.
    """

    def __init__(self, address: str, context: ssl.SSLContext, at: str | None = None):
        self.address, self._context, self._at = address, context, at or address

    @contextlib.contextmanager
    def connected(self, within_s: float) -> Iterator[http.client.HTTPConnection]:
        """A new connection, and its end; no step of it brings nothing for longer than `within_s`.

        Raises:
          OSError: it cannot be made.
        """
        made, at = http.client.HTTPConnection(self.address), http.client.HTTPConnection(self._at)
        plain = socket.create_connection((at.host, at.port), within_s)
        with plain, self._context.wrap_socket(plain, server_hostname=made.host) as made.sock:
            yield made


class Partial:
    """A payload of which a part has arrived.

    Attributes:
      data: uint8 `[nbytes]`, the whole.
      ranges: [at, stop] of what is still to come, one for each connection.
      touched_s: when it was last asked for or added to, by `time.monotonic`.
      problem: what a connection broke with at last, or "".
    """

    def __init__(self, nbytes: int):
        self.data = np.empty(nbytes, np.uint8)
        count = min(max(nbytes // _LEAST_A_STREAM, 1), STREAMS)
        ends = [nbytes * i // count for i in range(count + 1)]
        self.ranges = [list(pair) for pair in itertools.pairwise(ends)]
        self.touched_s, self.problem = time.monotonic(), ""

    @property
    def missing(self) -> int:
        """How many bytes are still to come."""
        return sum(stop - at for at, stop in self.ranges)

    def pull(self, port: Port, name: str, allowed_s: float, check: Callable[[], bool]) -> bool:
        """Get the rest of the payload; returns whether it is complete.

        Args:
          allowed_s: longest time in which no byte comes, seconds.
          check: called now and then; False = give up.

        Raises:
          DeniedError: the region does not hold it.
          TimeoutError: no byte came for `allowed_s`.
        """
        # Their own limit is longer: it may be that one range alone brings nothing.
        reads = [_Read(self, part, port, name, 2 * allowed_s) for part in self.ranges]
        missing, self.touched_s = self.missing, time.monotonic()
        try:
            while running := [read for read in reads if read.is_alive()]:
                running[0].join(_LOOK_S)
                if self.missing != missing:
                    missing, self.touched_s = self.missing, time.monotonic()
                if time.monotonic() - self.touched_s > allowed_s:
                    raise TimeoutError(f"no bytes came for {allowed_s:.1f} s")
                if not check():
                    return False
        finally:
            for read in reads:
                read.cancel()
        if any(read.denied for read in reads):
            raise DeniedError(name)
        return not self.missing


class _Read(threading.Thread):
    """Brings a range; asks for the rest again and again, as long as that brings something.

    Attributes:
      denied: the region does not hold the payload.
    """

    def __init__(self, whole: Partial, part: list[int], port: Port, name: str, within_s: float):
        super().__init__(name="lowcomm-read", daemon=True)
        self.denied = self._cancelled = False
        self._port, self._name, self._within_s = port, name, within_s
        self._whole, self._part = whole, part
        self._socket: socket.socket | None = None
        # Not by `Background`: it ends with the pull, and nothing wakes one that still connects, so
        # a join of it would hold a job's exit. An interpreter may end while Python's sockets wait.
        self.start()

    def cancel(self) -> None:
        """End it: it adds nothing any more. One that still connects is left to end by itself."""
        self._cancelled = True
        if (connected := self._socket) is not None:
            with contextlib.suppress(OSError):
                # After `SSLSocket.shutdown` it would read encrypted bytes.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)
            self.join()

    def run(self) -> None:
        part, before = self._part, -1
        while before < part[0] < part[1] and not (self._cancelled or self.denied):
            before = part[0]
            try:
                with self._port.connected(self._within_s) as connection:
                    self._socket = connection.sock
                    self._ask(connection)
            except (OSError, http.client.HTTPException) as error:
                self._whole.problem = str(error)[:300] or repr(error)
                log.info("%s from %s: %r", self._name, self._port.address, error)
            finally:
                self._socket = None

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        data, part = memoryview(self._whole.data), self._part
        if self._cancelled:
            return
        where = f"{part[0]}-{part[1] - 1}"
        connection.request("GET", f"/{self._name}", headers={"Range": f"bytes={where}"})
        answer = connection.getresponse()
        self.denied = answer.headers["Content-Range"] != f"bytes {where}/{len(data)}"
        while not (self.denied or self._cancelled) and part[0] < part[1]:
            came = answer.readinto1(data[part[0] : min(part[0] + _MOST_A_READ, part[1])])
            if not came:
                raise ConnectionError("it ended before all was here")
            part[0] += came
