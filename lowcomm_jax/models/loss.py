"""Measures next-token predictions: cross-entropy over the targets that count, plus z-loss.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def masked_cross_entropy(
    logits_NxV: Array, target_N: Array, mask_N: Array, z_loss: float
) -> tuple[Array, dict[str, Array]]:
    """Returns the mean loss over the targets with mask 1, and what it is made of.

    Args:
      logits_NxV: float32.
      target_N: int32 in [0, V).
      mask_N: float32, 1 where the target counts. With no target that counts, all results are 0.
      z_loss: weight of the mean squared log-partition (arXiv 2204.02311, section 5).

    Returns:
      The loss, and a dict of float32 scalars: `ce` in nats per token, `accuracy` (share of
      targets with the highest logit; a tie counts), `tokens` (sum of the mask).
    """
    top_N = jax.lax.stop_gradient(jnp.max(logits_NxV, axis=-1))
    partition_N = top_N + jnp.log(jnp.sum(jnp.exp(logits_NxV - top_N[:, None]), axis=-1))
    # A masked sum instead of a gather: it fuses, and it stays local when V is sharded.
    is_target_NxV = jnp.arange(logits_NxV.shape[1])[None, :] == target_N[:, None]
    chosen_N = jnp.sum(jnp.where(is_target_NxV, logits_NxV, 0.0), axis=-1)

    tokens = jnp.sum(mask_N)
    weight_N = mask_N / jnp.maximum(tokens, 1.0)
    ce = jnp.sum(weight_N * (partition_N - chosen_N))
    loss = ce
    if z_loss:
        loss = ce + z_loss * jnp.sum(weight_N * partition_N**2)
    accuracy = jnp.sum(jnp.where(chosen_N >= top_N, weight_N, 0.0))
    return loss, {"ce": ce, "accuracy": accuracy, "tokens": tokens}
