"""Serve a run's report as a page on this machine alone, made anew at each request."""

from __future__ import annotations

import http.server
import threading

from rich.console import Console

from experiments.cli import RefusedError
from experiments.report.main import page_of
from experiments.report.runlog import read_run
from experiments.report.virtual import Links
from experiments.watch.terminal import heading
from experiments.watch.view import Watch

HOST = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Server(http.server.ThreadingHTTPServer):
    """The page of one run; close it with `shutdown` and `server_close`.

    Args:
      watch: read again at every request.
      port: of 127.0.0.1; 0 = a free one.
      every: seconds after which a browser requests the page again.

    Raises:
      RefusedError: the port is taken, or this user may not open it.
    """

    daemon_threads = True

    def __init__(self, watch: Watch, port: int, every: float):
        self.watch, self.every, self._looking = watch, every, threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            fix = "choose another, or 0 for a free one"
            raise RefusedError([f"--port={port}: {error.strerror}: {fix}"], "watch") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def page(self) -> str:
        """The report of the run as it is now, with its state and its alarms below the table.

        Raises:
          RefusedError: no report can be made of the run, as before its first step.
          ValueError: a line of its files is no record.
        """
        with self._looking:  # one at a time: matplotlib draws for one thread
            view = self.watch.look()
            network = self.watch.network  # its step seconds are those of the run's own clock
            run = read_run(self.watch.workdir)
            if not run.steps:
                raise RefusedError([f"{view['name']} has made no step yet"], "watch")
            alarms = [f"Alarm: {line}." for line in view["alarms"]] or ["No alarms."]
            return page_of(
                [run],
                [self.watch.workdir],
                {} if network is None else {network.name: Links(network, "network")},
                [*heading(view), *alarms],
            )


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        # DNS rebinding: a page of another site may send requests under a name that resolves here.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            return self._send(403, "text/plain", "this page is for this machine alone\n")
        if self.path != "/":
            return self._send(404, "text/plain", "the page is /\n")
        try:
            text = self.server.page()
        except (RefusedError, ValueError, OSError) as error:
            return self._send(500, "text/plain", f"{error}\n")
        return self._send(200, "text/html", text)

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Refresh", f"{max(1, round(self.server.every))}")
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
