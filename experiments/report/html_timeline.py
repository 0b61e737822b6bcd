"""Timelines of the regions, and the staleness of fragments, as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from experiments.report.html_data import Stale
from experiments.report.html_svg import (
    LETTER,
    RIGHT,
    TOP,
    Axis,
    Scale,
    axes,
    figure,
    scale_of,
    shortened,
    svg,
    text,
)
from lowcomm_jax.network import Timeline
from lowcomm_jax.network.timeline import KINDS, LEGEND

_LANE, _ROW = 34, 20
_MARGIN = 40  # below: ticks and label
# Place of a kind of bar in its region's lane: offset and height.
_PLACES = {"send": (2, 4), "land": (1, 30)}
_NAMES = 74  # units on the left, for names of regions
_FRAGMENTS = 138  # and for those of runs with a fragment


def timeline(name: str, found: Timeline) -> str:
    """A figure: one lane a region, travelling bytes as a thin bar above what the region does."""
    begin = min(bar.start_s for bar in found.bars)
    bottom = TOP + _LANE * len(found.regions)
    x = Axis("virtual seconds", lambda v: f"{v:g}", low=begin, high=found.end_s)
    across = scale_of(x, [begin, found.end_s], _NAMES + 2, RIGHT)
    parts = [axes(across, None, x, None, bottom)]
    for number, region in enumerate(found.regions):
        label = shortened(region, _NAMES - 8)
        parts.append(text(_NAMES - 4, TOP + _LANE * number + 22, label, "end"))
    for kind in KINDS:
        offset, height = _PLACES.get(kind, (10, 18))
        boxes = []
        for bar in found.bars:
            if bar.kind != kind:
                continue
            left, y = across(bar.start_s), TOP + _LANE * bar.region + offset
            wide = 0.8 if kind == "land" else max(0.3, across(bar.end_s) - left)
            boxes.append(f"M{left:.2f} {y}h{wide:.2f}v{height}h{-wide:.2f}z")
        if boxes:
            parts.append(
                f'<path class="k-{kind}" d="{"".join(boxes)}"><title>{LEGEND[kind]}</title></path>'
            )
    picture = svg("".join(parts), f"timeline of {name}", bottom + _MARGIN)
    return f'<div class="run" data-run="{html.escape(name)}">{figure(name, picture)}</div>'


def legend() -> str:
    """What the colours of the timelines mean."""
    items = (f'<span class="key"><i class="k-{k}"></i>{LEGEND[k]}</span>' for k in KINDS)
    return f'<p class="keys">{"".join(items)}</p>'


def staleness(rows: Sequence[Stale], colour: Mapping[str, int]) -> str:
    """A figure: from the smallest to the largest staleness of every fragment, a dot at the mean."""
    title = "staleness per fragment"
    if not rows:
        return figure(title, '<p class="none">nothing landed</p>')
    bottom = TOP + _ROW * len(rows)
    x = Axis("inner steps from send to landing", lambda v: f"{v:g}", low=0)
    across = scale_of(x, [max(1, *(row.high for row in rows))], _FRAGMENTS + 6, RIGHT - 6)
    parts = [axes(across, None, x, None, bottom)]
    parts += [_range(row, TOP + _ROW * (i + 0.5), across, colour) for i, row in enumerate(rows)]
    return figure(title, svg("".join(parts), title, bottom + _MARGIN))


def _range(row: Stale, y: float, across: Scale, colour: Mapping[str, int]) -> str:
    low, mean, high = across(row.low), across(row.mean), across(row.high)
    name = html.escape(row.name)
    label = shortened(row.name, _FRAGMENTS - LETTER * (1 + len(row.fragment)))
    return (
        f'<g class="s s{colour[row.name] % 8}" data-run="{name}">'
        f"{text(_FRAGMENTS, f'{y + 4:g}', f'{label} {row.fragment}', 'end')}"
        f'<path class="line" d="M{low:.1f} {y:g}H{high:.1f}"/>'
        f'<circle cx="{mean:.1f}" cy="{y:g}" r="4"><title>{name}, fragment {row.fragment}: mean '
        f"{row.mean:.1f}, {row.low} to {row.high}</title></circle></g>"
    )
