"""Plots of the HTML report: matplotlib draws them as SVG, which stands in the page itself.

What belongs to a run is hidden with it, and points show their numbers under the pointer. Colours
are those of the page's CSS, so that they follow light and dark.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator

from experiments.report.html_data import Curve, Stale
from experiments.report.html_page import DIM, GRID, INK, RUNS, css_colours
from lowcomm_jax.network import Timeline
from lowcomm_jax.network import draw as draw_timeline
from lowcomm_jax.network.timeline import COLOURS

WIDTH, HEIGHT = 420, 280  # in points; small, so that text stays readable on a phone
NAMES = 22  # letters of a name beside an axis
STYLE = {
    "svg.fonttype": "none",  # text, in the page's font
    "svg.hashsalt": "lowcomm_jax",  # the same file every time
    "text.parse_math": False,  # a name may have dollars
    "font.size": 11,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": DIM,
    "ytick.labelcolor": DIM,
    "text.color": DIM,
    "legend.frameon": False,
}


@dataclasses.dataclass(frozen=True)
class ChartAxis:
    """One axis: its label, its scale, and how its numbers are written."""

    label: str
    form: Callable[[float], str]
    log: bool = False
    low: float | None = None  # None = from the data
    high: float | None = None


@matplotlib.rc_context(STYLE)
def line_chart(
    title: str, curves: Sequence[Curve], x: ChartAxis, y: ChartAxis, colour: Mapping[str, int]
) -> str:
    """A card with one line a curve.

    Args:
      colour: name -> number of its colour (`html_page.RUNS`).
    """
    curves = [shown for curve in curves if (shown := _shown(curve, x, y)).x]
    if not curves:
        return card(title, '<p class="none">no run has this</p>')
    figure, axes = new_figure(HEIGHT)
    for curve in curves:
        number, run = colour[curve.name], f"run:{curve.name}"
        ink = RUNS[number % len(RUNS)]
        # Dashed: the colours start over.
        dashes = "--" if number >= len(RUNS) else "-"
        axes.plot(curve.x, curve.y, color=ink, lw=1.8, ls=dashes, gid=run)
        if curve.half:
            ends = [[b + sign * h for b, h in zip(curve.y, curve.half)] for sign in (1, -1)]
            axes.fill_between(curve.x, *ends, color=ink, alpha=0.16, lw=0, gid=run)
        told = [f"{curve.name}: {y.form(b)}, {x.form(a)}" for a, b in zip(curve.x, curve.y)]
        axes.scatter(curve.x, curve.y, s=16, color=ink, urls=told, gid=run, zorder=3)
    for side, one, values in (
        ("x", x, [v for curve in curves for v in curve.x]),
        ("y", y, [v for curve in curves for v in curve.y]),
    ):
        low, high = _limits(one, values)
        axes.set(**{f"{side}label": one.label, f"{side}lim": (low, high)})
        getattr(axes, f"set_{side}scale")("log" if one.log else "linear")
        axis = getattr(axes, f"{side}axis")
        axis.set_major_locator(locator(one.log, low, high))
        axis.set_major_formatter(FuncFormatter(lambda v, _, form=one.form: form(v)))
        axis.minorticks_off()
    return card(title, svg(figure, title))


@matplotlib.rc_context(STYLE)
def timeline(name: str, found: Timeline) -> str:
    """A card that is hidden with its run: one lane a region, as `network.draw` draws them."""
    short = dataclasses.replace(found, regions=tuple(shortened(r) for r in found.regions))
    figure, axes = new_figure(95 + 34 * len(found.regions))
    axes.grid(axis="y", visible=False)
    draw_timeline(short, axes)
    axes.set_xlim(min(bar.start_s for bar in found.bars), found.end_s)
    picture = card(name, svg(figure, f"timeline of {name}"))
    return f'<div data-run="{html.escape(name)}">{picture}</div>'


@matplotlib.rc_context(STYLE)
def staleness(rows: Sequence[Stale], colour: Mapping[str, int]) -> str:
    """A card: from the smallest to the largest staleness of every fragment, a dot at the mean."""
    title = "staleness per fragment"
    if not rows:
        return card(title, '<p class="none">nothing landed</p>')
    figure, axes = new_figure(60 + 20 * len(rows))
    for i, row in enumerate(rows):
        ink, run = RUNS[colour[row.name] % len(RUNS)], f"run:{row.name}"
        said = f"{row.name}, fragment {row.fragment}: mean {row.mean:.1f}, {row.low} to {row.high}"
        axes.hlines(i, row.low, row.high, color=ink, lw=1.8, gid=run)
        axes.scatter([row.mean], [i], s=36, color=ink, urls=[said], gid=run, clip_on=False)
    axes.set_yticks(range(len(rows)), [f"{shortened(r.name)} {r.fragment}" for r in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="inner steps from send to landing")
    axes.set_xlim(left=0, right=1.05 * max(1, *(row.high for row in rows)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return card(title, svg(figure, title))


def card(title: str, body: str) -> str:
    """A titled card."""
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{body}</figure>"


def shortened(name: str) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= NAMES else f"{name[: NAMES - 1]}…"


def locator(log: bool, low: float, high: float) -> Locator:
    """At least three ticks, and few enough that their labels do not touch."""
    decades = math.log10(high / low) if log else 0.0
    if decades < 1:
        return MaxNLocator(5)
    subs = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
    return LogLocator(subs=subs, numticks=6)


def svg(figure: Figure, label: str) -> str:
    """The figure as a part of an HTML page, as wide as its card.

    What is drawn with the gid `run:NAME` gets the attribute `data-run`; urls become titles.
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", found, flags=re.S)
    found = re.sub(r'<g id="run:([^"]*)">', r'<g data-run="\1">', found)
    found = re.sub(r'<g id="[^"]*">', "<g>", found)
    found = re.sub(r'<a xlink:href="([^"]*)"[^>]*>', r"<g><title>\1</title>", found)
    found = re.sub(r"</a>", "</g>", found)
    found = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", found)
    for ink, variable in {**css_colours(), COLOURS["land"]: "var(--ink)"}.items():
        found = found.replace(ink, variable)
    size = f"{figure.get_figwidth() * 72:g} {figure.get_figheight() * 72:g}"
    head = f'<svg viewBox="0 0 {size}" role="img" aria-label="{html.escape(label)}">'
    return re.sub(r"<svg[^>]*>", lambda _: head, found, count=1)


def new_figure(height: float):
    """(figure, axes) of this height in points."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    return figure, figure.add_subplot()


def _limits(axis: ChartAxis, values: Sequence[float]) -> tuple[float, float]:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if not low < high:
        return (low / 2, low * 2) if axis.log else (low - 0.5, low + 0.5)
    room = 0.03 * (math.log(high / low) if axis.log else high - low)
    return (low / math.exp(room), high * math.exp(room)) if axis.log else (low - room, high + room)


def _shown(curve: Curve, x: ChartAxis, y: ChartAxis) -> Curve:
    """Leaves out what a logarithm cannot show."""
    keep = [
        i
        for i, (a, b) in enumerate(zip(curve.x, curve.y))
        if (a > 0 or not x.log) and (b > 0 or not y.log)
    ]
    half = curve.half and [curve.half[i] for i in keep]
    x_kept, y_kept = ([values[i] for i in keep] for values in (curve.x, curve.y))
    return dataclasses.replace(curve, x=x_kept, y=y_kept, half=half)
