"""A transport of one's own: payloads travel between regions by plain HTTP.

    python -m experiments launch --regions=2 --exchange=examples.http_transport:HttpTransport \
        --config=configs/diloco.py --workdir=runs/http

`lc.exchange.store(..., transport=HttpTransport)` takes it, too. Records go through the store. Every
region serves the payloads that it holds, and pulls those of others by the address in their
heartbeats. Bytes are named by their SHA-256 and verified by who asks: a transport only moves them.
This one encrypts nothing, and whoever reaches the port can read: it is for a private network.
"""

from __future__ import annotations

import http.client
import http.server
import threading
import urllib.request
from collections.abc import Sequence

from lowcomm_jax import exchange

SCHEME = "http://"


class HttpTransport(exchange.Transport):
    """A `lowcomm_jax.exchange.Transport`, which says what each method is for.

    Args:
      context: what the exchanges of a region share: heartbeat, counter of bytes, times.
      address: HOST:PORT by which the other regions reach this one; port 0 = a free one. It is a
        field of a config, as `listen` and `certificates` are: `--config.address`.
    """

    name, lingers = "http", True  # others can get payloads only while this region runs

    def __init__(self, context: exchange.ExchangeContext, address: str = "127.0.0.1:0"):
        self._heartbeat, self._counter = context.heartbeat, context.counter
        self._timing = context.timing
        self._held: dict[str, bytes] = {}
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"address={address!r}: give HOST:PORT, port 0 for a free one")
        self._server = http.server.ThreadingHTTPServer((host, int(port)), self._handler())
        self._address = f"{SCHEME}{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def start(self) -> None:
        self._heartbeat.update(address=self._address)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def put(self, name: str, data: bytes) -> None:
        self._held[name] = data

    keep = put  # what came from another region is served, too

    def drop(self, name: str, shared: bool) -> None:
        self._held.pop(name, None)

    def get(self, name: str, nbytes: int, holders: Sequence[int]) -> bytes:
        for region in holders:
            beat = self._heartbeat.latest().get(region)
            if beat is None or not beat.address.startswith(SCHEME):
                continue
            try:
                url, within_s = f"{beat.address}/{name}", 2 * self._timing.answer_s
                with self._open(url, timeout=within_s) as answer:
                    data = answer.read()
            except (OSError, http.client.HTTPException):  # not there, or cut: another may have it
                continue
            self._counter.add("received", len(data))
            return data
        raise exchange.Missing(f"no region that can be reached has payload {name}")

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        held, counter = self._held, self._counter

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = held.get(self.path.removeprefix("/"))
                if data is None:
                    self.send_error(404)
                    return
                counter.add("sent", len(data))
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the exchange counts bytes."""

        return Handler
