"""Each claim at each rung: paired differences, their tests, and bytes and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from statsmodels.stats.multitest import multipletests

from evidence.campaign.ledger import CURVE, Records
from evidence.campaign.order import Points, cells_of
from evidence.campaign.plan import LEAST_SEEDS, Campaign, Claim, Rung
from evidence.results.stats import Spread, against_margin, effect_size, spread_of
from experiments.report.stats import Estimate, crossing, estimate

SURE = 0.05  # a p-value after the correction below which a rung counts
SEEN, OPPOSITE, OPEN = "seen", "opposite", "open"
_MEASURED = ("loss", "anchor_variance", "exchanges", "bytes_sent", "allreduce_bytes", "curve")
_MEANS = ("exchanges", "bytes", "seconds", "fewer_bytes")  # over the seeds that have them
_WHOLE = ("at_equal_bytes", "at_equal_time")  # if all seeds have them


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


def effects(ledger: Records) -> dict[str, list[Effect]]:
    """Claim -> its rungs with at least one pair, from the smallest scale.

    There are two families: claims on methods, and claims on variants of them. Within one, p-values
    are corrected, and rungs with one measure lend each other their spread.
    """
    campaign, points = ledger.campaign, Points(ledger)
    claims = campaign.claims
    runs = _reported(ledger, points)
    pairs = {name: _pairs(claim, runs) for name, claim in claims.items()}
    groups = {
        n: [list(g) for _, g in of.groupby("rung", sort=False).difference]
        for n, of in pairs.items()
    }
    spreads = spreads_of(campaign, groups, LEAST_SEEDS)
    found = [
        effect
        for name, claim in claims.items()
        for effect in _of_claim(ledger, claim, points, pairs[name], spreads[name])
    ]
    adjusted = {}
    for variants in (False, True):
        tested = [
            e for e in found if e.p is not None and on_variants(campaign, e.claim) is variants
        ]
        if tested:
            corrected = multipletests([e.p for e in tested], method="holm")[1]
            adjusted |= {(e.claim, e.rung): float(p) for e, p in zip(tested, corrected)}
    found = [dataclasses.replace(e, adjusted=adjusted.get((e.claim, e.rung))) for e in found]
    return {name: [effect for effect in found if effect.claim == name] for name in claims}


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


def _reported(ledger: Records, points: Points) -> pd.DataFrame:
    """A row a run at the rates that were settled: its rung, arm, seed and measures."""
    rows = [
        {
            "arm": cell.arm,
            "rung": cell.rung,
            "seed": cell.seed,
            "time": record["virtual"]["seconds"],
            **{name: record.get(name) for name in _MEASURED},
        }
        for cell, record in ledger.found.items()
        if not cell.tunes and cell.point == points.of(cell.arm, cell.size)
    ]
    return pd.DataFrame(rows, columns=["arm", "rung", "seed", "time", *_MEASURED])


def _pairs(claim: Claim, runs: pd.DataFrame) -> pd.DataFrame:
    """A row a seed and rung where both arms ran and have the measure, `_h` and `_t`, by ratios.

    A measure that is 0 with `there` has no relative difference.
    """
    asked = [(rung, seed) for rung, seeds in claim.rungs().items() for seed in seeds]
    both = pd.DataFrame(asked, columns=["rung", "seed"])
    for arm in (claim.here, claim.there):
        both = both.merge(runs[runs.arm == arm], on=["rung", "seed"], suffixes=("_h", "_t"))
    here, there = (both[f"{claim.measure}_{side}"].astype(float) for side in "ht")
    both = both.assign(here=here, there=there)[here.notna() & (there.fillna(0) != 0)]

    def over(one: str, other: str) -> pd.Series:
        return both[one] / both[other].where(both[other] != 0)

    curves = list(zip(both.curve_h, both.curve_t))
    return both.assign(
        difference=both.here / both.there - 1,
        exchanges=over("exchanges_h", "exchanges_t"),
        bytes=over("bytes_sent_h", "bytes_sent_t"),
        seconds=over("time_h", "time_t"),
        fewer_bytes=over("allreduce_bytes_h", "bytes_sent_h"),
        tokens=[_tokens(*of) for of in zip(curves, both[["loss_h", "loss_t"]].max(axis=1))],
        at_equal_bytes=[_at_equal(pair, "bytes") for pair in curves],
        at_equal_time=[_at_equal(pair, "seconds") for pair in curves],
    )


def _of_claim(
    ledger: Records,
    claim: Claim,
    points: Points,
    pairs: pd.DataFrame,
    spread: Spread,
) -> list[Effect]:
    """One effect for each rung of a claim that has runs; p-values are not corrected yet."""
    order = {name: i for i, name in enumerate(ledger.campaign.sizes)}
    found, asked = [], claim.rungs()
    for rung, of in pairs.groupby("rung", sort=False):
        values, test = of.difference.tolist(), None
        if len(values) >= LEAST_SEEDS:
            test = against_margin(values, claim.margin, spread)
        cells = cells_of(claim, rung, asked[rung], points)
        means = dict(of[list(_MEANS)].mean()) | dict(of[list(_WHOLE)].mean(skipna=False))
        found.append(
            Effect(
                claim=claim.name,
                rung=rung,
                margin=claim.margin,
                measure=claim.measure,
                differences=dict(zip(of.seed.tolist(), values)),
                values=(float(of.here.mean()), float(of.there.mean())),
                half=test and test.half,
                p=test and test.p,
                adjusted=None,
                size_of_effect=effect_size(values),
                tokens=estimate([] if of.tokens.isna().any() else of.tokens),
                failed=tuple(sorted({cell.seed for cell in cells if cell in ledger.failed})),
                **{name: None if pd.isna(x) else float(x) for name, x in means.items()},
            )
        )
    scale = lambda e: (e.rung.split, order[e.rung.size], e.rung.rounds, e.rung.regions)  # noqa: E731
    return sorted(found, key=scale)


Curves = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]  # of both arms


def _tokens(curves: Curves, target: float) -> float:
    """Tokens to the higher of both final losses, of the first over those of the second."""
    took = []
    for curve in curves:
        of = dict(zip(CURVE, zip(*curve)))
        found = crossing(of["loss"], target)
        took.append(found.of(of["tokens"]) if found else 0.0)
    return took[0] / took[1] if all(took) else np.nan


def _at_equal(curves: Curves, what: str) -> float:
    """The relative difference where both had spent as much as the cheaper one in all."""
    column, loss = CURVE.index(what), CURVE.index("loss")
    here, there = ([(row[column], row[loss]) for row in curve[1:]] for curve in curves)
    budget = min(here[-1][0], there[-1][0])
    if budget <= 0 or max(here[0][0], there[0][0]) > budget:
        return np.nan
    if any(y is None for _, y in (*here, *there)):
        return np.nan
    return np.interp(budget, *zip(*here)) / np.interp(budget, *zip(*there)) - 1
