"""Loss against size and tokens of arms, L = E + A / N^a + B / D^b, and what that extrapolates to.

In: a campaign and its records, or points of arms. Out: the fits.

The form is that of Hoffmann et al. (arXiv 2203.15556, equation 2), fitted by least squares on the
logarithm of the loss. E is the text's and the same for all arms: each alone would leave it to
chance, and extrapolations are little more than E. The other terms are an arm's own. The range of a
prediction holds the 95 % range over bootstrap fits, which draw seeds with replacement, and all fits
that leave one scale out. It does not cover the form.

Differs from the paper: squares, not Huber's loss, because runs here are few and none is an outlier
by design. Exponents are bounded by `EXPONENTS`: few scales cannot tell a steep part from none.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import optimize

from evidence.campaign.ledger import Records
from evidence.campaign.order import Points

# Below these the records do not carry a fit: there are five terms.
LEAST_SIZES, LEAST_TOKENS, LEAST_SCALES, LEAST_SEEDS = 3, 3, 6, 3
EXPONENTS = (0.02, 2.0)
_LEAST = 1e-3  # nats: of E, and of what a part is at the smallest scale
_DRAWS = 200
AHEAD = {"0.15B": 150e6, "1B": 1e9}  # parameters that the page asks for
TOKENS_A_PARAMETER = 20

Name = Hashable
Point = tuple[float, float, int, float]  # parameters, tokens, seed, loss


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fit of one arm.

    Attributes:
      terms: E, A, a, B, b; E is that of all arms.
      error: root mean square of the arm's relative residuals.
      drawn: the same terms of every bootstrap fit.
      left_out: the same terms of every fit that leaves one scale out.
      smallest, largest: the fewest and the most parameters and tokens.
      furthest: parameters and tokens of the scale that the fit misses most, and by how much: the
        fitted loss over the geometric mean of those measured, less 1.
    """

    terms: tuple[float, ...]
    error: float
    drawn: tuple[tuple[float, ...], ...]
    left_out: tuple[tuple[float, ...], ...]
    smallest: tuple[float, float]
    largest: tuple[float, float]
    furthest: tuple[float, float, float]

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


def fit(curves: Mapping[Name, Sequence[Point]], seed: int = 0) -> dict[Name, Fit]:
    """Fit arms together: one E, and four terms each.

    Raises:
      ValueError: the points of an arm do not carry a fit (`carried`).
    """
    for name, points in curves.items():
        if missing := carried(points):
            raise ValueError(f"a fit of {name} needs {' and '.join(missing)}")
    starts = [_start(curves, a, b) for a in (0.2, 0.5) for b in (0.2, 0.5)]
    best = min((_solve(curves, start) for start in starts), key=lambda one: one.cost)
    drawn = [_solve(some, best.x) for some in _drawn(curves, seed)]
    scales = dict.fromkeys(p[:2] for points in curves.values() for p in points)
    fewer = [
        {name: [p for p in points if p[:2] != scale] for name, points in curves.items()}
        for scale in scales
    ]
    left_out = [_solve(some, best.x) for some in fewer]
    residuals = np.split(best.fun, np.cumsum([len(points) for points in curves.values()])[:-1])
    return {
        name: Fit(
            _terms(best.x, number),
            float(np.sqrt(np.mean(residuals[number] ** 2))),
            tuple(_terms(one.x, number) for one in drawn),
            tuple(_terms(one.x, number) for one in left_out),
            (min(p[0] for p in points), min(p[1] for p in points)),
            (max(p[0] for p in points), max(p[1] for p in points)),
            _furthest(points, residuals[number]),
        )
        for number, (name, points) in enumerate(curves.items())
    }


def _furthest(points: Sequence[Point], residuals: np.ndarray) -> tuple[float, float, float]:
    rows = pd.DataFrame(points).iloc[:, :2].assign(residual=residuals)
    means = rows.groupby([0, 1]).residual.mean()
    scale = means.abs().idxmax()
    return *scale, float(np.expm1(means[scale]))


def _drawn(curves: Mapping[Name, Sequence[Point]], seed: int) -> Iterator[Mapping]:
    """The curves of seeds that are drawn with replacement, where they carry all fits."""
    rng = np.random.default_rng(seed)
    seeds = sorted({point[2] for points in curves.values() for point in points})
    for _ in range(_DRAWS if len(seeds) > 1 else 0):
        times = Counter(rng.choice(seeds, len(seeds)).tolist())
        some = {
            name: [p for p in points for _ in range(times[p[2]])] for name, points in curves.items()
        }
        if not any(map(carried, some.values())):
            yield some


