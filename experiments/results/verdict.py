"""The verdict on a claim from its rungs: holds, holds from a scale on, not seen, contradicted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from experiments.campaign.plan import Campaign
from experiments.compare.stats import Estimate, estimate
from experiments.results.effects import OPPOSITE, SEEN, Effect

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
class Verdict:
    """The verdict on a claim for one split of the data.

    Attributes:
      word: one of `ORDER`.
      scale: the scale that the word refers to; None without a verdict.
      over_rounds, over_size, over_regions: change of the difference with ten times the rounds,
        parameters or regions, in shares of the loss: of each seed the slope that fits best over
        all rungs that differ in nothing else, then the mean. `count` 0 where none do. Seeds that
        lack a rung with a verdict are left out: over other rungs, a slope is another quantity.
    """

    claim: str
    split: str
    word: str
    scale: Scale | None
    over_rounds: Estimate
    over_size: Estimate
    over_regions: Estimate


def verdict(campaign: Campaign, effects: Sequence[Effect]) -> Verdict:
    """Of all rungs of one claim on one split.

    - `holds`: seen at every rung, of at least two scales;
    - `holds from`: seen at every rung of this scale and of all larger ones; every scale where it
      is not seen has a model no larger, and no more rounds;
    - `contradicted`: the opposite at every rung, of at least two scales, and the distance from the
      margin no smaller at the largest scale than at the smallest;
    - `not seen up to` the largest scale where it is not: everything else.

    A rung without enough seeds does not count.
    """
    order = list(campaign.sizes)
    tested = [effect for effect in effects if effect.adjusted is not None]
    by_scale: dict[Scale, list[Effect]] = {}
    for effect in tested:
        by_scale.setdefault((effect.rung.size, effect.rung.rounds), []).append(effect)
    scales = sorted(by_scale, key=lambda s: (order.index(s[0]), s[1]))
    word, scale = _word(scales, by_scale, order)
    return Verdict(
        effects[0].claim,
        effects[0].rung.split,
        word,
        scale,
        _slope(tested, lambda rung: rung.rounds, lambda rung: (rung.size, rung.regions)),
        _slope(
            tested,
            lambda rung: campaign.sizes[rung.size].params,
            lambda rung: (rung.rounds, rung.regions),
        ),
        _slope(tested, lambda rung: rung.regions, lambda rung: (rung.size, rung.rounds)),
    )


def _word(scales: Sequence[Scale], by_scale, order: list[str]) -> tuple[str, Scale | None]:
    if not scales:
        return NO_VERDICT, None
    statuses = [{effect.status for effect in by_scale[scale]} for scale in scales]
    seen = [found == {SEEN} for found in statuses]
    if all(seen) and len(scales) > 1:
        return HOLDS, scales[-1]
    unseen = [scale for scale, found in zip(scales, seen, strict=True) if not found]
    for scale in scales[len(seen) - seen[::-1].index(False) :] if unseen else scales:
        largest, longest = order.index(scale[0]), scale[1]
        if all(order.index(size) <= largest and rounds <= longest for size, rounds in unseen):
            return HOLDS_FROM, scale
    opposite = all(found == {OPPOSITE} for found in statuses)
    if opposite and len(scales) > 1 and not _shrinks(by_scale[scales[0]], by_scale[scales[-1]]):
        return CONTRADICTED, scales[-1]
    return NOT_SEEN, unseen[-1] if unseen else scales[-1]


def _shrinks(small: Sequence[Effect], large: Sequence[Effect]) -> bool:
    return excess(large) < excess(small)


def excess(effects: Sequence[Effect]) -> float:
    """Mean distance above the margin."""
    return float(np.mean([effect.mean - effect.margin for effect in effects]))


def _slope(effects: Sequence[Effect], level, rest) -> Estimate:
    """Of the difference over log10 of a level, with an intercept for everything else."""
    if not effects:
        return estimate([])
    complete = set.intersection(*(set(effect.differences) for effect in effects))
    groups: dict[int, dict[tuple, list[tuple[float, float]]]] = {}  # by seed, by the rest
    for effect in effects:
        at = math.log10(level(effect.rung))
        for seed in sorted(complete):
            of = groups.setdefault(seed, {})
            of.setdefault(rest(effect.rung), []).append((at, effect.differences[seed]))
    slopes = []
    for of in groups.values():
        centred = np.concatenate([np.array(g) - np.mean(g, axis=0) for g in of.values()])
        levels, differences = centred.T
        spread = float(levels @ levels)
        slopes.append(float(levels @ differences) / spread if spread > 1e-12 else None)
    return estimate(slopes)
