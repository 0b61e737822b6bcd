r"""Decoupled momentum (arXiv 2510.03371): DeMo's sparse momentum as DiLoCo's outer step.

Every H steps (128 in the paper) a region sends the k largest coefficients of the cosine transform
(DCT-II) of every 64 x 64 chunk of its decayed residual. The mean of a coefficient is over the
regions that sent it.

- `variant="mean"`: the residual is that of `compression.error_feedback`. One anchor for all
  descends along the mean, by `outer.sgd`.
- `variant="as_coded"`: the residual is a momentum into which the mean is put back
  (`compression.decoupled_momentum`). Every region keeps its own anchor, and steps along its own
  pseudo-gradient and momentum.

Differs from the paper: we had not its body. `as_coded` follows the authors' code, and `mean` is the
reading in which the regions stay identical. Coefficients travel in fp32, not in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax import compression
from lowcomm_jax.methods.base import Method, published, wire_codec
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.refused import collect
from lowcomm_jax.rules.outer import sgd


@published(period=30)
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
      variant: `mean`, one anchor for all; or `as_coded`, one per region: see the module.
      k: coefficients kept per chunk.
      block: largest side of a chunk, in entries, at most 64.
      decay: beta, share of the residual that is kept from round to round, in [0, 1); 1 is allowed
        with `mean`.
      outer: Optax transform of the mean pseudo-gradient; default plain descent of rate 0.7.
      codec: another codec in place of this one. With `mean` it is used as it is (wrap it in error
        feedback yourself), with `as_coded` inside the momentum.
      stacked: as in `muloco`.
      period, inner_batching: as in `diloco`.
    """
    own = variant == "as_coded"
    settings = {"k": k, "block": block}
    paper = {"name": "dct_topk", **settings}
    if not own:
        paper["error_feedback"] = settings["decay"] = decay
    wire, wrong = wire_codec(decoupled_momentum, codec, paper, stacked, **settings)
    problems = list(wrong)
    if own and wire is not None:
        coded = wire
        wire = collect(problems, "", lambda: compression.decoupled_momentum(coded, decay))
    if variant not in ("mean", "as_coded"):
        problems.append(f"variant={variant!r}: use mean, as_coded")
    plain = diloco(period, sgd(0.7) if outer is None else outer, wire, inner_batching)
    anchors = "per_region" if own else "shared"
    return plain.named("decoupled_momentum", problems, anchors=anchors)
