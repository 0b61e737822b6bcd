"""Regions whose parameters stop being finite at a step, in jobs and in a simulation alike.

All parameters of the region become NaN after that step's events. It then learns nothing, and what
it sends is not finite: no landing counts it, and it adopts the anchor with the next fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.faults.fault import Fault
from experiments.faults.happened import Happened
from lowcomm_jax.state.train_state import TrainState, with_inner


class NotFinite:
    """Applies the faults of kind `nan` to the regions that this process trains.

    Args:
      when: step -> regions.
      here: the regions of this process, by row of its arrays.

    Attributes:
      witness: called with the step of every one that was applied.
    """

    def __init__(self, when: Mapping[int, Sequence[int]], here: Sequence[int]):
        rows = {step: [r in regions for r in here] for step, regions in when.items()}
        self._rows = {step: np.array(mask) for step, mask in rows.items() if any(mask)}
        self.witness: Callable[[int], None] | None = None

    @classmethod
    def of(cls, faults: Sequence[Fault] | Happened, here: Sequence[int]) -> NotFinite:
        """Those of a script, or of what happened."""
        if isinstance(faults, Happened):
            return cls(faults.not_finite, here)
        when: dict[int, list[int]] = {}
        for fault in faults:
            if fault.kind == "nan":
                when.setdefault(fault.step, []).append(fault.region)
        return cls(when, here)

    def next(self, step: int) -> float:
        """The first step after this one at which something is applied; or infinity."""
        return min((at for at in self._rows if at > step), default=math.inf)

    def apply(self, state: TrainState, before: int, now: int) -> TrainState:
        """Apply what is due after the steps from `before` on, up to `now`; the events are done."""
        for step, mask_R in self._rows.items():
            if before < step <= now:
                state = with_inner(state, params=_spoilt(state.inner.params, mask_R))
                if self.witness is not None:
                    self.witness(step)
        return state


def _spoilt(params, mask_R: np.ndarray):
    """NaN in these regions' rows of every array `[R, ...]`, which stay where they are."""

    def spoil(x: jax.Array) -> jax.Array:
        mask = mask_R.reshape(-1, *(1,) * (x.ndim - 1))
        return jax.device_put(jnp.where(mask, jnp.asarray(jnp.nan, x.dtype), x), x.sharding)

    return jax.tree.map(spoil, params)
