"""Layer-level time model of a region's steps: which waits communication causes, by bandwidth.

`every_step`, `at_once` and `streaming` give the sends of a method, `utilisation` its compute time /
total time at many bandwidths at once.

The model is that of Streaming DiLoCo (arXiv 2501.18512, section on compute utilisation): one serial
compute stream and one serial link. The rules below are our reading, chosen because they reproduce
its published table (see `reproduction`). A step is L forward, L backward-activation and L
backward-weight computations of equal length. The reduction of a layer may start when its weight
gradient is done, and takes its bytes over the bandwidth. The forward pass of that layer `tau` steps
later than the next waits for it. Data parallel sends all layers every step, DiLoCo all layers every
H steps, Streaming DiLoCo the layers of one fragment at a time.

Differs from the paper: it counts 4L - 1 nodes (no activation gradient for the first layer). Here
all three kinds have L computations, which changes the step by 1 / 3L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.schedule import Staggered

GRID_GBPS = np.logspace(-1, 3, 50)  # the published grid: 50 points, x1.207 apart
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class DagSchedule:
    """When a method sends which layers.

    Attributes:
        period: inner steps between two sends of the same layer (1 = every step).
        fragments: tuples of layer ids that travel together.
        offsets: inner step (1-based) after which each fragment is first sent.
        tau: extra inner steps before the wait (0: the next step's forward pass waits).
    """

    period: int
    fragments: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    tau: int = 0

    def sent_after(self, step: int) -> list[int]:
        """List the layers whose reduction starts in this step, in backward order."""
        layers: list[int] = []
        for fragment, offset in zip(self.fragments, self.offsets, strict=True):
            if step >= offset and (step - offset) % self.period == 0:
                layers += fragment
        return sorted(layers, reverse=True)


def every_step(layers: int) -> DagSchedule:
    """Give data parallel's schedule."""
    return DagSchedule(1, (tuple(range(layers)),), (1,))


def at_once(layers: int, period: int, tau: int = 0) -> DagSchedule:
    """Give the schedule that sends the whole model every `period` steps (tau = period: lands one
    period late).
    """
    return DagSchedule(period, (tuple(range(layers)),), (period,), tau)


def streaming(layers: int, period: int, fragments: int, tau: int = 0) -> DagSchedule:
    """Give Streaming DiLoCo's schedule: fragment p leaves after step floor((p + 1) H / K).

    Fragments are strided: layer l belongs to fragment l mod K.

    Raises:
        ValueError: more fragments than layers.
    """
    if not 1 <= fragments <= layers:
        text = f"{fragments} fragments of {layers} layers: use 1 to {layers} fragments"
        raise ValueError(text)
    cut = tuple(tuple(range(p, layers, fragments)) for p in range(fragments))
    staggered = Staggered(period, fragments)
    offsets = tuple(max(1, staggered.first(p)) for p in range(fragments))
    return DagSchedule(period, cut, offsets, tau)


def utilisation(
    layers: int,
    step_s: float,
    layer_link_s: np.ndarray,
    schedule: DagSchedule,
    latency_s: float = 0.0,
    periods: int = 3,
) -> np.ndarray:
    """Simulate and give compute time / total time of steady periods.

    Args:
        layers: how many layers a step has.
        step_s: compute seconds of one step.
        layer_link_s: float [B]: seconds one layer occupies the link, at each of B bandwidths.
        schedule: when which layers are sent.
        latency_s: seconds between the end of a layer's transfer and its arrival (does not occupy
            the link).
        periods: how many periods are measured, after one period and tau steps of running in.

    Returns:
        float [B] in (0, 1].
    """
    warm = schedule.period + schedule.tau + 1
    steps = warm + periods * schedule.period
    part = step_s / (3 * layers)
    now_B, link_B = np.zeros_like(layer_link_s), np.zeros_like(layer_link_s)
    start_B = now_B
    waits: dict[int, dict[int, np.ndarray]] = {}
    for step in range(1, steps + 1):
        now_B = _forward(now_B, waits.pop(step, {}), layers, part)
        for layer in schedule.sent_after(step):
            done_B = now_B + 2 * part * (layers - layer)
            link_B = np.maximum(link_B, done_B) + layer_link_s
            waits.setdefault(step + 1 + schedule.tau, {})[layer] = link_B + latency_s
        now_B = now_B + 2 * part * layers
        start_B = now_B if step == warm else start_B
    return (steps - warm) * step_s / (now_B - start_B)


def _forward(
    now_B: np.ndarray, waits: dict[int, np.ndarray], layers: int, part: float
) -> np.ndarray:
    """Advance through the forward pass; only the layers that wait need a look."""
    layer = 0
    for waiting in sorted(waits):
        now_B = np.maximum(now_B + (waiting - layer) * part, waits[waiting])
        layer = waiting
    return now_B + (layers - layer) * part


def smallest_bandwidth(
    utilisation_B: np.ndarray,
    targets: Sequence[float],
    grid: np.ndarray = GRID_GBPS,
    last_below: bool = False,
) -> list[float | None]:
    """Give the smallest bandwidth of a grid that reaches each target.

    Args:
        utilisation_B: utilisation at each grid point.
        targets: shares in (0, 1).
        grid: bandwidths, ascending.
        last_below: report the last point still below the target instead (the published table's
            convention).

    Returns:
        One bandwidth a target; None when no point reaches it.
    """
    answers: list[float | None] = []
    for target in targets:
        reached = np.flatnonzero(utilisation_B >= target)
        if not len(reached):
            answers.append(None)
        else:
            answers.append(float(grid[max(int(reached[0]) - last_below, 0)]))
    return answers
