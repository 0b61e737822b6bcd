r"""Naive delayed DiLoCo (arXiv 2502.12996, Alg. 2): every mean lands one round late.

.. math::  \Theta^{t+1} = \mathrm{Nesterov}(\Theta^{t}, \bar\Delta^{t-1}), \qquad
           \theta_r \leftarrow \Theta^{t+1}

At the first boundary nothing has arrived: every region restarts from the unmoved anchor. This is
the baseline of eager updates (`eager_diloco`), and DiLoCoX's one-step delay (arXiv 2506.21263)
without compression.

Differs from the paper: in nothing we know of; `first_round="blocking"` is an addition of ours.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.outer import nesterov
from lowcomm_jax.schedule import Staggered
from lowcomm_jax.schedule.base import FirstRound
from lowcomm_jax.settings import FROM_1


def delayed_diloco(
    period: int,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    first_round: FirstRound = "empty",
) -> Method:
    """Apply every round's mean pseudo-gradient one round late.

    Args:
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.4 / 0.9 (the paper
        finds a lower learning rate necessary).
      first_round: `blocking` lands the first payload at once, so that it is the second boundary
        which has nothing to land.
      period, codec, inner_batching: as in `diloco`.
    """
    late = period if FROM_1.fits(period) else 1  # else the schedule says so
    schedule = Staggered(period, delay=late, land_after_send=True, first_round=first_round)
    plain = diloco(period, nesterov(0.4, 0.9) if outer is None else outer, codec, inner_batching)
    return plain.named("delayed_diloco", schedule=schedule)
