"""Serve a view as a page on this machine alone: `/`, which requests `/view.json` repeatedly."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import matplotlib
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from experiments.cli import RefusedError
from experiments.metrics import strict
from experiments.report.html_page import GRID, INK, RUNS
from experiments.report.html_plots import STYLE, new_figure, svg
from experiments.watch.page_text import PAGE
from experiments.watch.terminal import COLUMNS, heading
from experiments.watch.view import View, Watch, nothing_sent

HOST = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
_POLICY += "connect-src 'self'; img-src data:"
WIDTH = 900
_SENT, _LOST = "#1d9463", "#d6404a"
_EARLY = 0.05  # share of the steps so far whose steep fall is left out


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


@matplotlib.rc_context(STYLE)
def loss(view: View) -> str:
    """Training loss of the regions and eval loss of the anchor over the steps, as SVG."""
    figure, axes = new_figure(260, WIDTH)
    rows = [
        (f"run:region {row['region']}", RUNS[row["region"] % len(RUNS)], row["curve"], 1.6)
        for row in view["regions"]
    ]
    for gid, ink, curve, width in [*rows, ("run:anchor", INK, view["eval"]["curve"], 2.4)]:
        late = [point for point in curve if point[0] > _EARLY * view["done"]]
        if late:
            axes.plot(*zip(*late), color=ink, lw=width, gid=gid, marker="o" if ink == INK else "")
    if not axes.lines:
        axes.text(0.02, 0.9, "nothing yet", transform=axes.transAxes)
    axes.set(xlim=(0, view["steps"] or 1))
    kind = "nominal steps" if view["nominal"] else "steps"
    axes.set_xlabel(f"{kind}; coloured: training loss of a region, dark: eval loss of the anchor")
    return svg(figure, "training loss of the regions and eval loss")


@matplotlib.rc_context(STYLE)
def timeline(view: View) -> str:
    """Sends and landings of the last steps as SVG, with a row for each region, a bar a payload."""
    shown, lanes = view["timeline"], [row["region"] for row in view["regions"]]
    first, last = shown["first"], shown["last"]
    figure, axes = new_figure(60 + 34 * len(lanes), WIDTH)
    axes.grid(visible=False)
    for lane, row in enumerate(view["regions"]):
        axes.barh(lane, max(0, min(row["step"], last) - first + 1), 0.65, first - 0.5, color=GRID)
    for flight in shown["flights"]:
        lane, sent, landed = lanes.index(flight["region"]), flight["sent"], flight["landed"]
        there = "under way" if landed is None else f"landed after step {landed}"
        said = f"fragment {flight['fragment']}: sent after step {sent}, {there}"
        begin, end = max(first, sent), landed
        if landed is None:
            end = view["regions"][lane]["step"] + 1
        axes.barh(
            lane + 0.18 * (flight["fragment"] % 3 - 1),
            max(0.1, end - begin),
            0.15,
            begin,
            color=_SENT if flight["counted"] else _LOST,
            alpha=0.45 if landed is None and flight["counted"] else 1.0,
            url=said if flight["counted"] else f"{said}, not counted",
        )
        if landed is not None:
            axes.vlines(landed, lane - 0.4, lane + 0.4, color=INK, lw=1.2)
    if (nothing := nothing_sent(view)) is not None:
        axes.text(0.02, 0.9, nothing, transform=axes.transAxes)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(first - 0.5, last + 1), ylim=(len(lanes) - 0.5, -0.5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("inner steps; green: sent and under way, dark line: landed, red: not counted")
    return svg(figure, "sends and landings of the last steps")
