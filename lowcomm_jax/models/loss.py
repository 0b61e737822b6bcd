"""Measures next-token predictions: cross-entropy over the targets that count, plus z-loss.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Scores(NamedTuple):
    """What a loss needs of the logits, float32 `[N]`: highest, log-partition, the target's."""

    top_N: Array
    partition_N: Array
    chosen_N: Array


def _as_is(x: Array) -> Array:
    return x


def scores(
    logits_NxV: Array,
    target_N: Array,
    first: Array | int = 0,
    total: Callable[[Array], Array] = _as_is,
    largest: Callable[[Array], Array] = _as_is,
) -> Scores:
    """Reduces logits, of the whole vocabulary or of one device's part of it.

    Args:
      logits_NxV: float32, of the V tokens from `first` on.
      target_N: int32, numbers in the whole vocabulary.
      total, largest: sum and maximum of `[N]` over the devices that hold the other parts.
    """
    top_N = largest(jax.lax.stop_gradient(jnp.max(logits_NxV, axis=-1)))
    sums_N = total(jnp.sum(jnp.exp(logits_NxV - top_N[:, None]), axis=-1))
    # A masked sum instead of a gather: it fuses, and it stays local when V is sharded.
    is_target_NxV = first + jnp.arange(logits_NxV.shape[1])[None, :] == target_N[:, None]
    chosen_N = total(jnp.sum(jnp.where(is_target_NxV, logits_NxV, 0.0), axis=-1))
    return Scores(top_N, top_N + jnp.log(sums_N), chosen_N)


def weighted_loss(found: Scores, weight_N: Array, z_loss: float) -> tuple[Array, dict[str, Array]]:
    """Returns the loss summed with these weights, and its `ce` and `accuracy`."""
    ce = jnp.sum(weight_N * (found.partition_N - found.chosen_N))
    loss = ce
    if z_loss:
        loss = ce + z_loss * jnp.sum(weight_N * found.partition_N**2)
    accuracy = jnp.sum(jnp.where(found.chosen_N >= found.top_N, weight_N, 0.0))
    return loss, {"ce": ce, "accuracy": accuracy}


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
    tokens = jnp.sum(mask_N)
    weight_N = mask_N / jnp.maximum(tokens, 1.0)
    loss, aux = weighted_loss(scores(logits_NxV, target_N), weight_N, z_loss)
    return loss, {**aux, "tokens": tokens}
