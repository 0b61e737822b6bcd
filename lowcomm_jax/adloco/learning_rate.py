r"""Scales the learning rate by the samples consumed, and by how large the batch is.

$$\theta \leftarrow \theta + s(N) \cdot f(b / b_0) \cdot u$$

with

- u: the inner optimizer's update at its own, peak learning rate;
- s: the schedule over the samples N that all trainers of all regions have consumed;
- f: 1, the square root or the identity;
- b: the batch of a region's step; b_0: the batch that the peak was chosen for.

`scale_lr` is the last transform of the inner optimizer's chain, so that it also scales decoupled
weight decay, as a learning rate does. `set_lr_scale` sets its state from the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.mesh.arrays import place_like
from lowcomm_jax.state.train_state import TrainState, with_inner

LrSchedule = Callable[[jax.Array], jax.Array]
Scaling = Literal["none", "sqrt", "linear"]
SCALINGS: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "sqrt": math.sqrt,
    "linear": float,
}


class LrScaleState(NamedTuple):
    """Where the run stands; the host sets it anew whenever batches change (`set_lr_scale`).

    Attributes:
      samples: int32, consumed by all trainers of all regions before this step.
      per_step: int32, that they consume together at a step.
      scale: float32, f(b / b_0).
    """

    samples: jax.Array
    per_step: jax.Array
    scale: jax.Array


def scale_lr(schedule: LrSchedule) -> optax.GradientTransformation:
    """Scale updates by schedule(samples) and by the state's `scale`."""

    def init(params):
        del params
        return LrScaleState(jnp.int32(0), jnp.int32(0), jnp.float32(1))

    def update(updates, state, params=None):
        del params
        factor = factor_after(schedule, state, 0)
        scaled = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
        return scaled, state._replace(samples=state.samples + state.per_step)

    return optax.GradientTransformation(init, update)


@functools.partial(jax.jit, static_argnames="schedule")
def factor_after(schedule: LrSchedule, state: LrScaleState, steps: int) -> jax.Array:
    """The factor of the update so many steps after a state, float32."""
    factor = schedule(state.samples + steps * state.per_step)
    return state.scale * jnp.asarray(factor, jnp.float32)


def set_lr_scale(state: TrainState, numbers: LrScaleState) -> TrainState:
    """Set the state of `scale_lr` in the inner optimizer's chain."""
    *others, scaling = state.inner.opt
    filled = jax.tree.map(lambda old, x: np.full(old.shape, x, old.dtype), scaling, numbers)
    return with_inner(state, opt=(*others, place_like(filled, scaling)))
