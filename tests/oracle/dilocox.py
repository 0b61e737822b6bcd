"""DiLoCoX (arXiv 2506.21263): one-step delay, low-rank factors, error feedback, AdaGradCmp.

Factors are M ~ P Q'^T with P an orthonormal basis of M Q and Q' = M^T P; every region keeps its
own Q. With bases that all regions share, P = M V and Q = M^T U are projections on them instead, and
the next bases are those of the mean projections. The rank of a reduced payload is counted on the
dense mean, by its singular values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle.loop import (
    Event,
    Regions,
    Trajectory,
    copy_tree,
    present_at,
    reduce_over,
    subtract,
    weights_at,
    zeros_like,
)
from oracle.problem import Tree


@dataclass(frozen=True)
class Adaptation:
    """AdaGradCmp; a payload of rank `ranks[k]` travels for `travel[k]` steps."""

    ranks: tuple[int, ...]
    window: int
    energy: float
    shortest: int = 1
    travel: tuple[int, ...] = ()
    probe: int | None = None


@dataclass
class Compressor:
    """One region's side: warm bases and residuals. `rounding` is applied to rows of P^T, Q'^T."""

    bases: dict[str, np.ndarray]
    residual: Tree
    rounding: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    decay: float = 1.0

    def encode(self, delta: Tree, rank: int) -> Tree:
        """Return what receivers decode, and keep what it misses."""
        out = {}
        for key, value in delta.items():
            total = value + self.decay * self.residual[key]
            out[key] = total.copy() if key not in self.bases else self._factors(key, total, rank)
            self.residual[key] = total - out[key]
        return out

    def _factors(self, key: str, m: np.ndarray, rank: int) -> np.ndarray:
        basis = np.array(self.bases[key], np.float64)
        p = np.linalg.qr(m.astype(np.float64) @ basis[:, :rank])[0]
        q = m.astype(np.float64).T @ p
        basis[:, :rank] = q
        self.bases[key] = basis
        decoded = self.rounding(p.T).T @ self.rounding(q.T)
        return decoded.astype(m.dtype)


class OwnBases:
    """Every region on bases of its own."""

    def __init__(self, bases: dict[str, np.ndarray], like: Tree, count: int, rounding):
        self.keys = tuple(bases)
        self.senders = [Compressor(dict(bases), zeros_like(like), rounding) for _ in range(count)]

    def send(self, deltas: dict[int, Tree], rank: int, weights) -> tuple[dict[int, Tree], Callable]:
        """Return what is decoded of every region, by region, and what to call at the landing."""
        del weights
        return {r: self.senders[r].encode(d, rank) for r, d in deltas.items()}, lambda: None


class SharedBases:
    """One pair of bases U [rows, w], V [columns, w] of every matrix for all regions, both
    orthonormal; round k uses, and its landing replaces, pair k modulo their number.
    """

    def __init__(self, pairs: list[dict[str, tuple]], like: Tree, count: int, rounding):
        self.keys = tuple(pairs[0])
        self.pairs = [dict(pair) for pair in pairs]
        self.residuals = [zeros_like(like) for _ in range(count)]
        self.rounding, self.round = rounding, 0

    def send(self, deltas: dict[int, Tree], rank: int, weights) -> tuple[dict[int, Tree], Callable]:
        """As `OwnBases.send`; a round that nobody sends in does not count."""
        slot, factors, decoded = self.round % len(self.pairs), {}, {}
        for r, delta in deltas.items():
            total = {k: np.asarray(x + self.residuals[r][k]) for k, x in delta.items()}
            factors[r] = {k: self._project(total[k], self.pairs[slot][k], rank) for k in self.keys}
            decoded[r] = {k: np.array(x) for k, x in total.items()}
            for k in self.keys:
                decoded[r][k] = _on_both(*factors[r][k], *self.pairs[slot][k]).astype(np.float32)
            self.residuals[r] = subtract(total, decoded[r])
        self.round += bool(deltas)
        return decoded, lambda: self._turn(slot, rank, factors, weights)

    def _project(self, m: np.ndarray, pair: tuple, rank: int) -> tuple[np.ndarray, np.ndarray]:
        u, v = (basis[:, :rank] for basis in pair)
        return self.rounding((m @ v).T).T, self.rounding((m.T @ u).T).T

    def _turn(self, slot: int, rank: int, factors: dict[int, dict], weights) -> None:
        """Let the mean factors' columns replace the first `rank` of the bases they were made on."""
        total = sum(weights[r] for r in factors)
        for k in self.keys:
            means = [sum(weights[r] * factors[r][k][i] for r in factors) / total for i in (0, 1)]
            spare = [basis[:, rank:] for basis in self.pairs[slot][k]]
            new = [np.linalg.qr(np.concatenate(c, axis=1))[0] for c in zip(means, spare)]
            self.pairs[slot][k] = tuple(new)


