"""Draws the two pictures of the page of `watch` by matplotlib, as SVG."""

from __future__ import annotations

import matplotlib
from matplotlib.ticker import MaxNLocator

from experiments.report.html_page import GRID, INK, RUNS
from experiments.report.html_plots import STYLE, new_figure, svg
from experiments.watch.view import View

WIDTH = 900
_SENT, _LOST = "#1d9463", "#d6404a"
_EARLY = 0.05  # share of the steps so far whose steep fall is left out


@matplotlib.rc_context(STYLE)
def loss(view: View) -> str:
    """Training loss of the regions and eval loss of the anchor over the steps, as SVG."""
    figure, axes = new_figure(260, WIDTH)
    rows = [
        (f"run:region {row['region']}", RUNS[row["region"] % len(RUNS)], row["curve"], 1.6)
        for row in view["regions"]
    ]
    for gid, ink, curve, width in [*rows, ("run:anchor", INK, view["eval"]["curve"], 2.4)]:
        late = [point for point in curve if point[0] > _EARLY * view["step"]]
        if late:
            axes.plot(*zip(*late), color=ink, lw=width, gid=gid, marker="o" if ink == INK else "")
    if not axes.lines:
        axes.text(0.02, 0.9, "nothing yet", transform=axes.transAxes)
    axes.set(xlim=(0, view["steps"] or 1))
    axes.set_xlabel("steps; coloured: training loss of a region, dark: eval loss of the anchor")
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
    if not shown["flights"]:
        axes.text(0.02, 0.9, "nothing has been sent yet", transform=axes.transAxes)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(first - 0.5, last + 1), ylim=(len(lanes) - 0.5, -0.5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("inner steps; green: sent and under way, dark line: landed, red: not counted")
    return svg(figure, "sends and landings of the last steps")
