"""Resume with more or fewer regions.

The first min(R, R') regions go on as they are. A new region

- starts from the anchor (the mean over anchors where every region has its own);
- has zero residuals and fresh landing state;
- takes over region 0's inner optimizer state, step and local buffers: moments and the count of a
  learning-rate schedule belong together, and a region that warms up again while the others
  already decay would pull the anchor about;
- has consumed no tokens and sent no bytes, and counts as landed at the step of the resume.

A region that is left out takes its progress since its last landing with it: drain the run
(`Engine.finish`) and save before. With payloads in flight the change is refused, since dropping
one that has landed in some regions would apply the same progress twice.
"""

from __future__ import annotations

import numpy as np

from lowcomm_jax.checkpoint.leaves import ANCHORED, field_of, region_axis

Arrays = dict[str, np.ndarray]

ZERO = ("inner/tokens", "clock/bytes_sent", "clock/bytes_received", "clock/staleness")


def resize(saved: Arrays, fresh: Arrays, regions: tuple[int, int], anchors: int) -> Arrays:
    """Return the arrays of the whole state for another number of regions.

    Args:
      saved: arrays of the whole state, nothing in flight.
      fresh: initial codec and landing states, leaves `[new, ...]`.
      regions: (old, new) number of regions.
      anchors: number of anchors from now on: 1, or one per region.
    """
    old, new = regions
    out = {}
    for name, array in saved.items():
        if field_of(name) in ANCHORED:
            out[name] = _extend(array[:anchors], _mean(array), anchors, 0)
        elif (axis := region_axis(name)) is not None:
            kept = np.take(array, range(min(old, new)), axis=axis)
            out[name] = _extend(kept, _newcomer(name, saved, fresh, axis), new, axis)
        else:
            out[name] = array
    return out


def _extend(kept: np.ndarray, value: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Append copies of one region's `value` until the axis is `length` long."""
    missing = length - kept.shape[axis]
    added = np.stack([value] * missing, axis=axis) if missing else np.take(kept, [], axis=axis)
    return np.concatenate([kept, added.astype(kept.dtype)], axis=axis)


def _mean(array_A: np.ndarray) -> np.ndarray:
    """Mean over anchors; counters come from the first."""
    floating = np.issubdtype(array_A.dtype, np.floating)
    return array_A.mean(axis=0, dtype=np.float32) if floating else array_A[0]


def _newcomer(name: str, saved: Arrays, fresh: Arrays, axis: int) -> np.ndarray:
    """One new region's value of a leaf."""
    first = np.take(saved[name], 0, axis=axis)
    for copy in ("inner/params/", "received/"):
        if name.startswith(copy):
            return _mean(saved["anchor/" + name.removeprefix(copy)])
    if name in ZERO:
        return np.zeros_like(first)
    if name == "clock/last_landed":
        return np.full_like(first, saved["clock/step"])
    if name in fresh:
        return np.take(fresh[name], 0, axis=axis)
    return first
