"""Compares the rungs of two campaigns that test the same claims on different texts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from evidence.campaign.plan import Campaign
from evidence.results.effects import OPEN, Effect
from evidence.results.markdown import count, kind

AGREE, DIFFER = "agree", "differ"
_ORDER = (DIFFER, OPEN, AGREE)
_NEAR = 2.0  # times the parameters within which models are compared


@dataclasses.dataclass(frozen=True)
class Judged:
    """A campaign with the effects of each claim, by its name."""

    campaign: Campaign
    effects: Mapping[str, Sequence[Effect]]

    def tested(self) -> Iterator[Effect]:
        """Effects with enough seeds."""
        return (effect for of in self.effects.values() for effect in of if effect.tested)

    def params(self, effect: Effect) -> float:
        """Parameters of the model of an effect."""
        return self.campaign.sizes[effect.rung.size].params

    def told(self, effect: Effect) -> str:
        """An effect in a cell of a table."""
        size, seeds = count(self.params(effect)), len(effect.differences)
        return f"{size}, {seeds} seeds: {effect.told}, {effect.status}"


def section(here: Judged, there: Judged) -> str:
    """The part of a page on which rungs of two campaigns agree."""
    compared = [(agreement(*pair), *pair) for pair in pairs(here, there)]
    compared.sort(key=lambda row: _ORDER.index(row[0]))
    title = ["## On both corpora", ""]
    if not compared:
        return "\n".join([*title, f"No rung is on this page and on that of {_link(there)}."])
    rows = [
        f"| [{one.claim}](#{one.claim}) | {one.rung.rounds} rounds, {one.rung.regions} regions "
        f"| {kind(one.rung.split)} | {here.told(one)} | {there.told(other)} | {word} |"
        for word, one, other in compared
    ]
    return "\n".join(
        [
            *title,
            f"Rungs of this page beside those on {_link(there)} with as many rounds and regions, "
            f"at the nearest number of parameters, which differs by less than {_NEAR:g} times. "
            "`agree`: both are as claimed, or both the opposite. `differ`: one is as claimed, the "
            "other the opposite. `open`: at least one is open. p-values are corrected within each "
            "page alone, and losses are in nats of its own tokens.",
            "",
            _counts(compared),
            "",
            f"| claim | scale | data | {here.campaign.text} | {there.campaign.text} | |",
            "| --- " * 6 + "|",
            *rows,
        ]
    )


def _link(of: Judged) -> str:
    return f"[{of.campaign.text}]({of.campaign.page}.md)"


def _counts(compared: Sequence[tuple[str, Effect, Effect]]) -> str:
    """How many rungs and claims agree, and how far that is from agreeing in size."""
    found = Counter(word for word, *_ in compared)
    by_rounds: dict[int, list[str]] = {}
    by_claim: dict[str, list[str]] = {}
    for word, one, _ in compared:
        by_rounds.setdefault(one.rung.rounds, []).append(word)
        by_claim.setdefault(one.claim, []).append(word)
    after = ", ".join(
        f"{words.count(AGREE)} of {len(words)} after {rounds} rounds"
        for rounds, words in sorted(by_rounds.items())
    )
    everywhere = sum(set(words) == {AGREE} for words in by_claim.values())
    apart = sum(abs(one.mean - other.mean) > one.half + other.half for _, one, other in compared)
    return (
        f"Rungs on both pages: {len(compared)}. Agree: {found[AGREE]} ({after}). Differ: "
        f"{found[DIFFER]}. Open: {found[OPEN]}. Of {len(by_claim)} claims {everywhere} agree at "
        "all of their rungs; claims that share an arm are not independent tests. "
        f"Agreement is on the side of the margin, not on the size: at {apart} of the rungs the two "
        "95 % intervals do not overlap."
    )


def pairs(here: Judged, there: Judged) -> Iterator[tuple[Effect, Effect]]:
    """Each tested rung of `here` with the one of `there` that is nearest in size, if one is near.

    Rounds, H, regions, split, and names of both arms, margin and measure of the claim are equal.
    """

    def like(of: Judged, effect: Effect) -> tuple:
        claim, rung = of.campaign.claims[effect.claim], effect.rung
        same = (claim.name, claim.here, claim.there, claim.margin, claim.measure)
        return (*same, of.campaign.period, rung.rounds, rung.regions, rung.split)

    others: dict[tuple, list[Effect]] = {}
    for effect in there.tested():
        others.setdefault(like(there, effect), []).append(effect)
    for effect in here.tested():

        def times(other: Effect, params: float = here.params(effect)) -> float:
            return math.exp(abs(math.log(there.params(other) / params)))

        nearest = min(others.get(like(here, effect), []), key=times, default=None)
        if nearest is not None and times(nearest) < _NEAR:
            yield effect, nearest


def agreement(one: Effect, other: Effect) -> str:
    """`agree`, `differ`, or `open` where at least one effect is."""
    if OPEN in (one.status, other.status):
        return OPEN
    return AGREE if one.status == other.status else DIFFER
