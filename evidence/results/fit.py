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
from scipy import optimize

from evidence.campaign.ledger import Records
from evidence.campaign.order import Points
from evidence.campaign.plan import Campaign

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
    by_scale: dict[tuple[float, float], list[float]] = {}
    for point, residual in zip(points, residuals, strict=True):
        by_scale.setdefault(point[:2], []).append(float(residual))
    means = {scale: float(np.mean(of)) for scale, of in by_scale.items()}
    scale = max(means, key=lambda one: abs(means[one]))
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
    columns = [[np.array(c, float) for c in zip(*points)] for points in curves.values()]
    rows = np.cumsum([0, *(len(points) for points in curves.values())])

    def residual(logs):
        parts = [
            np.log(_loss(_terms(logs, i), params, tokens)) - np.log(loss)
            for i, (params, tokens, _, loss) in enumerate(columns)
        ]
        return np.concatenate(parts)

    def jacobian(logs):
        found = np.zeros((rows[-1], len(logs)))
        for i, (params, tokens, *_) in enumerate(columns):
            e, a_scale, a, b_scale, b = terms = _terms(logs, i)
            of_size, of_tokens = a_scale / params**a, b_scale / tokens**b
            by = [
                of_size,
                -a * np.log(params) * of_size,
                of_tokens,
                -b * np.log(tokens) * of_tokens,
            ]
            at, loss = slice(rows[i], rows[i + 1]), _loss(terms, params, tokens)
            found[at, 0] = e / loss
            found[at, 1 + 4 * i : 5 + 4 * i] = np.stack(by, axis=1) / loss[:, None]
        return found

    smallest = min(loss.min() for *_, loss in columns)
    low = np.log([_LEAST, *[1e-6, EXPONENTS[0]] * (2 * len(columns))])
    high = np.log([smallest, *[1e30, EXPONENTS[1]] * (2 * len(columns))])
    start = np.clip(near, low + 1e-6, high - 1e-6)
    return optimize.least_squares(residual, start, jacobian, bounds=(low, high))


def _start(curves: Mapping[Name, Sequence[Point]], a: float, b: float) -> np.ndarray:
    """A third of an arm's smallest loss each: the rest, the size's and the tokens' part."""
    found = []
    for points in curves.values():
        params, tokens, _, loss = (np.array(column, float) for column in zip(*points))
        part = loss.min() / 3
        found.append([part * np.median(params) ** a, a, part * np.median(tokens) ** b, b])
    least = min(point[3] for points in curves.values() for point in points)
    return np.log([least / 3, *np.concatenate(found)])


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


def curves(
    campaign: Campaign, ledger: Records, points: Points
) -> dict[tuple[str, str], list[Point]]:
    """(arm, regions) -> points that carry a fit. Data parallel training is pooled over regions."""
    groups: dict[tuple[str, str], list] = {}
    for cell, record in sorted(ledger.found.items()):
        if cell.tunes or cell.split != "iid" or cell.point != points.of(cell.arm, cell.size):
            continue
        pooled = campaign.arms[cell.arm].base["method"]["name"] == "ddp"
        regions = "any" if pooled else str(cell.regions)
        groups.setdefault((cell.arm, regions), []).append(record)
    order = list(campaign.arms)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key))
    found = {key: points_of(groups[key]) for key in keys}
    return {key: points for key, points in found.items() if not carried(points)}
