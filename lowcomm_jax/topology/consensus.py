"""Measures how far regions with anchors of their own are apart, and the losses of their models.

With gossip the model is any region's, or their average; the regions are kept close, never equal.
Three measures:

- `pull_norm` of a landing event: every region's distance from its group's mean anchor. From it
  `outer.Consensus.variance` estimates the variance over all regions without another message.
- `variance(state)`: the variance itself. It needs all anchors, so it belongs to evaluations.
- `judge(state, loss_of)`: the loss of every region's model, and of their average.

`outer.Consensus.contraction` predicts the factor per round by which the variance shrinks while
gradients add nothing to it; `contraction` is the factor of a run that happened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.params_view import global_params, region_params
from lowcomm_jax.state.train_state import TrainState

PyTree = Any


def variance(state: TrainState) -> jax.Array:
    """Mean over anchors of the squared L2 distance from their mean, float32 scalar on the device.

    All trained leaves count together; with one anchor for all regions it is 0.
    """

    def one(x_A):
        return jnp.sum(jnp.square(x_A - x_A.mean(axis=0, keepdims=True))) / x_A.shape[0]

    return sum((one(x_A) for x_A in unstow(state.anchor).values()), jnp.zeros(()))


def contraction(variances: Sequence[float]) -> float | None:
    """Geometric mean of the factor from round to round.

    Args:
      variances: over regions, one per round; leading zeros (anchors that are still equal) do not
        count.

    Returns:
      The factor; None where fewer than two values are left, or one of them is not positive.

    >>> contraction([0.0, 8.0, 4.0, 2.0])
    0.5
    """
    positive = np.trim_zeros(np.asarray(variances, np.float64), "f")
    if len(positive) < 2 or not (positive > 0).all():
        return None
    return float((positive[-1] / positive[0]) ** (1 / (len(positive) - 1)))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Losses of the final models.

    Attributes:
      average: of the mean of the anchors, `global_params`.
      regions: of every region's own model, float `[R]`.
    """

    average: float
    regions: np.ndarray

    @property
    def spread(self) -> float:
        """Largest minus smallest loss of a region."""
        return float(self.regions.max() - self.regions.min())


def judge(state: TrainState, loss_of: Callable[[PyTree], jax.Array]) -> Judgement:
    """Evaluate the average model and every region's own; waits for the device.

    Args:
      state: after `Engine.finish`, so that a region's model is its anchor.
      loss_of: params (the user's tree) -> scalar loss, for example on an evaluation batch; compiled
        anew at every call.
    """
    average = jax.jit(loss_of)(global_params(state))
    regions = jax.jit(lambda models: jax.lax.map(loss_of, models))(region_params(state))
    return Judgement(float(average), np.asarray(regions, np.float64))
