"""Cross-entropy over the targets that count, plus z-loss, from logits that are read once each way.

`masked_cross_entropy` is the loss. `scores` and `weighted_loss` are its two halves, for a
vocabulary that is cut over devices; `scores_in_tiles` needs the logits of a part of the tokens at a
time.

Shape suffixes: N tokens, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def masked_cross_entropy(
    scores: Scores, mask_N: Array, z_loss: float
) -> tuple[Array, dict[str, Array]]:
    """Returns the mean loss over the targets with mask 1, and its parts.

    Args:
      scores: of the logits; see the function `scores`.
      mask_N: float32, 1 where the target counts. With no target that counts, all results are 0.
      z_loss: weight of the mean squared log-partition (arXiv 2204.02311, section 5).

    Returns:
      The loss, and a dict of float32 scalars: `ce` in nats per token, `accuracy` (share of targets
      with the highest logit), `tokens` (sum of the mask). A tie counts as right; bfloat16 logits
      have more ties.
    """
    tokens = jnp.sum(mask_N)
    loss, aux = weighted_loss(scores, mask_N / jnp.maximum(tokens, 1.0), z_loss)
    return loss, {**aux, "tokens": tokens}


def weighted_loss(scores: Scores, weight_N: Array, z_loss: float) -> tuple[Array, dict[str, Array]]:
    """Returns the loss summed with these weights, and its `ce` and `accuracy`."""
    ce = jnp.sum(weight_N * (scores.partition_N - scores.chosen_N))
    loss = ce
    if z_loss:
        loss = ce + z_loss * jnp.sum(weight_N * scores.partition_N**2)
    accuracy = jnp.sum(jnp.where(scores.chosen_N >= scores.top_N, weight_N, 0.0))
    return loss, {"ce": ce, "accuracy": accuracy}


class Scores(NamedTuple):
    """Parts of the logits that a loss needs, float32 `[N]`: highest, log-partition, target's."""

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
      logits_NxV: float32 or bfloat16, of the V tokens from `first` on; the arithmetic is float32.
      target_N: int32, numbers in the whole vocabulary.
      total, largest: sum and maximum of `[N]` over the devices that hold the other parts.
    """
    own_top_N, sums_N, chosen_N = _reduced(logits_NxV, target_N - first)
    own_top_N = jax.lax.stop_gradient(own_top_N)
    top_N = largest(own_top_N)
    sums_N = total(sums_N * jnp.exp(own_top_N - top_N))
    return Scores(top_N, top_N + jnp.log(sums_N), total(chosen_N))


def scores_in_tiles(
    logits_of: Callable[[Array], Array], hidden_NxD: Array, target_N: Array, tiles: int
) -> Scores:
    """`scores` of `logits_of(hidden)`, with the logits of one part of the tokens at a time.

    The backward pass computes the logits again: one product more, for less memory.

    Args:
      tiles: number of parts; the largest that divides both it and N is used. Tokens are dealt out
        in turn, so that each part lies over `fsdp` as the batch does.
    """
    tiles = math.gcd(tiles, len(target_N))
    if tiles == 1:
        return scores(logits_of(hidden_NxD), target_N)

    @jax.checkpoint
    def part(given):
        hidden, target = given
        return scores(logits_of(hidden), target)

    def dealt(x):
        return x.reshape(-1, tiles, *x.shape[1:]).swapaxes(0, 1)

    parts = jax.lax.map(part, (dealt(hidden_NxD), dealt(target_N)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1), parts)


# -- one pass over the logits ------------------------------------------------------------------


@jax.custom_vjp
def _reduced(logits_NxV: Array, column_N: Array) -> tuple[Array, Array, Array]:
    """float32 `[N]`: highest logit, sum of exp(logit - highest), logit in the column (0 = none).

    The backward pass reads the logits once and writes their gradient, in their dtype. No gradient
    flows to the highest.
    """
    passes = jax.lax.platform_dependent
    return passes(logits_NxV, column_N, cuda=in_one_pass, default=in_passes)


def in_passes(logits_NxV: Array, column_N: Array) -> tuple[Array, Array, Array]:
    """`_reduced` as three reductions, each over all logits."""
    wide_NxV = logits_NxV.astype(jnp.float32)
    top_N = jnp.max(wide_NxV, axis=-1)
    sums_N = jnp.sum(jnp.exp(wide_NxV - top_N[:, None]), axis=-1)
    return top_N, sums_N, jnp.sum(_in_column(wide_NxV, column_N), axis=-1)


def in_one_pass(logits_NxV: Array, column_N: Array) -> tuple[Array, Array, Array]:
    """`_reduced` as one reduction over triples: a GPU then reads the logits once."""
    wide_NxV = logits_NxV.astype(jnp.float32)
    triples = wide_NxV, jnp.ones_like(wide_NxV), _in_column(wide_NxV, column_N)
    empty = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0), jnp.float32(0)

    def merge(a, b):
        # The sum that belongs to the lower top shrinks to the scale of the higher one.
        shrink = jnp.exp(-jnp.abs(a[0] - b[0]))
        sums = jnp.where(a[0] >= b[0], a[1] + b[1] * shrink, a[1] * shrink + b[1])
        return jnp.maximum(a[0], b[0]), sums, a[2] + b[2]

    return jax.lax.reduce(triples, empty, merge, (1,))


def _in_column(wide_NxV: Array, column_N: Array) -> Array:
    # A mask instead of a gather: it fuses, and it stays local when V is sharded.
    return jnp.where(jnp.arange(wide_NxV.shape[1])[None, :] == column_N[:, None], wide_NxV, 0.0)


def _reduced_forward(logits_NxV, column_N):
    top_N, sums_N, chosen_N = _reduced(logits_NxV, column_N)
    return (top_N, sums_N, chosen_N), (logits_NxV, column_N, top_N)


def _reduced_backward(kept, gradients):
    logits_NxV, column_N, top_N = kept
    _, to_sums_N, to_chosen_N = gradients
    shares_NxV = jnp.exp(logits_NxV.astype(jnp.float32) - top_N[:, None])
    to_chosen_NxV = _in_column(jnp.broadcast_to(to_chosen_N[:, None], shares_NxV.shape), column_N)
    return (to_sums_N[:, None] * shares_NxV + to_chosen_NxV).astype(logits_NxV.dtype), None


_reduced.defvjp(_reduced_forward, _reduced_backward)
