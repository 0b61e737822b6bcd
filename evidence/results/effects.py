"""Each claim at each rung: paired differences, their tests, and bytes and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evidence.campaign.cells import Cell
from evidence.campaign.ledger import CURVE, Records
from evidence.campaign.order import UNKNOWN, Points, cells_of
from evidence.campaign.plan import LEAST_SEEDS, Campaign, Claim, Rung
from experiments.compare.at_equal import loss_at
from experiments.compare.stats import (
    Estimate,
    Spread,
    against_margin,
    crossing,
    effect_size,
    estimate,
    holm,
    spread_of,
)

SURE = 0.05  # a p-value after the correction below which a rung counts
SEEN, OPPOSITE, OPEN = "seen", "opposite", "open"

Record = Mapping[str, Any]
Pairs = dict[Rung, dict[int, tuple[Record, Record]]]  # rung -> seed -> records of both arms


@dataclasses.dataclass(frozen=True)
class Effect:
    """A claim at a rung.

    Attributes:
      measure: what is compared, see `campaign.config.claim`.
      differences: seed -> measure of `here` over that of `there`, less 1.
      values: mean measure of (here, there) over these seeds; a loss in nats per token.
      half: half the width of the 95 % interval of the mean.
      p: p-value, two-sided against the claim's margin.
      adjusted: the same, corrected over all rungs of all claims of the family (Holm). All three
        are None with fewer seeds than a verdict needs.
      size_of_effect: Hedges' g of the differences.
      exchanges, bytes, seconds: exchanges of `here` over those of `there`; bytes sent by a region
        and virtual time likewise. None where `there` has none.
      fewer_bytes: bytes of AllReduce over those of `here`.
      tokens: of `here` over those of `there`, to the higher of both final losses: below 1 where
        `here` has the lower one. Over seeds; without a value where a loss is not finite.
      at_equal_bytes, at_equal_time: difference of the loss where both had spent as much as the
        cheaper one, the mean over seeds; None where that is before the first evaluation of either.
      failed: seeds of which a run failed.
    """

    claim: str
    rung: Rung
    margin: float
    measure: str
    differences: dict[int, float]
    values: tuple[float, float]
    half: float | None
    p: float | None
    adjusted: float | None
    size_of_effect: float | None
    exchanges: float | None
    bytes: float | None
    seconds: float | None
    fewer_bytes: float | None
    tokens: Estimate
    at_equal_bytes: float | None
    at_equal_time: float | None
    failed: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.differences.values())))

    @property
    def tested(self) -> bool:
        """Whether it has the seeds that a verdict needs."""
        return self.adjusted is not None

    @property
    def told(self) -> str:
        """The mean difference with its interval, in per cent."""
        half = "" if self.half is None else f" ± {100 * self.half:.1f}"
        return f"{100 * self.mean:+.1f}{half} %"

    @property
    def status(self) -> str:
        """`seen`: below the margin; `opposite`: above it; `open`: neither is shown.

        A run that failed leaves the rung open: what its seed would have shown is not known.
        """
        if self.failed or self.adjusted is None or self.adjusted >= SURE:
            return OPEN
        return SEEN if self.mean < self.margin else OPPOSITE


def effects(campaign: Campaign, ledger: Records) -> dict[str, list[Effect]]:
    """Claim -> its rungs with at least one pair, from the smallest scale.

    There are two families: claims on methods, and claims on variants of them. Within one, p-values
    are corrected, and rungs with one measure lend each other their spread.
    """
    points = Points(campaign, ledger)
    pairs = {
        name: {
            rung: _pairs(ledger, cells_of(claim, rung, seeds, points), claim.measure)
            for rung, seeds in claim.rungs().items()
        }
        for name, claim in campaign.claims.items()
    }
    values = {
        name: [list(_differences(of, campaign.claims[name]).values()) for of in rungs.values()]
        for name, rungs in pairs.items()
    }
    spreads = spreads_of(campaign, values, LEAST_SEEDS)
    found = {
        name: _of_claim(campaign, ledger, claim, points, pairs[name], spreads[name])
        for name, claim in campaign.claims.items()
    }
    adjusted = {}
    for variants in (False, True):
        family = [name for name in found if on_variants(campaign, name) is variants]
        tested = [effect for name in family for effect in found[name] if effect.p is not None]
        adjusted |= dict(zip(map(_key, tested), holm([effect.p for effect in tested])))
    return {
        name: [dataclasses.replace(e, adjusted=adjusted.get(_key(e))) for e in of]
        for name, of in found.items()
    }


def on_variants(campaign: Campaign, claim: str) -> bool:
    """Whether a claim is about a setting: one of its arms is a variant of a method."""
    of = campaign.claims[claim]
    return any(campaign.arms[name].tuned_as != name for name in (of.here, of.there))


def spreads_of(
    campaign: Campaign, groups: Mapping[str, Sequence[Sequence[float]]], least: int
) -> dict[str, Spread]:
    """Claim -> how values vary within groups of claims of its family and measure.

    Args:
      groups: claim -> groups of values by seed.
      least: values that a group needs to count.
    """
    like = {n: (campaign.claims[n].measure, on_variants(campaign, n)) for n in groups}
    spreads = {
        key: spread_of([g for n in groups if like[n] == key for g in groups[n] if len(g) >= least])
        for key in set(like.values())
    }
    return {name: spreads[key] for name, key in like.items()}


def _differences(pairs: Mapping[int, tuple[Record, Record]], claim: Claim) -> dict[int, float]:
    """Seed -> the measure of the first arm over that of the second, less 1."""
    return {s: here[claim.measure] / there[claim.measure] - 1 for s, (here, there) in pairs.items()}


def _key(effect: Effect) -> tuple[str, Rung]:
    return effect.claim, effect.rung


def _of_claim(
    campaign: Campaign,
    ledger: Records,
    claim: Claim,
    points: Points,
    pairs: Pairs,
    spread: Spread,
) -> list[Effect]:
    """One effect for each rung of a claim that has runs; p-values are not corrected yet."""
    what = claim.measure
    order = {name: i for i, name in enumerate(campaign.sizes)}
    found = []
    for rung, seeds in claim.rungs().items():
        if not pairs[rung]:
            continue
        runs, differences = list(pairs[rung].values()), _differences(pairs[rung], claim)
        values, test = list(differences.values()), None
        if len(values) >= LEAST_SEEDS:
            test = against_margin(values, claim.margin, spread)
        cells = cells_of(claim, rung, seeds, points)
        failed = tuple(sorted({cell.seed for cell in cells if cell in ledger.failed}))
        found.append(
            Effect(
                claim=claim.name,
                rung=rung,
                margin=claim.margin,
                measure=what,
                differences=differences,
                values=tuple(float(np.mean([pair[i][what] for pair in runs])) for i in (0, 1)),
                half=test and test.half,
                p=test and test.p,
                adjusted=None,
                size_of_effect=effect_size(values),
                exchanges=_ratio(runs, lambda record: record["exchanges"]),
                bytes=_ratio(runs, lambda record: record["bytes_sent"]),
                seconds=_ratio(runs, lambda record: record["virtual"]["seconds"]),
                fewer_bytes=_fewer(runs),
                tokens=_tokens(runs),
                at_equal_bytes=_at_equal(runs, "bytes"),
                at_equal_time=_at_equal(runs, "seconds"),
                failed=failed,
            )
        )
    scale = lambda e: (e.rung.split, order[e.rung.size], e.rung.rounds, e.rung.regions)  # noqa: E731
    return sorted(found, key=scale)


def _pairs(
    ledger: Records, cells: Sequence[Cell], measure: str
) -> dict[int, tuple[Record, Record]]:
    """Seed -> the records of both arms, where both are there and have the measure.

    One that is 0 with `there` has no relative difference.
    """
    by_seed: dict[int, list[Record]] = {}
    for cell in cells:
        found = None if cell.point == UNKNOWN else ledger.found.get(cell)
        if found is not None and found.get(measure) is not None:
            by_seed.setdefault(cell.seed, []).append(found)
    pairs = {seed: (of[0], of[1]) for seed, of in by_seed.items() if len(of) == 2}
    return {seed: (here, there) for seed, (here, there) in pairs.items() if there[measure]}


def _ratio(runs: Sequence[tuple[Record, Record]], of) -> float | None:
    shares = [of(here) / of(there) for here, there in runs if of(there)]
    return float(np.mean(shares)) if shares else None


def _fewer(runs: Sequence[tuple[Record, Record]]) -> float | None:
    shares = [h["allreduce_bytes"] / h["bytes_sent"] for h, _ in runs if h["bytes_sent"]]
    return float(np.mean(shares)) if shares else None


def _tokens(runs: Sequence[tuple[Record, Record]]) -> Estimate:
    """Tokens to the higher of both final losses, of the first over those of the second."""
    column, loss = CURVE.index("tokens"), CURVE.index("loss")
    shares = []
    for pair in runs:
        target, took = max(record["loss"] for record in pair), []
        for record in pair:
            tokens, losses = ([row[i] for row in record["curve"]] for i in (column, loss))
            found = crossing(losses, target)
            took.append(found and found.of(tokens))
        if not all(took):
            return estimate([])
        shares.append(took[0] / took[1])
    return estimate(shares)


def _at_equal(runs: Sequence[tuple[Record, Record]], what: str) -> float | None:
    """The mean relative difference where both had spent as much as the cheaper one in all."""
    column, loss = CURVE.index(what), CURVE.index("loss")
    shares = []
    for pair in runs:
        curves = [[(row[column], row[loss]) for row in record["curve"][1:]] for record in pair]
        budget = min(curve[-1][0] for curve in curves)
        if any(y is None for curve in curves for _, y in curve):
            return None
        if budget <= 0 or any(curve[0][0] > budget for curve in curves):
            return None
        here, there = (loss_at(budget, *zip(*curve)) for curve in curves)
        shares.append(here / there - 1)
    return float(np.mean(shares)) if shares else None
