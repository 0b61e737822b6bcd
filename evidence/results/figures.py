"""One picture a claim: the paired difference with its interval, against each kind of scale.

A picture carries the digest of what it shows, so that a check needs no drawing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evidence.campaign.plan import Campaign, Claim, Rung
from evidence.results.effects import OPEN, OPPOSITE, SEEN, Effect
from evidence.results.markdown import count, kind

_KEY = "Description"  # of the PNG's text
_WAYS = {"rounds": 3.0, "size": 3.8, "regions": 3.0}  # inches of a panel
_MARKERS = {2: "o", 4: "s", 8: "D", 16: "^"}
_SPREAD = 0.4  # of points at one scale, as a part of the smallest step between scales
_FAINT = 0.35  # of points that no verdict counts
_LINE, _GAP = 0.075, 0.15  # inches: of a rung in the overview, and between claims

Look = Callable[[Effect], dict[str, Any]]


def digest(effects: Sequence[Effect]) -> str:
    """Of everything that the picture of these effects shows, but for a number's last digits.

    Those differ between versions of NumPy.
    """
    shown = []
    for e in effects:
        numbers = [None if x is None else f"{x:.6g}" for x in (e.mean, e.half)]
        shown.append([*vars(e.rung).values(), *numbers, e.margin, e.status, len(e.differences)])
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest that a picture carries; None if there is no such picture."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get(_KEY)


def draw(campaign: Campaign, claim: Claim, effects: Sequence[Effect], path: Path) -> None:
    """Draw the effects of one claim: a panel for each way in which its scales differ.

    Lines join scales that differ in nothing else. Color is size, shape regions, width rounds, fill
    the split of the data.
    """
    from matplotlib.figure import Figure  # slow to import

    rungs = [effect.rung for effect in effects]
    ways = [way for way in _WAYS if len({getattr(rung, way) for rung in rungs}) > 1] or ["rounds"]
    widths = [_WAYS[way] for way in ways]
    figure = Figure(figsize=(max(6.6, 1.8 + sum(widths)), 3.8), layout="constrained")
    panels = figure.subplots(1, len(ways), sharey=True, squeeze=False, width_ratios=widths)[0]
    sizes = {size: f"C{i}" for i, size in enumerate(campaign.sizes)}
    widths = {n: 3.5 + 1.7 * i for i, n in enumerate(sorted({rung.rounds for rung in rungs}))}

    def look(effect: Effect) -> dict[str, Any]:
        color = sizes[effect.rung.size]
        return {
            "alpha": 1.0 if effect.tested else _FAINT,
            "color": color,
            "marker": _MARKERS.get(effect.rung.regions, "v"),
            "ms": widths[effect.rung.rounds],
            "mfc": color if effect.rung.split == "iid" else "white",
        }

    for axes, way in zip(panels, ways, strict=True):
        _panel(axes, campaign, way, effects, look)
        axes.axhline(0.0, color="black", lw=0.8)
        if claim.margin:
            axes.axhline(100 * claim.margin, color="black", lw=0.8, ls=":", label="claim's margin")
    panels[0].set_ylabel(f"difference of the {claim.measure.replace('_', ' ')}, %")
    better = "better" if claim.measure == "loss" else "lower"
    title = f"{claim.here} against {claim.there} (below 0: {claim.here} is {better})"
    figure.suptitle(title, size=10)
    handles = [*_legend(campaign, effects, look), *panels[0].get_legend_handles_labels()[0]]
    if handles:
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize="small")
    _save(figure, effects, path)


def _save(figure: Any, effects: Sequence[Effect], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={_KEY: digest(effects), "Software": None})


def _legend(campaign: Campaign, effects: Sequence[Effect], look: Look) -> Iterator[Any]:
    """An entry for every value of what differs."""
    from matplotlib.lines import Line2D

    told = {
        "size": (lambda r: f"{count(campaign.sizes[r.size].params)} parameters", "color"),
        "regions": (lambda r: f"{r.regions} regions", "marker"),
        "rounds": (lambda r: f"{r.rounds} rounds", "ms"),
        "split": (lambda r: kind(r.split), "mfc"),
    }
    order = {"size": list(campaign.sizes).index, "split": "iid".__ne__}
    usual = {"color": "0.4", "marker": "o", "ms": 5, "ls": "none"}
    for field, (label, of) in told.items():
        one_of_each = {getattr(effect.rung, field): effect for effect in effects}
        values = sorted(one_of_each, key=order.get(field))
        for value in values if len(values) > 1 else ():
            shown = look(one_of_each[value])[of]
            shown = "0.4" if of == "mfc" and shown != "white" else shown
            yield Line2D([], [], label=label(one_of_each[value].rung), **{**usual, of: shown})
    if not all(effect.tested for effect in effects):
        yield Line2D([], [], label="too few seeds", alpha=_FAINT, **usual)


def _panel(axes: Any, campaign: Campaign, way: str, effects: Sequence[Effect], look: Look) -> None:
    """Differences against one way to scale; points at one scale stand beside each other."""

    def level(effect: Effect) -> float:
        value = getattr(effect.rung, way)
        return campaign.sizes[value].params if way == "size" else value

    lines: dict[Rung, list[Effect]] = {}  # by a rung without the field that varies
    for effect in effects:
        lines.setdefault(dataclasses.replace(effect.rung, **{way: None}), []).append(effect)
    values = sorted(set(map(level, effects)))
    gap = min((b / a for a, b in itertools.pairwise(values)), default=2.0)
    for number, (key, of) in enumerate(lines.items()):
        place = number / (len(lines) - 1) - 0.5 if len(lines) > 1 else 0.0
        at = [(level(e) * gap ** (_SPREAD * place), 100 * e.mean, e) for e in sorted(of, key=level)]
        joined = [[p[i] for p in at if p[2].tested] for i in (0, 1)]
        color = look(of[0])["color"] if key.size else "0.6"
        axes.plot(*joined, color=color, ls="-" if key.split == "iid" else "--", lw=0.9)
        for x, y, effect in at:
            axes.errorbar(x, y, 100 * (effect.half or 0.0), lw=1, capsize=2, **look(effect))
    axes.set_xscale("log", base=2)
    names = [count(value) if way == "size" else str(value) for value in values]
    axes.set_xticks(values, names, size=8, rotation=45 if way == "size" else 0)
    axes.minorticks_off()
    axes.set_xlim(values[0] / gap**0.7, values[-1] * gap**0.7)
    label = {"size": "parameters", "rounds": f"rounds of {campaign.period} steps"}
    axes.set_xlabel(label.get(way, way))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def overview(campaign: Campaign, rows: Sequence[Effect], path: Path) -> None:
    """Draw all effects: a band a claim, a line a rung in it, from the smallest scale down."""
    from matplotlib.figure import Figure

    claims = {effect.claim: effect.margin for effect in rows}
    height = _LINE * len(rows) + _GAP * len(claims)
    figure = Figure(figsize=(8.2, 1.2 + height), layout="constrained")
    axes = figure.add_subplot()
    colors = {SEEN: "C2", OPPOSITE: "C3", OPEN: "0.5"}
    words = {SEEN: "as claimed", OPPOSITE: "the opposite", OPEN: "neither is shown"}
    sizes, told, ticks, y = list(campaign.sizes), set(), [], 0.0
    for number, name in enumerate(claims):
        of, top = [effect for effect in rows if effect.claim == name], y
        y += _GAP / 2
        for effect in of:
            status, size = effect.status, sizes.index(effect.rung.size)
            axes.errorbar(
                100 * (effect.mean - effect.margin),
                y + _LINE / 2,
                xerr=None if effect.half is None else 100 * effect.half,
                color=colors[status],
                marker="o" if effect.rung.split == "iid" else "s",
                ms=3 + size,
                lw=1,
                ls="none",
                label=words[status] if status not in told else None,
            )
            told.add(status)
            y += _LINE
        y += _GAP / 2
        ticks.append((top + y) / 2)
        if number % 2:
            axes.axhspan(top, y, color="0.96", lw=0)
    names = [f"{campaign.claims[n].here} / {campaign.claims[n].there}" for n in claims]
    axes.set_yticks(ticks, names, size=8)
    axes.set_ylim(y, 0.0)
    axes.axvline(0.0, color="black", lw=0.8)
    axes.set_xlabel(
        "difference of the loss, less the claim's margin, %; a line a scale, the smallest on top\n"
        "(larger mark: more parameters; square: regions with topics of their own)",
        size=8,
    )
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    _save(figure, rows, path)
