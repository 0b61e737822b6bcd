"""An S3-like server in a process of its own, and a proxy before it that makes trouble."""

from __future__ import annotations

import contextlib
import http.client
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from experiments.processes import free_port

BUCKET = "bucket"
_DROPPED = ("content-length", "transfer-encoding", "connection", "date", "server")


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Moto's server with an empty bucket; gives its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, **quiet)
    try:
        until = time.monotonic() + 60
        while True:
            made = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            try:
                urllib.request.urlopen(made, timeout=10).read()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None and time.monotonic() < until
                time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


class Proxy:
    """Hands requests on to a server, or not.

    It hands on one write at a time: S3 decides atomically who creates a key, while Moto looks for
    the key and then writes, so that two writers at once can both be told that they created it.

    Attributes:
      trouble: (method, path) -> None, "busy" (503), "slow", "lost": done, and not answered, or
        "unconditional": without the conditions of the request.
      seen: (method, path, status) of every request; 0 = not answered.
    """

    def __init__(self, port: int):
        self.trouble: Callable[[str, str], str | None] = lambda method, path: None
        self.seen: list[tuple[str, str, int]] = []
        self._writing = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                length = int(self.headers.get("content-length") or 0)
                proxy.answer(self, port, self.rfile.read(length))

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, to: BaseHTTPRequestHandler, port: int, body: bytes) -> None:
        """Answer one request."""
        kind, status, headers, data = self.trouble(to.command, to.path), 503, [], b""
        if kind == "slow":
            time.sleep(0.3)
        if kind != "busy":
            behind = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            with self._writing if to.command == "PUT" else contextlib.nullcontext():
                headers = {
                    name: value
                    for name, value in to.headers.items()
                    if kind != "unconditional" or not name.lower().startswith("if-")
                }
                behind.request(to.command, to.path, body, headers)
                found = behind.getresponse()
                status, headers, data = found.status, found.getheaders(), found.read()
            behind.close()
        self.seen.append((to.command, to.path, 0 if kind == "lost" else status))
        if kind == "lost":
            to.close_connection = True
            return
        to.send_response(status)
        size = str(len(data))
        for name, value in headers:
            if name.lower() not in _DROPPED:
                to.send_header(name, value)
            elif name.lower() == "content-length" and to.command == "HEAD":
                size = value
        to.send_header("content-length", size)
        to.end_headers()
        if to.command != "HEAD":
            to.wfile.write(data)

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


def at_random(seed: int, busy: float, slow: float, lost: float) -> Callable[[str, str], str | None]:
    """Trouble of each kind with these probabilities."""
    draw, lock = random.Random(seed), threading.Lock()

    def trouble(method: str, path: str) -> str | None:
        with lock:
            x = draw.random()
        kinds = (("busy", busy), ("slow", busy + slow), ("lost", busy + slow + lost))
        return next((kind for kind, end in kinds if x < end), None)

    return trouble
