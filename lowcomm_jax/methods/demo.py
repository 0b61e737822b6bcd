r"""DeMo (arXiv 2411.19870): momentum stays in its region, its largest cosine coefficients travel.

At every step, with F the cosine transform (DCT-II) of 64 x 64 chunks and m the momentum:

.. math::
   q_r = F^{-1}\,\mathrm{TopK}(F m_r), \qquad
   \theta \leftarrow \theta + \mathrm{inner}\big(\operatorname{sign}(\bar q)\big)

where every coefficient of q-bar is the mean over the regions that sent it. The momentum is what
`compression.error_feedback` encodes: its residual is the momentum less what was sent of it.

The inner optimizer steps along the sign: `optax.sgd(learning_rate)`, behind decoupled weight decay
if any (`lowcomm_jax.optimizers`, `optimizer="sgd"`). The sign has length sqrt(parameters): do not
clip it.

An absent region keeps its old parameters and its momentum, which does not decay meanwhile. When it
takes part again, it computes its gradient at the anchor, like everyone else.

Differs from the paper: the learning rate stays out of the momentum (the paper adds lr g), which
is the same rule while the rate is constant. A coefficient takes 12 bits of index and 32 of value
(64 and 32 in the paper's code). A region's gradient is not clipped before it enters the momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from lowcomm_jax.methods.base import Method, published, wire_codec
from lowcomm_jax.methods.ddp import ddp


@published(inner=optax.sgd(1.0))  # without moments: its residual is the momentum
def demo(
    k: int = 32,
    block: int = 64,
    decay: float = 0.999,
    codec: Any = None,
    inner_batching: Any = None,
    stacked: Sequence[str] = (),
) -> Method:
    """Exchange the fast part of the momentum at every step; step along its sign.

    Args:
      k: coefficients kept per chunk.
      block: largest side of a chunk, in entries, at most 64.
      decay: beta, share of the momentum that is kept from step to step, in [0, 1].
      codec: another codec in place of this one, used as it is. Without error feedback there is no
        momentum.
      inner_batching: as in `diloco`.
      stacked: as in `muloco`.
    """
    paper = {"name": "dct_topk", "k": k, "block": block, "error_feedback": decay}
    wire, problems = wire_codec(demo, codec, paper, stacked, k=k, block=block, decay=decay)
    return ddp(wire, inner_batching).named("demo", problems, outer=optax.scale_by_sign())
