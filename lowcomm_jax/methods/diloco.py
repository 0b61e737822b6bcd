r"""DiLoCo (arXiv 2311.08105, Alg. 1): H inner steps per region, then one outer Nesterov step.

.. math::
   \bar\Delta = \tfrac1R \sum_r (\Theta - \theta_r), \qquad
   \Theta \leftarrow \mathrm{Nesterov}(\Theta, \bar\Delta), \qquad \theta_r \leftarrow \Theta

Nesterov is `outer.nesterov`. The inner optimizer's state stays in its region and is kept across
rounds.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.rules.outer import nesterov
from lowcomm_jax.schedule import Staggered


@published(law="diloco")
def diloco(
    period: int,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise the whole model every `period` inner steps with an outer optimizer.

    Args:
      period: H, inner steps per round.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.7 / 0.9 (rate and
        momentum).
      codec: wire codec of the pseudo-gradients; None = dense fp32.
      inner_batching: batch policy of the inner steps; None = a fixed batch.
    """
    return Method(
        name="diloco",
        schedule=Staggered(period),
        outer=nesterov(0.7, 0.9) if outer is None else outer,
        codec=codec,
        inner_batching=inner_batching,
    )
