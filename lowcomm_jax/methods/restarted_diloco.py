r"""DiLoCo whose outer momentum restarts (arXiv 2605.28585): m is set to 0 every K rounds.

.. math::
   \bar\Delta = \tfrac1R \sum_r (\Theta - \theta_r), \qquad
   m' = \beta m + (1 - \beta) \bar\Delta, \qquad
   \Theta \leftarrow \Theta - \nu \left((1 + \beta) m' - \beta m\right), \qquad
   m \leftarrow m' \text{, after every K-th round } 0, \qquad \theta_r \leftarrow \Theta

====== ============================================ =======================
symbol meaning                                      argument
====== ============================================ =======================
H      inner steps per round (64 to 2048)           `period`
K      rounds between two restarts                  `every` (3)
nu     outer learning rate                          `learning_rate` (0.9)
beta   outer momentum                               `momentum` (0.7)
====== ============================================ =======================

The rule alone is `outer.restarting`, for other methods (`outer={"name": "restarting"}` in a
config): with fragments every fragment counts rounds of its own.

Source: notes of a replication (Llama-150M, two workers), where K and the rates are from; of the
paper only the abstract was read. Codecs are an addition of ours.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.methods.base import Method
from lowcomm_jax.rules.outer import restarting
from lowcomm_jax.schedule import Staggered


def restarted_diloco(
    period: int,
    every: int = 3,
    learning_rate: float = 0.9,
    momentum: float = 0.7,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise every `period` inner steps; the outer momentum restarts every `every` rounds.

    Args:
      period: H, inner steps per round.
      every: K, rounds between two restarts.
      learning_rate: outer learning rate.
      momentum: weight of the old outer momentum, in [0, 1).
      codec: wire codec of the pseudo-gradients; None = dense fp32.
      inner_batching: batch policy of the inner steps; None = a fixed batch.

    Raises:
      ValueError: a setting of the rule out of range, or an unknown codec.
    """
    return Method(
        name="restarted_diloco",
        schedule=Staggered(period),
        outer=restarting(learning_rate, momentum, every),
        codec=codec,
        inner_batching=inner_batching,
    )
