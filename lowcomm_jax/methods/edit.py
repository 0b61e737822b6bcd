r"""EDiT and A-EDiT (arXiv 2412.07210): workers whose steps are out of the ordinary count less.

DiLoCo's round with another mean, tensor by tensor. With n_r the norm of worker r's Delta:

.. math::
   w_r = \frac{e^{-n_r / T}}{\sum_q e^{-n_q / T}}, \qquad
   \bar\Delta = \sum_r w_r \Delta_r, \qquad
   \bar\Delta \leftarrow \bar\Delta\, \min\!\Big(1, \frac{c}{\lVert\bar\Delta\rVert}\Big)

over the workers that are no outliers. An outlier's norm lies more than k standard deviations above
the mean of the worker's own norms of that tensor; it counts nothing, and does not enter that mean:

.. math::
   d = n - m, \qquad m \leftarrow m + \alpha d, \qquad
   v \leftarrow (1 - \alpha)\,(v + \alpha\, d\,(n - m))

Where all are outliers, the tensor's anchor and its outer momentum stay, and regions take the
anchor. In A-EDiT a round is a time: workers make as many steps in it as they can, and one that has
made none takes no part.

Known from notes of the published code; the paper was not read. Our readings: m and v start at 0.
The threshold is one-sided, and the code's further factor max(1, deviation of recent scores) is left
out. T = 1 on raw norms and a clip of 10 for each tensor are ours; outer rates are DiLoCo's. Weights
given to the engine multiply the softmax's.

n is the norm of Delta, before a codec and its residual. It travels beside the payload, 4 bytes a
tensor, to every other region. Dense payloads of one mesh are then reduced by the weights, 2 (R - 1)
/ R payloads a region. Coded ones, and all between jobs, go to every region: R - 1 payloads. Regions
that are jobs of their own get the same numbers. What an outlier sent is spent: its residual does
not get it back.

Differs from the paper: a layer is not synchronised beside the next forward pass, and there is no
synchronous phase at the start. The code's optional weights by steps are left out. A-EDiT's time is
counted in ticks, scripted, on one mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.optimizers import Kind
from lowcomm_jax.refused import in_range, is_whole, tuples
from lowcomm_jax.rules.merge import Merge, Merged, Reads
from lowcomm_jax.schedule import Timed


def edit(
    period: int,
    clip: float = 10.0,
    temperature: float = 1.0,
    outlier: float = 3.0,
    decay: float = 0.02,
    warm_up: int = 120,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise every `period` inner steps, with weights that fall with a worker's norm.

    Args:
      period: H, inner steps per round.
      clip: c, longest merged pseudo-gradient of a tensor, positive; inf = off.
      temperature: T, in the unit of norms, positive; inf = equal weights.
      outlier: k, standard deviations from which a norm is an outlier's, positive; inf = off.
      decay: alpha, weight of a new norm in mean m and variance v, in (0, 1).
      warm_up: rounds of a worker before it can be an outlier, a whole number from 0.
      outer: Optax transform of the merged pseudo-gradient; default Nesterov 0.7 / 0.9.
      codec, inner_batching: as in `diloco`.
    """
    rule = NormWeighted(clip, temperature, outlier, decay, warm_up)
    plain = diloco(period, outer, codec, inner_batching)
    return plain.named("edit", merge=rule)


def a_edit(
    seconds: float,
    step_seconds: float,
    speeds: Sequence[float],
    clip: float = 10.0,
    temperature: float = 1.0,
    outlier: float = 3.0,
    decay: float = 0.02,
    warm_up: int = 120,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise whenever a time is over, whatever number of steps each worker has made.

    Args:
      seconds: of a round; the code has 600.
      step_seconds: of an inner step of the fastest worker; a round has as many ticks as fit in.
      speeds: inner steps per second of each worker, in any unit; one a region.
      clip, temperature, outlier, decay, warm_up, outer: as in `edit`.
      codec, inner_batching: as in `diloco`.
    """
    checks = [
        in_range("step_seconds", step_seconds, 0.0, math.inf, open_low=True, open_high=True),
        in_range("seconds", seconds, 0.0, math.inf, open_low=True, open_high=True),
    ]
    problems = [problem for problem in checks if problem is not None]
    if not problems and seconds < step_seconds:
        problems.append(
            f"seconds={seconds}: no step of step_seconds={step_seconds} fits in; give more"
        )
    ticks = 1 if problems else int(seconds / step_seconds + 1e-9)
    plain = edit(1, clip, temperature, outlier, decay, warm_up, outer, codec, inner_batching)
    return plain.named("a_edit", problems, schedule=Timed(ticks, tuples(speeds)))


class Norms(NamedTuple):
    """History of the workers' norms of one tensor.

    Attributes:
      mean, variance: float32 `[R]`, exponentially weighted.
      rounds: int32 `[R]`, norms that have entered.
    """

    mean: jax.Array
    variance: jax.Array
    rounds: jax.Array


@dataclasses.dataclass(frozen=True)
class NormWeighted(Merge):
    """The merge rule above; see `Merge`, reads norms. Attributes: as in `edit`."""

    clip: float = 10.0
    temperature: float = 1.0
    outlier: float = 3.0
    decay: float = 0.02
    warm_up: int = 120
    reads: ClassVar[Reads] = "norms"

    def violations(self) -> list[str]:
        positive = ("clip", "temperature", "outlier")
        checks = [in_range(k, getattr(self, k), 0.0, math.inf, open_low=True) for k in positive]
        checks.append(in_range("decay", self.decay, 0.0, 1.0, open_low=True, open_high=True))
        if not (is_whole(self.warm_up) and self.warm_up >= 0):
            checks.append(f"warm_up={self.warm_up!r}: give a whole number of rounds, from 0")
        return [line for line in checks if line is not None]

    def init(self, regions: int) -> Norms:
        zeros = jnp.zeros(regions, jnp.float32)
        return Norms(zeros, zeros, jnp.zeros(regions, jnp.int32))

    def weigh(
        self, norm_R: jax.Array, state: Norms, weight_R: jax.Array, kind: Kind
    ) -> tuple[jax.Array, Norms]:
        del kind
        away_R = norm_R - state.mean
        far_R = away_R > self.outlier * jnp.sqrt(state.variance)
        good_R = (weight_R > 0) & ~(far_R & (state.rounds >= self.warm_up))
        mean_R = state.mean + self.decay * away_R
        variance_R = state.variance + self.decay * away_R * (norm_R - mean_R)
        noted = Norms(mean_R, (1 - self.decay) * variance_R, state.rounds + 1)
        history = jax.tree.map(lambda new, old: jnp.where(good_R, new, old), noted, state)
        least = jnp.min(jnp.where(good_R, norm_R, jnp.inf))
        share_R = jnp.where(good_R, weight_R * jnp.exp((least - norm_R) / self.temperature), 0.0)
        return share_R, history

    def update(
        self,
        delta_RxN: jax.Array,
        state: Norms,
        weight_R: jax.Array,
        kind: Kind,
        momentum: jax.Array | None,
    ) -> Merged:
        del weight_R, kind, momentum
        merged = delta_RxN[0]
        length = jnp.sqrt(jnp.sum(jnp.square(merged)))
        shorter = jnp.where(length > self.clip, self.clip / jnp.maximum(length, self.clip), 1.0)
        return Merged(merged * shorter, state)
