"""Line plots as inline SVG. Colours come from the page's CSS, so they follow light and dark."""

from __future__ import annotations

import dataclasses
import html
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

from experiments.report.html_data import Curve

WIDTH, HEIGHT = 420, 280  # of the viewBox; small, so that text stays readable on a phone
LEFT, RIGHT, TOP, BOTTOM = 62, 408, 10, 240
LETTER = 7.8  # width of a letter of 12 units, rather too wide than too narrow
_LOG_STEPS = (1, 2, 5)


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: its label, its scale, and how its numbers are written."""

    label: str
    form: Callable[[float], str]
    log: bool = False
    low: float | None = None  # None = from the data
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Scale:
    """Values between `low` and `high` are places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        a, b, v = self.low, self.high, value
        if self.log:
            a, b, v = math.log(a), math.log(b), math.log(v)
        return self.start + (v - a) / (b - a) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def scale_of(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """The scale that shows these values."""
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if not low < high:
        room = max(0.5, abs(low) / 4)  # of a single value
        low, high = (low / 2, low * 2) if axis.log else (low - room, low + room)
    return Scale(low, high, start, end, axis.log)


def line_chart(
    title: str, curves: Sequence[Curve], x: Axis, y: Axis, colour: Mapping[str, int]
) -> str:
    """A figure with one line a curve.

    Args:
      colour: name -> its number, of the class `s<number>` that the page's CSS colours.
    """
    curves = [_shown(curve, x, y) for curve in curves]
    curves = [curve for curve in curves if curve.x]
    if not curves:
        return figure(title, '<p class="none">no run has this</p>')
    across = scale_of(x, [v for c in curves for v in c.x], LEFT, RIGHT)
    up = scale_of(y, [v for c in curves for v in c.y], BOTTOM, TOP)
    lines = "".join(_line(c, across, up, x, y, colour[c.name]) for c in curves)
    clip = f"clip{zlib.crc32((title + x.label).encode())}"
    body = (
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" width="{RIGHT - LEFT + 4}" '
        f'height="{BOTTOM - TOP + 8}"/></clipPath>'
        f"{axes(across, up, x, y)}"
        f'<g clip-path="url(#{clip})">{lines}</g>'
    )
    return figure(title, svg(body, title))


def figure(title: str, body: str, note: str = "") -> str:
    """A titled card."""
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    note = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<figure>{caption}{body}{note}</figure>"


def svg(body: str, label: str, height: float = HEIGHT) -> str:
    """A picture as wide as its card."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{html.escape(label)}">'
        f"{body}</svg>"
    )


def axes(across: Scale, up: Scale | None, x: Axis, y: Axis | None, bottom: float = BOTTOM) -> str:
    """Ticks, grid and labels; without `up`, those of the horizontal axis alone."""
    parts, taken = [], 0.0
    for value in across.ticks():
        at, label = across(value), x.form(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom:g}"/>')
        half = LETTER * len(label) / 2
        middle = min(at, WIDTH - half)  # the last one stays inside the picture
        if middle - half >= taken:  # and none covers the one before
            parts.append(text(f"{middle:.1f}", bottom + 18, label, "middle"))
            taken = middle + half + LETTER / 2
    middle = (LEFT + RIGHT) / 2
    parts.append(text(f"{middle:g}", bottom + 35, x.label, "middle", "label"))
    if up is not None and y is not None:
        for value in up.ticks():
            at = up(value)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>')
            parts.append(text(LEFT - 5, f"{at + 4:.1f}", y.form(value), "end"))
        label = html.escape(shortened(y.label, bottom - TOP))
        parts.append(
            f'<text class="label" text-anchor="middle" transform="translate(11 '
            f'{(TOP + bottom) / 2:g}) rotate(-90)">{label}</text>'
        )
    return "".join(parts)


def text(x: object, y: object, content: str, anchor: str, kind: str = "tick") -> str:
    """A word in a picture."""
    content = html.escape(content)
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{content}</text>'


def shortened(name: str, units: float) -> str:
    """A name that fits into so many units of width."""
    most = int(units / LETTER)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def path(points: Sequence[tuple[float, float]]) -> str:
    """The `d` of a line through points."""
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _shown(curve: Curve, x: Axis, y: Axis) -> Curve:
    """Leaves out what a logarithm cannot show."""
    keep = [
        i
        for i, (a, b) in enumerate(zip(curve.x, curve.y))
        if (a > 0 or not x.log) and (b > 0 or not y.log)
    ]
    half = curve.half and [curve.half[i] for i in keep]
    x_kept, y_kept = ([values[i] for i in keep] for values in (curve.x, curve.y))
    return dataclasses.replace(curve, x=x_kept, y=y_kept, half=half)


def _line(curve: Curve, across: Scale, up: Scale, x: Axis, y: Axis, number: int) -> str:
    points = [(across(a), up(b)) for a, b in zip(curve.x, curve.y)]
    band = ""
    if curve.half:
        above = [(across(a), up(b + h)) for a, b, h in zip(curve.x, curve.y, curve.half)]
        below = [(across(a), up(b - h)) for a, b, h in zip(curve.x, curve.y, curve.half)]
        band = f'<path class="band" d="{path(above + below[::-1])}Z"/>'
    name = html.escape(curve.name)
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6"><title>{name}: {html.escape(y.form(v))}, '
        f"{html.escape(x.form(u))}</title></circle>"
        for (a, b), u, v in zip(points, curve.x, curve.y)
    )
    line = f'<path class="line" d="{path(points)}"/>'
    # Dashed: the colours start over, or it was not measured.
    again = " again" if number >= 8 or curve.theory else ""
    return f'<g class="s s{number % 8}{again}" data-run="{name}">{band}{line}{dots}</g>'


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    rough = (high - low) / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (_LOG_STEPS, (1, 3), (1,)):
        found = [k * 10.0**p for p in powers for k in steps]
        found = [v for v in found if low * 0.999 <= v <= high * 1.001]
        if len(found) <= 6:
            break
    # Within a decade powers may leave one tick or none.
    return found if len(found) > 2 else _ticks(low, high, 8)