def _loss(terms: Sequence[float], params, tokens):
    e, a_scale, a, b_scale, b = terms
    return e + a_scale / np.asarray(params, float) ** a + b_scale / np.asarray(tokens, float) ** b


def _terms(logs: np.ndarray, number: int) -> tuple[float, ...]:
    """E, A, a, B, b of an arm, of the logarithms of E and of four terms an arm."""
    return tuple(np.exp([logs[0], *logs[1 + 4 * number : 5 + 4 * number]]).tolist())


def _solve(curves: Mapping[Name, Sequence[Point]], near: np.ndarray) -> optimize.OptimizeResult:
    """Least squares over the logarithms of the terms, from `near`."""
    n, d, _, loss = np.array([p for points in curves.values() for p in points], float).T
    arm = np.repeat(range(len(curves)), [len(points) for points in curves.values()])

    def parts(logs):
        """E, a, b, and what size and tokens add to it, of every point."""
        a_scale, a, b_scale, b = np.exp(logs[1:]).reshape(-1, 4)[arm].T
        return np.exp(logs[0]), a, b, a_scale / n**a, b_scale / d**b

    def residual(logs):
        e, _, _, of_size, of_tokens = parts(logs)
        return np.log(e + of_size + of_tokens) - np.log(loss)

    def jacobian(logs):
        e, a, b, of_size, of_tokens = parts(logs)
        by = [of_size, -a * np.log(n) * of_size, of_tokens, -b * np.log(d) * of_tokens]
        found = np.zeros((len(loss), len(logs)))
        found[:, 0] = e
        found[np.arange(len(loss))[:, None], 1 + 4 * arm[:, None] + np.arange(4)] = np.transpose(by)
        return found / (e + of_size + of_tokens)[:, None]

    low = np.log([_LEAST, *[1e-6, EXPONENTS[0]] * (2 * len(curves))])
    high = np.log([loss.min(), *[1e30, EXPONENTS[1]] * (2 * len(curves))])
    start = np.clip(near, low + 1e-6, high - 1e-6)
    return optimize.least_squares(residual, start, jacobian, bounds=(low, high))


def _start(curves: Mapping[Name, Sequence[Point]], a: float, b: float) -> np.ndarray:
    """A third of an arm's smallest loss each: the rest, the size's and the tokens' part."""
    found = [min(point[3] for points in curves.values() for point in points) / 3]
    for points in curves.values():
        params, tokens, _, loss = np.array(points, float).T
        part = loss.min() / 3
        found += [part * np.median(params) ** a, a, part * np.median(tokens) ** b, b]
    return np.log(found)


def points_of(records: Sequence[Mapping]) -> list[Point]:
    """Of the records of one arm, with equal regions and split; of scales that have enough seeds.

    Tokens are those of a scale on average: by how its texts end, a seed counts some more or fewer.
    """
    by_scale: dict[tuple[str, int], list[int]] = {}
    scales = [(record["cell"]["size"], record["cell"]["rounds"]) for record in records]
    for scale, record in zip(scales, records, strict=True):
        by_scale.setdefault(scale, []).append(record["tokens"])
    return [
        (r["params"], float(np.mean(by_scale[scale])), r["cell"]["seed"], r["loss"])
        for scale, r in zip(scales, records, strict=True)
        if len(by_scale[scale]) >= LEAST_SEEDS
    ]


def curves(ledger: Records, points: Points) -> dict[tuple[str, str], list[Point]]:
    """(arm, regions) -> points that carry a fit. Data parallel training is pooled over regions."""
    groups: dict[tuple[str, str], list] = {}
    for cell, record in sorted(ledger.found.items()):
        if cell.tunes or cell.split != "iid" or cell.point != points.of(cell.arm, cell.size):
            continue
        pooled = ledger.campaign.arms[cell.arm].base["method"]["name"] == "ddp"
        regions = "any" if pooled else str(cell.regions)
        groups.setdefault((cell.arm, regions), []).append(record)
    order = list(ledger.campaign.arms)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key))
    found = {key: points_of(groups[key]) for key in keys}
    return {key: points for key, points in found.items() if not carried(points)}
