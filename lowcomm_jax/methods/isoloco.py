"""IsoLoCo (arXiv 2607.03011): DiLoCo's round along a mean with equal singular values.

The mean of every matrix goes through `merge.Isotropic`, each layer of a stack by itself; vectors
keep their mean. The exchange reduces the mean as in DiLoCo, with the same bytes.

Source: the published code, which has H = 30; of the paper only the abstract was read. Differs from
the code: which tensors are matrices (`merge.Isotropic`). Codecs are an addition of ours.
"""

from __future__ import annotations

from typing import Any

import optax

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.merge import Isotropic
from lowcomm_jax.rules.outer import nesterov


@published(period=30)
def isoloco(
    period: int,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
) -> Method:
    """Synchronise every `period` inner steps along an isotropic mean.

    Args:
      outer: Optax transform of the isotropic mean; default Nesterov 1.8 / 0.8.
      period, codec, inner_batching: as in `diloco`.
    """
    plain = diloco(period, nesterov(1.8, 0.8) if outer is None else outer, codec, inner_batching)
    return plain.named("isoloco", merge=Isotropic())
