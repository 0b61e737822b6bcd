"""Which fragment leaves when, and what a landing does to the local values."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from oracle.problem import Tree


def first_send(fragment: int, fragments: int, period: int) -> int:
    """Return the step of the first send of 0-based `fragment`: floor((p + 1) H / K)."""
    return (fragment + 1) * period // fragments


def staggered_sends(step: int, fragments: int, period: int) -> list[int]:
    """Return the fragments that leave after inner step `step` in Streaming DiLoCo."""
    due = []
    for p in range(fragments):
        start = first_send(p, fragments, period)
        if step >= start and (step - start) % period == 0:
            due.append(p)
    return due


def syncs_per_period(
    period: int, fragments: int, gamma: float, step_seconds: float, sync_seconds: float
) -> int:
    """Return N = min(H, max(K, floor(gamma H T_c / T_s)))."""
    affordable = math.floor(gamma * period * step_seconds / sync_seconds)
    return min(period, max(fragments, affordable))


def choose_fragment(
    step: int,
    period: int,
    sent: Sequence[int | None],
    scores: Sequence[float],
    in_flight: Sequence[int],
) -> int | None:
    """Pick CoCoDC's fragment for one slot: overdue, then never sent, then fastest changing.

    Among several overdue ones, and among equal scores, the one sent longest ago goes first; then
    the lowest index. What is in flight is never picked; None if that leaves nothing.
    """
    free = [p for p in range(len(sent)) if p not in in_flight]
    overdue = [p for p in free if sent[p] is not None and step - sent[p] >= period]
    if overdue:
        return min(overdue, key=lambda p: (sent[p], p))
    never = [p for p in free if sent[p] is None]
    if never:
        return never[0]
    if not free:
        return None
    return min(free, key=lambda p: (-scores[p], sent[p], p))


def change_rate(mean: Tree, interval: int) -> float:
    """Return ||Dbar||_2 / sqrt(numel) / I over the whole fragment."""
    squares = sum(float(np.sum(value * value)) for value in mean.values())
    numel = sum(value.size for value in mean.values())
    return math.sqrt(squares) / math.sqrt(numel) / max(1, interval)


def blend_landing(alpha: float) -> Callable:
    """Streaming DiLoCo: theta <- alpha theta + (1 - alpha) Theta'; alpha weighs the local value."""

    def land(new_anchor, local, snapshot, staleness):
        if alpha == 0:
            return new_anchor.copy()
        return np.asarray(alpha * local + (1 - alpha) * new_anchor)

    return land


def taylor_landing(lam: float) -> Callable:
    """CoCoDC: g = (s - theta) / tau; theta <- Theta' - tau (g + lam g g D), D = Theta' - s."""

    def land(new_anchor, local, snapshot, staleness):
        tau = max(staleness, 1)
        g = (snapshot - local) / tau
        displacement = new_anchor - snapshot
        g_hat = g + lam * g * g * displacement
        return np.asarray(new_anchor - tau * g_hat)

    return land
