"""Loss against size and tokens of an arm, L = E + A / N^a + B / D^b, and what that extrapolates to.

The form is that of Hoffmann et al. (arXiv 2203.15556, equation 2), fitted by least squares on the
logarithm of the loss. The range of a prediction holds the 95 % range over bootstrap fits, which
draw seeds with replacement, and all fits that leave one scale out. It does not cover the form.

Differs from the paper: squares, not Huber's loss, because runs here are few and none is an outlier
by design. Exponents are bounded by `EXPONENTS`: few scales cannot tell a steep part from none.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

# Below these the records do not carry a fit: there are five terms.
LEAST_SIZES, LEAST_TOKENS, LEAST_SCALES, LEAST_SEEDS = 3, 3, 6, 3
EXPONENTS = (0.02, 2.0)
_LEAST = 1e-3  # nats: of E, and of what a part is at the smallest scale
_DRAWS = 200
_STARTS = tuple((a, b) for a in (0.2, 0.5) for b in (0.2, 0.5))

Point = tuple[float, float, int, float]  # parameters, tokens, seed, loss


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fit of one arm.

    Attributes:
      terms: E, A, a, B, b.
      error: root mean square of the relative residuals.
      drawn: the same terms of every bootstrap fit.
      left_out: the same terms of every fit that leaves one scale out.
      smallest: parameters and tokens of the smallest scales.
    """

    terms: tuple[float, ...]
    error: float
    drawn: tuple[tuple[float, ...], ...]
    left_out: tuple[tuple[float, ...], ...]
    smallest: tuple[float, float]

    def at(self, params: float, tokens: float) -> tuple[float, float, float]:
        """The predicted loss, and the ends of its range."""

        def losses(terms):
            return [float(_loss(np.array(t), params, tokens)) for t in terms]

        ends = np.quantile(losses(self.drawn), (0.025, 0.975)) if self.drawn else []
        both = [*ends, *losses(self.left_out)]
        return *losses([self.terms]), float(min(both)), float(max(both))

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Exponents at the end of what they may be, and parts that are nothing: not told by these
        scales."""
        e, a_scale, a, b_scale, b = self.terms
        (params, tokens), (low, high) = self.smallest, EXPONENTS
        nothing = {"E": e, "A": a_scale / params**a, "B": b_scale / tokens**b}
        found = [name for name, part in nothing.items() if part < 1.01 * _LEAST]
        found += [name for name, x in (("a", a), ("b", b)) if not 1.01 * low < x < high / 1.01]
        return tuple(found)


def carried(points: Sequence[Point]) -> list[str]:
    """What is missing for a fit; empty if nothing is. A scale counts with enough seeds."""
    seeds = Counter((params, tokens) for params, tokens, *_ in points)
    scales = [scale for scale, count in seeds.items() if count >= LEAST_SEEDS]
    lacks = {
        "sizes": LEAST_SIZES - len({params for params, _ in scales}),
        "numbers of tokens": LEAST_TOKENS - len({tokens for _, tokens in scales}),
        "scales": LEAST_SCALES - len(scales),
    }
    return [f"{count} more {what}" for what, count in lacks.items() if count > 0]


def fit(points: Sequence[Point], seed: int = 0) -> Fit:
    """Fit one arm.

    Raises:
      ValueError: the points do not carry a fit (`carried`).
    """
    if missing := carried(points):
        raise ValueError(f"a fit needs {' and '.join(missing)}")
    terms, error = _solve(points)
    by_seed: dict[int, list[Point]] = {}
    for point in points:
        by_seed.setdefault(point[2], []).append(point)
    rng, seeds = np.random.default_rng(seed), sorted(by_seed)
    drawn = []
    for _ in range(_DRAWS if len(seeds) > 1 else 0):
        some = [p for s in rng.choice(seeds, len(seeds)) for p in by_seed[int(s)]]
        if not carried(some):
            drawn.append(_solve(some, terms)[0])
    scales = dict.fromkeys(point[:2] for point in points)
    fewer = ([p for p in points if p[:2] != scale] for scale in scales)
    left_out = tuple(_solve(some, terms)[0] for some in fewer)
    smallest = min(p[0] for p in points), min(p[1] for p in points)
    return Fit(terms, error, tuple(drawn), left_out, smallest)


def _loss(terms: np.ndarray, params, tokens):
    e, a_scale, a, b_scale, b = terms
    return e + a_scale / np.asarray(params, float) ** a + b_scale / np.asarray(tokens, float) ** b


def _solve(points: Sequence[Point], near: Sequence[float] | None = None):
    """Least squares from several starts, or from `near`, over the logarithms of the terms."""
    params, tokens, _, loss = (np.array(column, float) for column in zip(*points))

    def residual(log_terms):
        return np.log(_loss(np.exp(log_terms), params, tokens)) - np.log(loss)

    low = np.log([_LEAST, 1e-6, EXPONENTS[0], 1e-6, EXPONENTS[0]])
    high = np.log([loss.min(), 1e30, EXPONENTS[1], 1e30, EXPONENTS[1]])
    starts = [near] if near is not None else [_start(params, tokens, loss, *s) for s in _STARTS]
    found = [
        optimize.least_squares(
            residual, np.clip(np.log(start), low + 1e-6, high - 1e-6), bounds=(low, high)
        )
        for start in starts
    ]
    best = min(found, key=lambda one: one.cost)
    return tuple(np.exp(best.x).tolist()), float(np.sqrt(np.mean(best.fun**2)))


def _start(params, tokens, loss, a: float, b: float) -> tuple[float, ...]:
    """A third of the smallest loss each: the rest, the size's and the tokens' part."""
    part = loss.min() / 3
    return part, part * np.median(params) ** a, a, part * np.median(tokens) ** b, b


def points_of(records: Sequence[Mapping]) -> list[Point]:
    """Of the records of one arm, with equal regions and split; of scales that have enough seeds.

    Tokens are those of a scale on average: by how its texts end, a seed counts some more or fewer.
    """
    by_scale: dict[tuple, list[int]] = {}
    for record in records:
        by_scale.setdefault(_scale(record), []).append(record["tokens"])
    tokens = {s: float(np.mean(ts)) for s, ts in by_scale.items() if len(ts) >= LEAST_SEEDS}
    counted = [r for r in records if _scale(r) in tokens]
    return [(r["params"], tokens[_scale(r)], r["cell"]["seed"], r["loss"]) for r in counted]


def _scale(record: Mapping) -> tuple[str, int]:
    return record["cell"]["size"], record["cell"]["rounds"]
