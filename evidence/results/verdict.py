"""The verdict on a claim from its rungs: holds, holds from a scale on, not seen, contradicted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from evidence.campaign.plan import Campaign, Rung
from evidence.results.effects import OPPOSITE, SEEN, Effect, spreads_of
from evidence.results.stats import Spread, against_margin
from experiments.report.stats import Estimate, estimate

Scale = tuple[str, int]  # size, rounds

CONTRADICTED, NOT_SEEN, HOLDS_FROM, HOLDS, NO_VERDICT = (
    "contradicted",
    "not seen up to",
    "holds from",
    "holds",
    "no verdict",
)
ORDER = (CONTRADICTED, NOT_SEEN, HOLDS_FROM, HOLDS, NO_VERDICT)  # unflattering results first


@dataclasses.dataclass(frozen=True)
class Trend(Estimate):
    """What ten times as much of something changes of a difference, in shares of the loss.

    Of each seed the slope over the logarithm that fits best over all rungs that differ in nothing
    else, then the mean. `count` is 0 where none do. Seeds that lack a rung with a verdict are left
    out: over other rungs, a slope is another quantity.

    Attributes:
      seen: how many times as much was compared, at most; 1 where nothing was.
    """

    seen: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a claim for one split of the data.

    Attributes:
      word: one of `ORDER`.
      scale: the scale that the word refers to; None without a verdict.
      over_rounds, over_size, over_both, over_regions: over rounds; parameters, at equal rounds;
        parameters, at as many tokens a parameter; and regions.
    """

    claim: str
    split: str
    word: str
    scale: Scale | None
    over_rounds: Trend
    over_size: Trend
    over_both: Trend
    over_regions: Trend


def verdicts(campaign: Campaign, found: Mapping[str, Sequence[Effect]]) -> tuple[Verdict, ...]:
    """One verdict for each claim and split, from all rungs of it.

    - `holds`: seen at every rung, of at least two scales;
    - `holds from`: seen at every rung of this scale and of all larger ones; every scale where it
      is not seen has a model no larger, and no more rounds;
    - `contradicted`: the opposite at every rung, of at least two scales, and the distance from the
      margin no smaller at the largest scale than at the smallest;
    - `not seen up to` the largest scale where it is not: everything else.

    A rung without enough seeds does not count. Intervals of slopes are moderated like those of
    differences, by how slopes over the same vary.
    """

    def params(rung: Rung) -> float:
        return campaign.sizes[rung.size].params

    def share(rung: Rung) -> int:
        """Tokens a parameter, to the nearest power of two."""
        return round(math.log2(campaign.tokens(rung.size, rung.rounds) / params(rung)))

    ways = {
        "over_rounds": (lambda r: r.rounds, lambda r: (r.size, r.regions)),
        "over_size": (params, lambda r: (r.rounds, r.regions)),
        "over_both": (params, lambda r: (share(r), r.regions)),
        "over_regions": (lambda r: r.regions, lambda r: (r.size, r.rounds)),
    }
    groups: dict[tuple[str, str], list[Effect]] = {}
    for name, of in found.items():
        for effect in of:
            groups.setdefault((name, effect.rung.split), []).append(effect)
    tested = {key: [e for e in of if e.tested] for key, of in groups.items()}
    over: dict[tuple[str, str], dict[str, Trend]] = {key: {} for key in groups}
    for way, (level, rest) in ways.items():
        slopes = {key: _slopes(of, level, rest) for key, of in tested.items()}
        by_claim = {name: [v for (n, _), v in slopes.items() if n == name] for name in found}
        spreads = spreads_of(campaign, by_claim, 2)
        for key, values in slopes.items():
            seen = _seen(tested[key], level, rest)
            over[key][way] = _moderated(values, spreads[key[0]], seen)
    return tuple(Verdict(*key, *_word_of(campaign, tested[key]), **over[key]) for key in groups)


def _moderated(slopes: Sequence[float], spread: Spread, seen: float) -> Trend:
    test = against_margin(slopes, 0.0, spread) if len(slopes) > 1 else estimate(slopes)
    return Trend(test.mean, test.half, len(slopes), seen)


def _seen(effects: Sequence[Effect], level, rest) -> float:
    """The largest over the smallest level of rungs that differ in nothing else, at most."""
    groups: dict[tuple, list[float]] = {}
    for effect in effects:
        groups.setdefault(rest(effect.rung), []).append(level(effect.rung))
    return max((max(of) / min(of) for of in groups.values()), default=1.0)


def _word_of(campaign: Campaign, tested: Sequence[Effect]) -> tuple[str, Scale | None]:
    order = list(campaign.sizes)
    by_scale: dict[Scale, list[Effect]] = {}
    for effect in sorted(tested, key=lambda e: (order.index(e.rung.size), e.rung.rounds)):
        by_scale.setdefault((effect.rung.size, effect.rung.rounds), []).append(effect)
    return word_of(by_scale, order) if by_scale else (NO_VERDICT, None)


def word_of(by_scale: Mapping[Scale, Sequence[Effect]], order: list[str]) -> tuple[str, Scale]:
    """The word on a claim, and its scale, from its rungs by scale; `order`: names of sizes."""
    scales = list(by_scale)
    statuses = {scale: {effect.status for effect in of} for scale, of in by_scale.items()}
    unseen = [scale for scale in scales if statuses[scale] != {SEEN}]
    if not unseen and len(scales) > 1:
        return HOLDS, scales[-1]
    for scale in scales[scales.index(unseen[-1]) + 1 :] if unseen else scales:
        largest, longest = order.index(scale[0]), scale[1]
        if all(order.index(size) <= largest and rounds <= longest for size, rounds in unseen):
            return HOLDS_FROM, scale
    opposite = all(found == {OPPOSITE} for found in statuses.values())
    above = [np.mean([e.mean - e.margin for e in of]) for of in by_scale.values() if opposite]
    if opposite and len(scales) > 1 and above[-1] >= above[0]:
        return CONTRADICTED, scales[-1]
    return NOT_SEEN, unseen[-1] if unseen else scales[-1]


def _slopes(effects: Sequence[Effect], level, rest) -> list[float]:
    """By seed, of the difference over log10 of a level, with an intercept for everything else."""
    if not effects:
        return []
    complete = set.intersection(*(set(effect.differences) for effect in effects))
    rows = pd.DataFrame(
        [
            (seed, rest(e.rung), math.log10(level(e.rung)), e.differences[seed])
            for seed in sorted(complete)
            for e in effects
        ],
        columns=["seed", "rest", "x", "y"],
    )
    xy = rows[["x", "y"]] - rows.groupby(["seed", "rest"])[["x", "y"]].transform("mean")
    spread = (xy.x**2).groupby(rows.seed).sum()
    slopes = (xy.x * xy.y).groupby(rows.seed).sum() / spread
    return slopes[spread > 1e-12].tolist()
