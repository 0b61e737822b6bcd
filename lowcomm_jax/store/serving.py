"""The process that serves one region's payloads by HTTPS, and `PayloadServer`, which starts it.

Other hosts that connect to the region's port reach that process only: an attack on it does not stop
or slow the training. It runs this file alone, which imports nothing but the standard library, so
that it starts at once and stays small.

A `GET` of a payload's name with a range is answered by these bytes (206), or by 404 where it is not
held. The job sends one JSON object at a time over an inherited socket, and waits for the answer:

- {"host", "port", "own": `Credentials`} -> {"port"} or {"error"}: listen; the first of all.
- {"hold": name}, then a descriptor of the bytes; {"drop": name}; {"trust": a further root}; {}
  -> {"sent": bytes so far}.

The process ends when the job closes that socket.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import mmap
import multiprocessing.connection
import multiprocessing.reduction
import os
import re
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_ANSWERS_WITHIN_S = 30.0
_HANDSHAKE_S = 10.0
_STUCK_S = 60.0
"""A connection ends on which nothing could be read or written for so long."""
_MOST_STRANGERS = 64
"""Connections that have not shown a certificate yet; the oldest makes way for a new one."""
_MOST_THREADS = 512
"""One for each connection."""
_CHUNK = 1 << 20
log = logging.getLogger(__name__)


class Credentials(NamedTuple):
    """What one end of a connection shows, and what it trusts.

    Attributes:
      roots: certificates (PEM) that it trusts, with all that they have signed.
      chain: its certificate, those between it and the other end's roots, and its key, encrypted
        (PEM).
      passphrase: of the key.
    """

    roots: str
    chain: str
    passphrase: str


def tls_context(side: int, own: Credentials, check_host: bool = True) -> ssl.SSLContext:
    """One side of connections on which each shows a certificate that the other one trusts.

    Args:
      side: `ssl.PROTOCOL_TLS_CLIENT` or `ssl.PROTOCOL_TLS_SERVER`.
      check_host: whether a client's other end must have a certificate for the host connected to.

    Raises:
      OSError: they are none, or do not belong together.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = side == ssl.PROTOCOL_TLS_CLIENT and check_host
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=own.roots.encode("ascii", "replace").decode())
    except (OSError, ValueError) as error:
        raise OSError(f"what it trusts is no certificate: {error}") from None
    with tempfile.NamedTemporaryFile() as file:  # `ssl` reads nothing else
        file.write(own.chain.encode())
        file.flush()
        context.load_cert_chain(file.name, password=own.passphrase)
    return context


