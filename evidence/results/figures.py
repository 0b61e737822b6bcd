"""One picture a claim: the paired difference with its interval, against each kind of scale.

A picture carries the digest of what it shows, so that a check needs no drawing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence.campaign.plan import Campaign, Claim, Rung
from evidence.results.effects import OPEN, OPPOSITE, SEEN, Effect
from evidence.results.markdown import count, kind

_KEY = "Description"  # of the PNG's text
_MARKERS = {2: "o", 4: "s", 8: "D", 16: "^"}
_SPREAD = 0.4  # of points at one scale, as a part of the smallest step between scales
_FAINT = 0.35  # of points that no verdict counts
_LINE, _GAP = 0.075, 0.15  # inches: of a rung in the overview, and between claims


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

    Lines join scales that differ in nothing else.
    """
    from matplotlib.figure import Figure  # slow to import

    ways = [way for way in _WAYS if len({way.value(campaign, e.rung) for e in effects}) > 1]
    ways = ways or [_WAYS[0]]
    widths = [way.width for way in ways]
    figure = Figure(figsize=(max(6.6, 1.8 + sum(widths)), 3.8), layout="constrained")
    panels = figure.subplots(1, len(ways), sharey=True, squeeze=False, width_ratios=widths)[0]
    look = _Look(campaign, effects)
    for axes, way in zip(panels, ways, strict=True):
        _panel(axes, campaign, way, effects, look)
        axes.axhline(0.0, color="black", lw=0.8)
        if claim.margin:
            axes.axhline(100 * claim.margin, color="black", lw=0.8, ls=":", label="claim's margin")
    what = claim.measure.replace("_", " ")
    panels[0].set_ylabel(f"difference of the {what}, %")
    better = "better" if claim.measure == "loss" else "lower"
    figure.suptitle(
        f"{claim.here} against {claim.there} (below 0: {claim.here} is {better})", size=10
    )
    handles = [*look.legend(), *panels[0].get_legend_handles_labels()[0]]
    if handles:
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={_KEY: digest(effects), "Software": None})


@dataclasses.dataclass(frozen=True)
class _Way:
    """One way in which scales differ: a field of rungs; label and inches of its axis."""

    field: str
    label: str
    width: float

    def value(self, campaign: Campaign, rung: Rung) -> float:
        value = getattr(rung, self.field)
        return campaign.sizes[value].params if self.field == "size" else value


_WAYS = (
    _Way("rounds", "rounds", 3.0),
    _Way("size", "parameters", 3.8),
    _Way("regions", "regions", 3.0),
)


class _Look:
    """How an effect looks in every panel: color is size, shape regions, width rounds, fill data."""

    def __init__(self, campaign: Campaign, effects: Sequence[Effect]):
        rungs = [effect.rung for effect in effects]
        self._campaign = campaign
        self._tested = [effect.tested for effect in effects]
        self.sizes = [size for size in campaign.sizes if size in {r.size for r in rungs}]
        self.rounds = sorted({r.rounds for r in rungs})
        self.regions = sorted({r.regions for r in rungs})
        self.splits = sorted({r.split for r in rungs}, key="iid".__ne__)

    def color(self, size: str) -> str:
        return f"C{list(self._campaign.sizes).index(size)}"

    def _width(self, rounds: int) -> float:
        return 3.5 + 1.7 * self.rounds.index(rounds)

    def marker(self, effect: Effect) -> dict[str, Any]:
        rung = effect.rung
        return {
            "alpha": 1.0 if effect.tested else _FAINT,
            "color": self.color(rung.size),
            "marker": _MARKERS.get(rung.regions, "v"),
            "ms": self._width(rung.rounds),
            "mfc": self.color(rung.size) if rung.split == "iid" else "white",
        }

    def legend(self) -> list[Any]:
        """An entry for every value of what differs."""
        from matplotlib.lines import Line2D

        def entry(label: str, **look: Any) -> Line2D:
            look = {"color": "0.4", "marker": "o", "ms": 5, **look}
            return Line2D([], [], ls="none", label=label, **look)

        params = {size: count(self._campaign.sizes[size].params) for size in self.sizes}
        few = [] if all(self._tested) else [entry("too few seeds", alpha=_FAINT)]
        entries = (
            [entry(f"{params[s]} parameters", color=self.color(s)) for s in self.sizes],
            [entry(f"{n} regions", marker=_MARKERS.get(n, "v")) for n in self.regions],
            [entry(f"{n} rounds", ms=self._width(n)) for n in self.rounds],
            [entry(kind(s), mfc="0.4" if s == "iid" else "white") for s in self.splits],
        )
        return [one for of in entries if len(of) > 1 for one in of] + few


def _panel(
    axes: Any, campaign: Campaign, way: _Way, effects: Sequence[Effect], look: _Look
) -> None:
    """Differences against one way to scale; points at one scale stand beside each other."""
    lines: dict[Rung, list[Effect]] = {}  # by a rung with 0 or "" in the field that varies
    for effect in effects:
        blank = "" if way.field == "size" else 0
        lines.setdefault(dataclasses.replace(effect.rung, **{way.field: blank}), []).append(effect)
    values = sorted({way.value(campaign, effect.rung) for effect in effects})
    gap = min((b / a for a, b in itertools.pairwise(values)), default=2.0)
    for number, (key, of) in enumerate(lines.items()):
        place = number / (len(lines) - 1) - 0.5 if len(lines) > 1 else 0.0
        of = sorted(of, key=lambda effect: way.value(campaign, effect.rung))
        x = [way.value(campaign, effect.rung) * gap ** (_SPREAD * place) for effect in of]
        y = [100 * effect.mean for effect in of]
        style = "-" if key.split == "iid" else "--"
        line = [one for one in zip(x, y, of, strict=True) if one[2].tested]
        joined = [[at for at, *_ in line], [height for _, height, _ in line]]
        axes.plot(*joined, color=look.color(key.size) if key.size else "0.6", ls=style, lw=0.9)
        for at, height, effect in zip(x, y, of, strict=True):
            half = 100 * (effect.half or 0.0)
            axes.errorbar(at, height, half, lw=1, capsize=2, **look.marker(effect))
    axes.set_xscale("log", base=2)
    names = [count(value) if way.field == "size" else str(value) for value in values]
    axes.set_xticks(values, names, size=8, rotation=45 if way.field == "size" else 0)
    axes.minorticks_off()
    axes.set_xlim(values[0] / gap**0.7, values[-1] * gap**0.7)
    per_round = f" of {campaign.period} steps" if way.field == "rounds" else ""
    axes.set_xlabel(way.label + per_round)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = digest(rows)
    figure.savefig(path, dpi=110, metadata={_KEY: shown, "Software": None})
