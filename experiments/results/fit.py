"""Loss against size and tokens of an arm, L = E + A / N^a + B / D^b, and what that extrapolates to.

The form is that of Hoffmann et al. (arXiv 2203.15556, equation 2), fitted by least squares on the
logarithm of the loss. The error of a prediction is the 95 % range over bootstrap fits, which draw
seeds with replacement. It covers the choice of seeds, not that of the form.

Differs from the paper: squares, not Huber's loss, because runs here are few and none is an outlier
by design.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

LEAST_SIZES, LEAST_TOKENS = 3, 3  # below these the records do not carry a fit
_DRAWS = 200
_STARTS = tuple((a, b) for a in (0.2, 0.5) for b in (0.2, 0.5))

Point = tuple[float, float, int, float]  # parameters, tokens, seed, loss


@dataclasses.dataclass(frozen=True)
class Fit:
    """`terms`: E, A, a, B, b; `error`: root mean square of the relative residuals.

    `drawn`: the same terms of every bootstrap fit.
    """

    terms: tuple[float, ...]
    error: float
    drawn: tuple[tuple[float, ...], ...]

    def at(self, params: float, tokens: float) -> tuple[float, float, float]:
        """The predicted loss, and the ends of its range."""
        losses = [float(_loss(np.array(t), params, tokens)) for t in (self.terms, *self.drawn)]
        low, high = np.quantile(losses[1:], (0.025, 0.975)) if self.drawn else (np.nan, np.nan)
        return losses[0], float(low), float(high)


def carried(points: Sequence[Point]) -> list[str]:
    """What is missing for a fit; empty if nothing is."""
    sizes, tokens = {p[0] for p in points}, {p[1] for p in points}
    found = []
    if len(sizes) < LEAST_SIZES:
        found.append(f"{LEAST_SIZES - len(sizes)} more sizes")
    if len(tokens) < LEAST_TOKENS:
        found.append(f"{LEAST_TOKENS - len(tokens)} more numbers of tokens")
    return found


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
    return Fit(terms, error, tuple(drawn))


def _loss(terms: np.ndarray, params, tokens):
    e, a_scale, a, b_scale, b = terms
    return e + a_scale / np.asarray(params, float) ** a + b_scale / np.asarray(tokens, float) ** b


def _solve(points: Sequence[Point], near: Sequence[float] | None = None):
    """Least squares from several starts; the terms are kept positive by their logarithms."""
    params, tokens, _, loss = (np.array(column, float) for column in zip(*points))

    def residual(log_terms):
        return np.log(_loss(np.exp(log_terms), params, tokens)) - np.log(loss)

    starts = [near] if near is not None else [_start(params, tokens, loss, *s) for s in _STARTS]
    found = [
        optimize.least_squares(residual, np.log(np.maximum(start, 1e-6)), max_nfev=2000)
        for start in starts
    ]
    best = min(found, key=lambda one: one.cost)
    return tuple(np.exp(best.x).tolist()), float(np.sqrt(np.mean(best.fun**2)))


def _start(params, tokens, loss, a: float, b: float) -> tuple[float, ...]:
    """A third of the smallest loss each: the rest, the size's and the tokens' part."""
    part = loss.min() / 3
    return part, part * np.median(params) ** a, a, part * np.median(tokens) ** b, b


def points_of(records: Sequence[Mapping]) -> list[Point]:
    """Of the records of one arm, with equal regions and split."""
    return [(r["params"], r["tokens"], r["cell"]["seed"], r["loss"]) for r in records]