class PayloadServer:
    """Serves bytes from another process, which it starts again if that ends or hangs.

    The bytes lie in memory that both share.

    Attributes:
      port: where it listens.
      address: "host:port" by which this machine reaches it.
      process: the one that serves.

    Args:
      address: "host:port" to listen on; port 0 takes any.
      own: what it shows and trusts.
      sent: called with a number of bytes that have left.
      kept: how many of the newest payloads are kept for a new process: each takes a file.

    Raises:
      ValueError: the address cannot be used, or the certificates; in methods: the process has
        ended, and cannot be started again.
    """

    def __init__(self, address: str, own: Credentials, sent: Callable[[int], None], kept: int):
        host, _, port = address.rpartition(":")
        self._settings = {"host": host.strip("[]"), "port": int(port), "own": own}
        self._sent, self._lock = sent, threading.Lock()
        self._kept: dict[str, int] = {}  # descriptors, by name
        self._most_kept = kept
        self._closed = False
        self._begin()
        self.address = f"{host}:{self.port}"

    def hold(self, name: str, data: bytes) -> None:
        """Serve these bytes, at least one, from now on; the caller may drop them."""
        made = _shared(data)
        with self._lock:
            self._forget(name)
            self._kept[name] = made
            if len(self._kept) > self._most_kept:
                self._forget(next(iter(self._kept)))
            self._tell({"hold": name}, made)

    def drop(self, name: str) -> None:
        """Serve these bytes no more."""
        with self._lock:
            self._forget(name)
            self._tell({"drop": name})

    def trust(self, certificate: str) -> None:
        """Let in who shows this one (PEM), too."""
        with self._lock:
            own = self._settings["own"]
            self._settings["own"] = own._replace(roots=f"{own.roots}\n{certificate}")
            self._tell({"trust": certificate})

    def tend(self) -> None:
        """Count what was sent, and see that the process answers; called now and then."""
        with self._lock:
            self._tell({})

    def close(self) -> None:
        """End the process, even while others fetch from it."""
        with self._lock:
            with contextlib.suppress(OSError, EOFError, ValueError):
                self._ask({}, within_s=1.0)
            self._closed = True
            self._end()
            for name in list(self._kept):
                self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._kept:
            os.close(self._kept.pop(name))

    def _begin(self) -> None:
        """Start the process, and give it what is kept."""
        self._pipe, other = multiprocessing.connection.Pipe()
        with other:
            # -I -S: neither the folder nor the environment is a place to import from.
            command = [sys.executable, "-I", "-S", __file__, str(other.fileno())]
            own = {"pass_fds": [other.fileno()], "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, start_new_session=True, **own)
        self._counted = 0
        try:
            answer = self._ask(self._settings)
            if "error" in answer:
                raise ValueError(answer["error"])
            self._settings["port"] = self.port = answer["port"]
            for name, payload in self._kept.items():
                self._ask({"hold": name}, payload)
        except (OSError, EOFError, ValueError) as error:
            self._end()
            where = f"{self._settings['host']}:{self._settings['port']}"
            raise ValueError(
                f"address '{where}' cannot be listened on ({error}): give HOST:PORT of this "
                "machine with a port that is free, or port 0 for any; where the others reach it by "
                "another address, give that as address, and what to listen on as listen"
            ) from None

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def _tell(self, what: dict[str, Any], payload: int | None = None) -> None:
        """`_ask` until it is closed; a process that does not answer is replaced."""
        if self._closed:
            return
        try:
            self._ask(what, payload)
        except (OSError, EOFError, ValueError):
            log.warning("the process that serves payloads has ended, and is started again")
            self._end()
            self._begin()

    def _ask(
        self, what: dict[str, Any], payload: int | None = None, within_s: float | None = None
    ) -> dict[str, Any]:
        """Send an object, with a descriptor, and wait for the answer.

        Raises:
          OSError, EOFError, ValueError: there is none.
        """
        self._pipe.send_bytes(json.dumps(what).encode())
        if payload is not None:
            multiprocessing.reduction.send_handle(self._pipe, payload, self.process.pid)
        if not self._pipe.poll(within_s or _ANSWERS_WITHIN_S):
            raise TimeoutError("its process does not answer")
        answer = json.loads(self._pipe.recv_bytes())
        total = answer.get("sent", 0)
        self._sent(total - self._counted)
        self._counted = total
        return answer


def _shared(data: bytes) -> int:
    """A descriptor of memory with these bytes; of a file without a name, where there is no such."""
    if hasattr(os, "memfd_create"):
        made = os.memfd_create("payload")
    else:
        with tempfile.TemporaryFile() as file:
            made = os.dup(file.fileno())
    with open(made, "wb", closefd=False) as file:
        file.write(data)
    return made


# -- in the other process -------------------------------------------------------------------------


class _Served(socketserver.ThreadingTCPServer):
    """Serves ranges of held payloads to accepted clients, each on a thread of its own.

    Attributes:
      held: payloads by name.
      sent: bytes of payloads that have left.
      context: of TLS.
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, own: Credentials):
        self.context = tls_context(ssl.PROTOCOL_TLS_SERVER, own)
        self.held: dict[str, memoryview] = {}
        self.sent, self.lock = 0, threading.Lock()
        self._strangers: dict[ssl.SSLSocket, None] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Requests)

    def finish_request(self, request: socket.socket, client_address: object) -> None:
        """Serve one connection, if it shows a certificate; on its thread."""
        request.settimeout(_HANDSHAKE_S)
        shake = {"server_side": True, "do_handshake_on_connect": False}
        with self.context.wrap_socket(request, **shake) as connection:
            with self.lock, contextlib.suppress(OSError):
                self._strangers[connection] = None
                if len(self._strangers) > _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    # After `SSLSocket.shutdown` it would go on without TLS.
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            try:
                connection.do_handshake()
            finally:
                with self.lock:
                    self._strangers.pop(connection, None)
            if threading.active_count() <= _MOST_THREADS:
                connection.settimeout(_STUCK_S)
                super().finish_request(connection, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that break: strangers would fill the log."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Requests(http.server.BaseHTTPRequestHandler):
    """Requests of one connection."""

    protocol_version = "HTTP/1.1"
    server: _Served

    def do_GET(self) -> None:
        data = self.server.held.get(self.path[1:])
        asked = re.fullmatch("bytes=([0-9]{1,15})-([0-9]{1,15})", self.headers.get("Range", ""))
        first, last = map(int, asked.groups()) if asked else (0, -1)
        if data is None or not first <= last < len(data):
            return self.send_error(404)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        for at in range(first, last + 1, _CHUNK):
            chunk = data[at : min(at + _CHUNK, last + 1)]
            with self.server.lock:
                self.server.sent += len(chunk)
            self.wfile.write(chunk)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the exchange counts bytes."""


def _main(descriptor: int) -> None:
    """Serve until the job closes its end of the socket, or has ended."""
    # What systemd and Slurm send to every process is the training's to handle.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    job = multiprocessing.connection.Connection(descriptor)
    try:
        asked = json.loads(job.recv_bytes())
        server = _Served(asked["host"], asked["port"], Credentials(*asked["own"]))
    except OSError as error:
        return job.send_bytes(json.dumps({"error": str(error)}).encode())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answer = {"port": server.server_address[1]}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job.send_bytes(json.dumps(answer).encode())
            asked = json.loads(job.recv_bytes())
            server.held.pop(asked.get("drop"), None)
            if "hold" in asked:
                payload = multiprocessing.reduction.recv_handle(job)
                server.held[asked["hold"]] = memoryview(mmap.mmap(payload, 0, prot=mmap.PROT_READ))
                os.close(payload)
            if "trust" in asked:
                server.context.load_verify_locations(cadata=asked["trust"])
            answer = {"sent": server.sent}
    os._exit(0)  # at once: who still fetches must not keep this process


if __name__ == "__main__":
    _main(int(sys.argv[1]))
