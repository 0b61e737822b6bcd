r"""Eager DiLoCo (arXiv 2502.12996, Alg. 3): payloads have a whole round to arrive.

At a boundary every region steps with its own fresh part and the others' part of the last round:

.. math::
   \Theta_r \leftarrow \mathrm{Eager}\big(\Theta_r, \bar\Delta^{t-1}, \Delta_r^{t},
   \Delta_r^{t-1}\big), \qquad \theta_r \leftarrow \Theta_r

with Eager, around Nesterov, that of `outer.eager`. Every region keeps its own anchor and momentum.
What a round adds beyond the mean, the next round subtracts, so that replicas never drift apart. At
the first boundary nothing has arrived, and a region steps along its own part alone.

Differs from the paper: in place of 1/R stands the region's share of the round that the part belongs
to (0 for a region that took no part). The late part that is subtracted is exactly the value that
others decoded.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.methods.delayed_diloco import delayed_diloco
from lowcomm_jax.rules.outer import eager, nesterov


@published(law="diloco")
def eager_diloco(
    period: int,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Overlap a whole round: own fresh part now, the others' part one round late.

    Args:
      outer: Optax transform of the mixed pseudo-gradient; default Nesterov 0.4 / 0.9.
      period, codec, inner_batching: as in `diloco`.
    """
    rule = nesterov(0.4, 0.9) if outer is None else outer
    if isinstance(rule, optax.GradientTransformation):  # else the engine refuses it
        rule = eager(rule)
    late = delayed_diloco(period, rule, codec, inner_batching)
    return late.named("eager_diloco", anchors="per_region")
