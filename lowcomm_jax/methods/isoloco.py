r"""IsoLoCo (arXiv 2607.03011): DiLoCo whose mean pseudo-gradient gets equal singular values.

.. math::
   \bar\Delta = \tfrac1R \sum_r (\Theta - \theta_r), \qquad
   \bar\Delta = U S V^\top \;\to\; D = \operatorname{mean}(S)\, U V^\top, \qquad
   v \leftarrow \mu v + D, \qquad
   \Theta \leftarrow \Theta - \eta (D + \mu v), \qquad \theta_r \leftarrow \Theta

====== ============================================ =======================
symbol meaning                                      argument
====== ============================================ =======================
H      inner steps per round (30 in the code)       `period`
eta    outer learning rate                          in `outer` (1.8)
mu     outer Nesterov momentum                      in `outer` (0.8)
====== ============================================ =======================

This holds for every matrix (`merge.Isotropic`), each layer of a stack by itself; vectors keep their
mean. The exchange reduces the mean as in DiLoCo, with the same bytes.

Source: the published code; of the paper only the abstract was read. Differs from the code: which
tensors are matrices. Leaves of two axes are, save those named `bias` or `scale`. Kernels of three
axes and more, such as those with an axis of heads, keep their mean. Codecs are an addition of ours.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method
from lowcomm_jax.rules import outer as outer_rules
from lowcomm_jax.rules.merge import Isotropic
from lowcomm_jax.schedule import Staggered


def isoloco(
    period: int,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise every `period` inner steps along an isotropic mean.

    Args:
      period: H, inner steps per round.
      outer: Optax transform of the isotropic mean; default Nesterov 1.8 / 0.8.
      codec: wire codec of the pseudo-gradients; None = dense fp32.
      inner_batching: batch policy of the inner steps; None = a fixed batch.

    Raises:
      ValueError: an unknown name or setting of a codec.
    """
    return Method(
        name="isoloco",
        schedule=Staggered(period),
        outer=outer_rules.nesterov(1.8, 0.8) if outer is None else outer,
        codec=codec,
        inner_batching=inner_batching,
        merge=Isotropic(),
    )
