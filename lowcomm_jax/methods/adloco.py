r"""AdLoCo (arXiv 2508.18182): several trainers a region, adaptive batches, and the switch mode.

Every trainer runs DiLoCo's rounds (`diloco`) with the batch b_i that it asked for,

.. math::
   \bar\Delta_i = \tfrac1R \sum_r (\Theta_i - \theta_{i,r}), \qquad
   \Theta_i \leftarrow \mathrm{SGD}(\Theta_i, \bar\Delta_i), \qquad
   b_i \leftarrow \max(b_i, \lceil T_i \rceil)

with T_i the batch that the noise of its gradients asks for (`rules.batching`). Every
`merge_every` rounds the trainers of the smallest requests merge, weighted by their requests
(`rules.trainers`). Batches beyond what fits into memory are accumulated (`adloco.step_plan`).

Differs from the paper's code:

- Statistics are taken at one point, of microbatches inside a region, and with the right dimension
  (`rules.batching`). So the code's bounds (eta 0.8, vartheta 0.01, nu 0.3) mean nothing here.
- A decision takes effect one round later.
- Inner moments are kept across rounds, and averaged in a merge.
- Every trainer draws from the whole shard of its region in an order of its own. So no data stays
  unread when a trainer is merged into another.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.batching import AugmentedTest
from lowcomm_jax.rules.outer import sgd
from lowcomm_jax.rules.trainers import Trainers


def adloco(
    period: int,
    trainers: int = 4,
    merge_every: int | None = 2,
    threshold: float = 2.0,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Train several trainers a region with adaptive batches; needs a `lowcomm_jax.AdaptiveEngine`.

    Args:
      trainers: k, trainers of a region at the start.
      merge_every, threshold: see `rules.trainers.Trainers`.
      outer: Optax transform of the mean pseudo-gradient; default SGD 0.5 without momentum.
      inner_batching: batch policy of each trainer; default the augmented test, 1 to 64 samples.
      period, codec: as in `diloco`.
    """
    policy = AugmentedTest(start=1, cap=64) if inner_batching is None else inner_batching
    plain = diloco(period, sgd(0.5) if outer is None else outer, codec, policy)
    return plain.named("adloco", trainers=Trainers(trainers, merge_every, threshold))
