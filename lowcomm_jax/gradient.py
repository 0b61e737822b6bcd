"""Inner steps of methods that exchange gradients at every step (`signal="gradient"`: DDP, DeMo).

The reduced gradient plays the part of the mean pseudo-gradient, the inner optimizer that of the
outer rule, and every region adopts the result: the only inner programs that communicate across
regions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.inner import InnerStep, empty_log, squeeze
from lowcomm_jax.rounds import Rounds, select
from lowcomm_jax.state import Inner


def make_gradient_program(step: InnerStep, rounds: Rounds):
    """Build the program of the gradient-exchanging steps, not yet jitted.

    Returns:
      `block(carry, frozen, batches, region_ids, takes_part, n, single)` over a carry (inner,
      anchor, outer state, codec state), with batch leaves `[R, S, b, ...]` and `takes_part` bool
      `[R, S]`; it runs the first n (traced) steps and returns (carry, metrics `[R, S]`, or `[R]`
      with the static `single`).
    """

    def region_gradients(inner, frozen, batch, region):
        rng = step.rng(region, inner.step)
        grads, buffers, metrics = step.gradients(inner.params, inner.buffers, frozen, batch, rng)
        metrics["grad_norm"] = optax.tree.norm(grads).astype(jnp.float32)
        return grads, buffers, metrics

    gradients = rounds.regions.lift(region_gradients, (0, None, 0, 0))

    def one(carry, frozen, batch, region_ids, takes_part):
        inner, anchor, outer, codec_state = carry
        grads, buffers, metrics = gradients(inner, frozen, batch, region_ids)
        grads = {k: g.astype(jnp.float32) for k, g in grads.items()}
        sent = rounds.encode(grads, codec_state, takes_part, jnp.ones_like(metrics["loss"]))
        anchor, outer, moved = rounds.step_optimizer(step, anchor, outer, sent)
        params = {
            k: jnp.broadcast_to(anchor[k], x.shape).astype(x.dtype) for k, x in inner.params.items()
        }
        inner = Inner(
            params=select(takes_part, params, inner.params),
            buffers=buffers,
            opt=inner.opt,
            step=inner.step + 1,
            tokens=inner.tokens + metrics["tokens"],
        )
        metrics = {**metrics, **moved, "left_out": sent["left_out"]}
        return (inner, anchor, outer, sent["codec_state"]), metrics

    def block(carry, frozen, batches, region_ids, takes_part, n, single=False):
        first = jax.tree.map(lambda x: x[:, 0], batches)
        shapes = jax.eval_shape(one, carry, frozen, first, region_ids, takes_part[:, 0])[1]
        log = empty_log(shapes, takes_part.shape[1])

        def body(i, loop):
            carry, log = loop
            batch = jax.tree.map(lambda x: x[:, i], batches)
            carry, new = one(carry, frozen, batch, region_ids, takes_part[:, i])
            return carry, jax.tree.map(lambda buffer, v: buffer.at[:, i].set(v), log, new)

        carry, log = jax.lax.fori_loop(0, n, body, (carry, log))
        return carry, squeeze(log) if single else log

    return block
