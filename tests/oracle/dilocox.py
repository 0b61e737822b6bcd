"""DiLoCoX (arXiv 2506.21263): one-step delay, low-rank factors, error feedback, AdaGradCmp.

Factors are M ~ P Q'^T with P an orthonormal basis of M Q and Q' = M^T P; every region keeps its
own Q. The rank of a reduced payload is counted on the dense mean, by its singular values.
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
    bases: dict[str, np.ndarray],
    adaptation: Adaptation | None = None,
    rounding: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    delay: int = 1,
    participants=None,
    weights=None,
) -> Trajectory:
    """Run DiLoCoX; `bases` are the warm bases [columns, >= rank] every region starts from."""
    steps, count = batches["x"].shape[:2]
    anchor, momentum = copy_tree(params), zeros_like(params)
    regions = Regions(params, inner, count)
    senders = [Compressor(dict(bases), zeros_like(params), rounding) for _ in range(count)]
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
            decoded = {r: senders[r].encode(d, plan.rank) for r, d in deltas.items()}
            sent = [decoded.get(r, zeros_like(params)) for r in range(count)]
            reduced = reduce_over(sent, present, row)
            payload = None if reduced is None else (t, reduced.mean, plan.rank)
            landing, in_flight = (payload, None) if delay == 0 else (in_flight, payload)
            measured = None
            if landing is not None:
                sent_at, mean, its_rank = landing
                anchor, momentum = outer.step(anchor, mean, momentum)
                run.events.append(Event(t, "land", 0, t - sent_at, present))
                if adaptation is not None:
                    measured = _mean_rank(mean, tuple(bases), adaptation.energy, its_rank)
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
