"""Layer-level time model of a region's steps: which waits communication causes, by bandwidth.

`utilisation` gives the compute time / total time of a dry run's sends at many bandwidths at once.

The model is that of Streaming DiLoCo (arXiv 2501.18512, section on compute utilisation): one serial
compute stream and one serial link. The rules below are our reading, chosen because they reproduce
its published table (`evidence/published`). A step is L forward, L backward-activation and L
backward-weight computations of equal length. The transfer of a layer's share of a payload may start
when the layer's weight gradient is done, and takes its bytes over the bandwidth. The forward pass
of that layer waits for it in the step after the landing. With one layer it is a clock of whole
steps.

Differs from the paper: it counts 4L - 1 nodes (no activation gradient for the first layer). Here
all three kinds have L computations, which changes the step by 1 / 3L.

Differs from a run: pseudo-gradients leave when the step is done, and not layer by layer during its
backward pass. The difference is at most one backward pass a send.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lowcomm_jax.planner.dry_run import Sent

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


Seconds = Callable[[Sent], tuple[np.ndarray, float]]


def utilisation(
    layers: int, step_s: float, sends: Sequence[Sent], seconds: Seconds, warm: int, steps: int
) -> np.ndarray:
    """Simulate and give compute time / total time of steady periods.

    Args:
        layers: how many layers a step has.
        step_s: compute seconds of one step.
        sends: the payloads that leave up to step `steps`.
        seconds: of a payload: those that it occupies the link, `[B]` at each of B bandwidths, and
            those between the end of a transfer and its arrival.
        warm, steps: steps `warm` + 1 to `steps` are measured.

    Returns:
        float [B] in (0, 1].
    """
    part = step_s / (3 * layers)
    by_step: dict[int, list[Sent]] = {}
    for sent in sends:
        by_step.setdefault(sent.step, []).append(sent)
    now_B = link_B = start_B = np.zeros(1)
    waits: dict[int, dict[int, np.ndarray]] = {}
    for step in range(1, steps + 1):
        now_B = _forward(now_B, waits.pop(step, {}), layers, part)
        for sent in by_step.get(step, ()):
            volume_B, latency_s = seconds(sent)
            due = waits.setdefault(sent.waits, {})
            for layer in sorted(sent.layers, reverse=True):
                done_B = now_B + 2 * part * (layers - layer)
                link_B = np.maximum(link_B, done_B) + sent.layers[layer] * volume_B
                due[layer] = np.maximum(due.get(layer, 0.0), link_B + latency_s)
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
    grid: np.ndarray,
) -> list[float | None]:
    """Give the smallest bandwidth of a grid that reaches each target.

    Args:
        utilisation_B: utilisation at each grid point.
        targets: shares in (0, 1).
        grid: bandwidths, ascending.

    Returns:
        One bandwidth a target; None when no point reaches it.
    """
    reached = (np.flatnonzero(utilisation_B >= target) for target in targets)
    return [float(grid[points[0]]) if len(points) else None for points in reached]
