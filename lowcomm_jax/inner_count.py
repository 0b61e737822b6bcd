"""The inner learning-rate schedule counts the steps of the run, also where an optimizer is new."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


def at_step(opt: PyTree, step: int, comes_R: np.ndarray) -> PyTree:
    """Let the schedules of regions that come into a run go on from its step.

    Moments stay as they are: their own counts correct for how young they are.

    Args:
      opt: state of an Optax optimizer, leaves `[R, ...]`; schedules are those of
        `optax.scale_by_schedule`.
      step: inner steps of the run; comes_R: bool `[R]`.
    """

    def one(state: Any) -> Any:
        if not _scheduled(state):
            return state
        return state._replace(count=_counted(state.count, comes_R, np.int32(step)))

    return jax.tree.map(one, opt, is_leaf=_scheduled)


def _scheduled(state: Any) -> bool:
    return isinstance(state, optax.ScaleByScheduleState)


@jax.jit
def _counted(count_R, comes_R, step):
    return jnp.where(comes_R, step, count_R)