def _on_both(p: np.ndarray, q: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """U U^T M + M V V^T - U U^T M V V^T, from P = M V and Q = M^T U."""
    u, v = u[:, : p.shape[1]], v[:, : p.shape[1]]
    return u @ q.T + p @ v.T - u @ (u.T @ p) @ v.T


def rank_of(mean: np.ndarray, energy: float) -> int:
    """Count the largest singular values that hold this share of the squared norm."""
    squares = np.linalg.svd(mean.astype(np.float64), compute_uv=False) ** 2
    if squares.sum() == 0:
        return 0
    return int(np.argmax(np.cumsum(squares) >= energy * squares.sum())) + 1


def int4_rows(rows: np.ndarray) -> np.ndarray:
    """Round every row to 15 levels, -7 ... 7 times its largest magnitude / 7."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / 7
    safe = np.where(scale > 0, scale, 1.0)
    return np.clip(np.round(rows / safe), -7, 7) * scale


class Plan:
    """Rank and length of the round under way, and what the last rounds measured."""

    def __init__(self, period: int, rank: int, adaptation: Adaptation | None):
        self.first = (rank, period)
        self.rule = adaptation
        self.rank, self.length, self.end = rank, period, period
        self.rounds, self.history = 1, []

    def turn(self, measured: float | None) -> None:
        """Settle the next round from what the boundary's landing measured."""
        if measured:
            self.history.append(measured)
        self.rounds += 1
        sent = self.rank
        self.rank, self.length = self._choose()
        if self.rule and self.rule.travel:
            # Until the next boundary travels what was sent at this one.
            needed = dict(zip(self.rule.ranks, self.rule.travel))
            self.length = min(max(self.length, needed[sent]), self.first[1])
        self.end += self.length

    def _choose(self) -> tuple[int, int]:
        rule = self.rule
        if rule is None or len(self.history) < rule.window:
            return self.first
        first_rank, first_length = self.first
        wanted = min(sum(self.history[-rule.window :]) / rule.window, first_rank)
        rank = min(r for r in rule.ranks if r >= wanted * (1 - 1e-5))
        length = max(round(first_length * wanted / first_rank), rule.shortest)
        if rule.probe and self.rounds % rule.probe == 0 and rank < first_rank:
            rank = min(r for r in rule.ranks if r > rank)
        return rank, min(length, first_length)


def run_dilocox(
    params: Tree,
    batches: dict,
    *,
    period: int,
    rank: int,
    inner,
    outer,
    bases: dict[str, np.ndarray] | list[dict[str, tuple]],
    adaptation: Adaptation | None = None,
    rounding: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    delay: int = 1,
    participants=None,
    weights=None,
) -> Trajectory:
    """Run DiLoCoX; `bases` are the warm bases [columns, >= rank] every region starts from, or the
    pairs that all regions share (`SharedBases`).
    """
    steps, count = batches["x"].shape[:2]
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions = Regions(params, inner, count)
    wire = (SharedBases if isinstance(bases, list) else OwnBases)(bases, params, count, rounding)
    plan = Plan(period, rank, adaptation)
    in_flight = None
    run = Trajectory()
    run.record(step=0, anchors=[anchor], locals=regions.values, momentum=[momentum])
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        boundary = t == plan.end
        if boundary:
            present = present_at(participants, t, count)
            row = weights_at(weights, t, count)
            deltas = {r: subtract(anchor, regions.values[r]) for r in present}
            decoded, turn = wire.send(deltas, plan.rank, row)
            sent = [decoded.get(r, zeros_like(params)) for r in range(count)]
            reduced = reduce_over(sent, present, row)
            payload = None if reduced is None else (t, reduced.mean, plan.rank, turn)
            landing, in_flight = (payload, None) if delay == 0 else (in_flight, payload)
            measured = None
            if landing is not None:
                sent_at, mean, its_rank, turn = landing
                turn()
                anchor, momentum = outer.step(anchor, mean, momentum)
                run.events.append(Event(t, "land", 0, t - sent_at, present))
                if adaptation is not None:
                    measured = _mean_rank(mean, wire.keys, adaptation.energy, its_rank)
            for r in present:
                regions.values[r] = copy_tree(anchor)
            plan.turn(measured)
        run.record(
            step=t,
            anchors=[anchor],
            locals=regions.values,
            momentum=[momentum],
            losses=losses,
            extra={"rank": plan.rank, "end": plan.end},
        )
    return run


def _mean_rank(mean: Tree, factored, energy: float, sent_rank: int) -> float:
    """Average the ranks of the factored tensors by their sizes; none exceeds the rank sent."""
    sizes = {key: mean[key].size for key in factored}
    ranks = {key: min(rank_of(mean[key], energy), sent_rank) for key in factored}
    return sum(ranks[key] * sizes[key] for key in factored) / sum(sizes.values())
