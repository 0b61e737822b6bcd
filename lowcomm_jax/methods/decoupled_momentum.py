r"""Decoupled momentum (arXiv 2510.03371): DeMo's sparse momentum as DiLoCo's outer step.

Every H steps, with F the cosine transform (DCT-II) of 64 x 64 chunks and
:math:`\Delta_r = \Theta_r - \theta_r`:

.. math::
   p_r = \Delta_r + \beta e_r, \qquad q_r = F^{-1}\,\mathrm{TopK}(F p_r), \qquad
   e_r \leftarrow p_r - q_r, \qquad \bar q = F^{-1}\,\mathrm{mean}_r\,\mathrm{TopK}(F p_r)

where the mean of a coefficient is over the regions that sent it. `variant="mean"` descends along
it, with one anchor for all:

.. math::  \Theta \leftarrow \Theta - \eta\,\bar q, \qquad \theta_r \leftarrow \Theta

`variant="as_coded"`: e is a momentum into which the mean is put back, and every region keeps its
own anchor:

.. math::
   e_r \leftarrow e_r + \bar q, \qquad
   \Theta_r \leftarrow \Theta_r - \eta\,(\Delta_r + \beta e_r), \qquad \theta_r \leftarrow \Theta_r

====== ============================================ =======================
symbol meaning                                      argument
====== ============================================ =======================
H      inner steps per round (128 in the paper)     `period`
k      coefficients kept per chunk                  `k` (32)
       largest side of a chunk                      `block` (64)
beta   decay                                        `decay` (0.95)
eta    outer learning rate                          in `outer` (0.7)
====== ============================================ =======================

Differs from the paper: we had not its body. `as_coded` follows the authors' code, and `mean` is the
reading in which the regions stay identical. Coefficients travel in fp32, not in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax import compression
from lowcomm_jax.methods.base import Method, wire_codec
from lowcomm_jax.rules import outer as outer_rules
from lowcomm_jax.schedule import Staggered


def decoupled_momentum(
    period: int,
    variant: Literal["mean", "as_coded"] = "mean",
    k: int = 32,
    block: int = 64,
    decay: float = 0.95,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    stacked: Sequence[str] = (),
) -> Method:
    """Send the largest cosine coefficients of a decayed residual every `period` inner steps.

    Args:
      period: H, inner steps per round.
      variant: `mean`, one anchor for all; or `as_coded`, one per region: see the module.
      k: coefficients kept per chunk.
      block: largest side of a chunk, in entries, at most 64.
      decay: beta, share of the residual that is kept from round to round, in [0, 1); 1 is allowed
        with `mean`.
      outer: Optax transform of the mean pseudo-gradient; default plain descent of rate 0.7.
      codec: another codec in place of this one. With `mean` it is used as it is (wrap it in error
        feedback yourself), with `as_coded` inside the momentum.
      inner_batching: batch policy of the inner steps; None = a fixed batch.
      stacked: path prefixes of leaves with a leading layer axis, as the engine is given.

    Raises:
      ValueError: an unknown codec, or a setting of the codec out of range.
    """
    own = variant == "as_coded"

    def coefficients():
        return compression.make("dct_topk", k=k, block=block, stacked=tuple(stacked))

    def with_feedback():
        return compression.error_feedback(coefficients(), decay)

    settings = {"k": (k, 32), "block": (block, 64)}
    if own:
        wire, problems = wire_codec(codec, coefficients, stacked, **settings)
        wire = compression.decoupled_momentum(wire, decay)
    else:
        settings["decay"] = (decay, 0.95)
        wire, problems = wire_codec(codec, with_feedback, stacked, **settings)
    if variant not in ("mean", "as_coded"):
        problems = (*problems, f"variant={variant!r}: use mean, as_coded")
    rule = outer_rules.sgd(0.7) if outer is None else outer
    return Method(
        name="decoupled_momentum",
        schedule=Staggered(period),
        outer=rule,
        codec=wire,
        anchors="per_region" if own else "shared",
        inner_batching=inner_batching,
        problems=problems,
    )
