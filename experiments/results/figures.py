"""One picture a claim: the paired difference with its interval against the number of rounds.

A picture carries the digest of what it shows, so that a check needs no drawing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.campaign.plan import Campaign, Claim
from experiments.results.effects import OPEN, OPPOSITE, SEEN, Effect

_KEY = "Description"  # of the PNG's text
_MARKERS = {2: "o", 4: "s", 8: "D", 16: "^"}
_SPREAD = 0.05  # of points at equal rounds, in doublings
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
    """Draw the effects of one claim."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(8.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple, list[Effect]] = {}
    for effect in effects:
        rung = effect.rung
        lines.setdefault((rung.size, rung.regions, rung.split), []).append(effect)
    sizes = list(campaign.sizes)
    for number, ((size, regions, split), of) in enumerate(lines.items()):
        offset = 2 ** (_SPREAD * (number - (len(lines) - 1) / 2) * 2)
        x = [effect.rung.rounds * offset for effect in of]
        y = [100 * effect.mean for effect in of]
        color = f"C{sizes.index(size)}"
        axes.errorbar(
            x,
            y,
            [100 * (effect.half or 0.0) for effect in of],
            color=color if split == "iid" else f"C{sizes.index(size) + 5}",
            marker=_MARKERS.get(regions, "v"),
            ls="-" if split == "iid" else "--",
            lw=1.2,
            ms=5,
            capsize=3,
            label=f"{count(campaign.sizes[size].params)}, {regions} regions, {kind(split)}",
        )
    axes.axhline(0.0, color="black", lw=0.8)
    if claim.margin:
        axes.axhline(100 * claim.margin, color="black", lw=0.8, ls=":", label="margin of the claim")
    rounds = sorted({effect.rung.rounds for effect in effects})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rounds, [str(r) for r in rounds])
    axes.minorticks_off()
    axes.set_xlim(rounds[0] / 1.6, rounds[-1] * 1.6)
    what = claim.measure.replace("_", " ")
    axes.set(xlabel=f"rounds of {campaign.period} steps", ylabel=f"difference of the {what}, %")
    better = "better" if claim.measure == "loss" else "lower"
    axes.set_title(
        f"{claim.here} against {claim.there} (below 0: {claim.here} is {better})", size=10
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={_KEY: digest(effects), "Software": None})


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


def count(params: float) -> str:
    """Parameters for people: 0.18M, 10M, 1B."""
    if params >= 1e9:
        return f"{params / 1e9:.2g}B"
    return f"{params / 1e6:.2g}M"


def kind(split: str) -> str:
    """A split for people."""
    return {"iid": "i.i.d.", "topic": "by topic"}.get(split, split)
