"""`PayloadServer`: starts the process that serves this region's payloads, and hands them to it.

See `serving`, the file which that process runs.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from lowcomm_jax.runtime.certificates import Credentials
from lowcomm_jax.runtime.file_handles import PAYLOADS_KEPT

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Where a machine reaches what listens on all of its addresses."""
_PROGRAM = pathlib.Path(__file__).with_name("serving.py")
_STARTS_WITHIN_S = 60.0
_ANSWERS_WITHIN_S = 30.0
log = logging.getLogger(__name__)


class PayloadServer:
    """Serves bytes from another process, which it starts again if that ends.

    The bytes lie in memory that both share.

    Attributes:
      port: where it listens.
      address: "host:port" by which this machine reaches it.

    Args:
      address: "host:port" to listen on; port 0 takes any.
      credentials: their roots must have signed the certificates of clients.
      sent: called with a number of bytes before they leave.

    Raises:
      ValueError: the address cannot be used, or the certificates.
    """

    def __init__(self, address: str, credentials: Credentials, sent: Callable[[int], None]):
        host, _, port = address.rpartition(":")
        files = {name: data.decode() for name, data in credentials._asdict().items()}
        self._settings = {"host": host, "port": port, **files}
        self._sent = sent
        self._names: set[str] = set()
        self._kept: collections.OrderedDict[str, tuple[int, int]] = collections.OrderedDict()
        self._lock = threading.RLock()
        self._closed = False
        self._process = _Process(self._settings, sent)
        self._settings["port"] = self.port = self._process.port
        self.address = f"{_LOOPBACK.get(host, host)}:{self.port}"

    @property
    def names(self) -> set[str]:
        """Of the payloads that are held."""
        return set(self._names)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def hold(self, name: str, data: bytes) -> None:
        """Serve these bytes, at least one, from now on; the caller may drop them.

        Raises:
          RuntimeError: it is closed.
          ValueError: the process has ended, and cannot be started again.
        """
        payload = _shared(data)
        with self._lock:
            if self._closed:
                os.close(payload)
                raise RuntimeError("this end is closed")
            self._names.add(name)
            self._forget(name)
            self._kept[name] = payload, len(data)
            while len(self._kept) > PAYLOADS_KEPT:
                self._forget(next(iter(self._kept)))
            self._tell({"hold": name, "nbytes": len(data)}, payload)

    def drop(self, name: str) -> None:
        """Serve these bytes no more."""
        with self._lock:
            if name not in self._names or self._closed:
                return
            self._names.remove(name)
            self._forget(name)
            self._tell({"drop": name})

    def close(self) -> None:
        """End the process, even while others fetch from it."""
        with self._lock:
            self._closed = True
            self._process.end()
            while self._kept:
                self._forget(next(iter(self._kept)))
            self._names.clear()

    def mend(self) -> None:
        """Start the process again if it has ended; called now and then.

        Raises:
          ValueError: it cannot be started again.
        """
        with self._lock:
            if not self._closed and self._process.ended:
                self._begin_anew()

    def _begin_anew(self) -> None:
        log.warning("the process that serves payloads has ended, and is started again")
        self._process.end()
        self._process = _Process(self._settings, self._sent)
        for name, (payload, nbytes) in self._kept.items():
            self._process.ask({"hold": name, "nbytes": nbytes}, payload)

    def _tell(self, what: dict, payload: int | None = None) -> None:
        try:
            self._process.ask(what, payload)
        except _EndedError:
            self._begin_anew()  # which hands over all that is kept

    def _forget(self, name: str) -> None:
        payload, _ = self._kept.pop(name, (None, 0))
        if payload is not None:
            os.close(payload)


class _EndedError(Exception):
    """The process has ended, or does not answer."""


class _Process:
    """One process, and our end of the socket.

    Attributes:
      pid: its number.
      port: where it listens.
      ended: whether it is known to have ended.
    """

    def __init__(self, settings: dict, sent: Callable[[int], None]):
        self.ended = False
        self._sent = sent
        self._answers: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._socket, other = socket.socketpair()
        with other:
            # -P: the folder of the program is no place to import from.
            command = [sys.executable, "-P", str(_PROGRAM), str(other.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},  # else strangers fill the log
            )
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._listen, name="lowcomm-served", daemon=True)
        self._thread.start()
        try:
            answer = self.ask(settings, within_s=_STARTS_WITHIN_S)
        except _EndedError:
            answer = {"error": "its process ended"}
        if "error" in answer:
            self.end()
            raise ValueError(
                f"address '{settings['host']}:{settings['port']}' cannot be listened on "
                f"({answer['error']}): give HOST:PORT of this machine with a port that is free, or "
                "port 0 for any, and certificates that belong together; where the others reach it "
                "by another address, give that as address, and what to listen on as listen"
            )
        self.port = answer["port"]

    def ask(
        self, what: dict, payload: int | None = None, within_s: float = _ANSWERS_WITHIN_S
    ) -> dict:
        """Send an object, with a descriptor, and wait for the answer.

        Raises:
          _EndedError: there will be none.
        """
        data = json.dumps(what).encode() + b"\n"
        try:
            if payload is None:
                self._socket.sendall(data)
            else:
                socket.send_fds(self._socket, [data], [payload])
            answer = self._answers.get(timeout=within_s)
        except (OSError, queue.Empty):
            answer = None
        if answer is None:
            self.ended = True
            raise _EndedError
        return answer

    def end(self) -> None:
        """Kill it, and wait for it and the thread."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    said = json.loads(line)
                    if "sent" in said:
                        self._sent(said["sent"])
                    else:
                        self._answers.put(said)
            except (OSError, ValueError):
                pass
        self.ended = True
        self._answers.put(None)


def _shared(data: bytes) -> int:
    """A descriptor of memory with these bytes; of a file without a name, where there is no such."""
    if hasattr(os, "memfd_create"):
        made = os.memfd_create("payload")
    else:
        with tempfile.TemporaryFile() as file:
            made = os.dup(file.fileno())
    with open(made, "wb", closefd=False, buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    return made
