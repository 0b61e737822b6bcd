r"""Eager DiLoCo (arXiv 2502.12996, Alg. 3): payloads have a whole round to arrive.

At a boundary every region steps with its own fresh part and the others' part of the last round:

.. math::
   g_r = \bar\Delta^{t-1} + \tfrac1R (\Delta_r^{t} - \Delta_r^{t-1}), \qquad
   \Theta_r \leftarrow \mathrm{Nesterov}(\Theta_r, g_r), \qquad \theta_r \leftarrow \Theta_r

Every region keeps its own anchor and momentum. What a round adds beyond the mean, the next round
subtracts, so that replicas never drift apart. At the first boundary nothing has arrived and
g_r = Delta_r / R.

Differs from the paper: in place of 1/R stands the region's share of the round that the part belongs
to (0 for a region that took no part). The late part that is subtracted is exactly the value that
others decoded.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.rules import outer as outer_rules
from lowcomm_jax.schedule import Staggered


def eager_diloco(
    period: int,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Overlap a whole round: own fresh part now, the others' part one round late.

    Args:
      period: H, inner steps per round.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.4 / 0.9.
      codec: wire codec of the pseudo-gradients; None = dense fp32.
      inner_batching: batch policy of the inner steps; None = a fixed batch.

    Raises:
      ValueError: an unknown name or setting of a codec.
    """
    rule = outer_rules.nesterov(0.4, 0.9) if outer is None else outer
    return Method(
        name="eager_diloco",
        schedule=Staggered(period, delay=period, land_after_send=True),
        outer=outer_rules.eager(rule),
        codec=codec,
        inner_batching=inner_batching,
        anchors="per_region",
    )
