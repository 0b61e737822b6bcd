"""Compares the rungs of two campaigns that test the same claims on different texts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from evidence.campaign.plan import Campaign
from evidence.results.effects import OPEN, Effect
from evidence.results.markdown import count, filled, kind, table

AGREE, DIFFER = "agree", "differ"
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

    def like(self, effect: Effect) -> tuple:
        """What is equal of rungs that are compared: all but their size, and the claim's arms."""
        claim, rung = self.campaign.claims[effect.claim], effect.rung
        same = (claim.name, claim.here, claim.there, claim.margin, claim.measure)
        return (*same, self.campaign.period, rung.rounds, rung.regions, rung.split)


def section(here: Judged, there: Judged) -> str:
    """The part of a page on which rungs of two campaigns agree."""
    compared = [(agreement(*pair), *pair) for pair in pairs(here, there)]
    compared.sort(key=lambda row: (DIFFER, OPEN, AGREE).index(row[0]))
    link = f"[{there.campaign.text}]({there.campaign.page}.md)"
    if not compared:
        return f"## On both corpora\n\nNo rung is on this page and on that of {link}."
    rows, by_rounds = [], {}
    for word, one, other in compared:
        scale = f"{one.rung.rounds} rounds, {one.rung.regions} regions"
        claim, data = f"[{one.claim}](#{one.claim})", kind(one.rung.split)
        rows.append((claim, scale, data, here.told(one), there.told(other), word))
        by_rounds.setdefault(one.rung.rounds, []).append(word)
    found = Counter(word for word, *_ in compared)
    after = (f"{of.count(AGREE)} of {len(of)} after {n} rounds" for n, of in by_rounds.items())
    claims = {one.claim for _, one, _ in compared}
    not_all = {one.claim for word, one, _ in compared if word != AGREE}
    heads = ("claim", "scale", "data", here.campaign.text, there.campaign.text, "")
    return filled(
        "corpora",
        link=link,
        near=_NEAR,
        both=len(compared),
        after=", ".join(of for _, of in sorted(zip(by_rounds, after))),
        **{word: found[word] for word in (AGREE, DIFFER, OPEN)},
        claims=len(claims),
        everywhere=len(claims - not_all),
        apart=sum(abs(one.mean - o.mean) > one.half + o.half for _, one, o in compared),
        table="\n".join(table(heads, rows)),
    )


def pairs(here: Judged, there: Judged) -> Iterator[tuple[Effect, Effect]]:
    """Each tested rung of `here` with the one of `there` that is nearest in size, if one is near.

    Rounds, H, regions, split, and names of both arms, margin and measure of the claim are equal.
    """
    for effect in here.tested():
        near = {
            abs(math.log(there.params(other) / here.params(effect))): other
            for other in reversed([*there.tested()])
            if there.like(other) == here.like(effect)
        }
        if near and math.exp(min(near)) < _NEAR:
            yield effect, near[min(near)]


def agreement(one: Effect, other: Effect) -> str:
    """`agree`, `differ`, or `open` where at least one effect is."""
    if OPEN in (one.status, other.status):
        return OPEN
    return AGREE if one.status == other.status else DIFFER
