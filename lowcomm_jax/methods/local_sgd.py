r"""Local SGD, FedAvg (arXiv 1602.05629): H inner steps per region, then the mean of the parameters.

.. math::
   \Theta \leftarrow \Theta - \tfrac1R \sum_r (\Theta - \theta_r)
   = \tfrac1R \sum_r \theta_r, \qquad \theta_r \leftarrow \Theta
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method
from lowcomm_jax.rules import outer as outer_rules
from lowcomm_jax.schedule import Staggered


def local_sgd(period: int, codec: Any = None, inner_batching: Any = None) -> Method:
    """Average the regions' parameters every `period` inner steps.

    Args:
      period: H, inner optimizer steps per round.
      codec: wire codec of the pseudo-gradients; None = dense fp32.
      inner_batching: batch policy of the inner steps; None = a fixed batch.

    Raises:
      ValueError: an unknown name or setting of a codec.
    """
    return Method(
        name="local_sgd",
        schedule=Staggered(period),
        outer=outer_rules.average(),
        codec=codec,
        inner_batching=inner_batching,
    )
