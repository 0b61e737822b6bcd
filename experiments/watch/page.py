"""Serve a view as a page on this machine alone: `/`, which requests `/view.json` repeatedly."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

from rich.console import Console

from experiments.cli import RefusedError
from experiments.metrics import strict
from experiments.watch.page_text import PAGE
from experiments.watch.pictures import loss, timeline
from experiments.watch.terminal import COLUMNS, heading
from experiments.watch.view import Watch

HOST = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
_POLICY += "connect-src 'self'; img-src data:"


class Server(http.server.ThreadingHTTPServer):
    """The page of one run; close it with `shutdown` and `server_close`.

    Args:
      watch: read again at every request for the view.
      port: of 127.0.0.1; 0 = a free one.
      every: seconds between two requests of the page.

    Raises:
      RefusedError: the port is taken, or this user may not open it.
    """

    daemon_threads = True

    def __init__(self, watch: Watch, port: int, every: float):
        self.watch, self.every, self._looking = watch, every, threading.Lock()
        self._drawn: Any = None
        self._pictures: dict[str, str] = {}
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            fix = "choose another, or 0 for a free one"
            raise RefusedError([f"--port={port}: {error.strerror}: {fix}"], "watch") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def view(self) -> dict[str, Any]:
        """The present view, with its heading and the table's cells as text, and pictures."""
        with self._looking:
            view = self.watch.look()
            drawn = view["regions"], view["eval"]["curve"], view["timeline"]
            if drawn != self._drawn:  # matplotlib takes a tenth of a second
                self._drawn, self._pictures = (
                    drawn,
                    {"loss": loss(view), "timeline": timeline(view)},
                )
            pictures = self._pictures
        cells = {name: [cell(row) for row in view["regions"]] for name, cell in COLUMNS.items()}
        table = {name.replace("- ", ""): c for name, c in cells.items() if set(c) != {"-"}}
        return strict({**view, "table": table, "heading": heading(view), "pictures": pictures})


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        # DNS rebinding: a page of another site may send requests under a name that resolves here.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            return self._send(403, "text/plain", "this page is for this machine alone\n")
        if self.path == "/":
            page = PAGE.replace("EVERY_MS", str(round(1000 * self.server.every)))
            return self._send(200, "text/html", page)
        if self.path != "/view.json":
            return self._send(404, "text/plain", "there are / and /view.json\n")
        try:
            text = json.dumps(self.server.view(), allow_nan=False)
        except (RefusedError, ValueError, OSError) as error:
            return self._send(500, "text/plain", f"{error}\n")
        return self._send(200, "application/json", text)

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Print no line for a request."""


def serve(watch: Watch, port: int, every: float, console: Console) -> None:
    """Serve until Ctrl-C.

    Raises:
      RefusedError: the port is taken, or this user may not open it.
    """
    with Server(watch, port, every) as server:
        text = f"{server.url} shows {watch.workdir}; Ctrl-C ends it"
        console.print(text, highlight=False, soft_wrap=True)
        server.serve_forever()
