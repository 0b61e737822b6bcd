"""What the inner learning rate did while a payload travelled: its mean, and the decay it caused."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class Flight(NamedTuple):
    """Learning rate and weight decay over the inner steps of one flight, fp32 scalars.

    mean_rate: mean inner learning rate; that of the last step before the landing if none was made.
    decayed: 1 - product over the flight of (1 - rate * weight_decay), a tree like the weight decay;
      0 if no step was made.
    """

    mean_rate: jax.Array
    decayed: PyTree


def over_flight(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: PyTree,
    staleness: jax.Array,
    step: jax.Array | None,
) -> Flight:
    """Accumulate the inner schedule over the last ``staleness`` inner steps.

    Args:
      learning_rate: inner learning rate; a schedule takes the count that Optax gives it, which is
        0 at the first inner step.
      weight_decay: tree of scalars.
      staleness: int32 scalar, inner steps of the flight; may be traced.
      step: int32 scalar, inner steps done at the landing; only a schedule needs it.

    Raises:
      ValueError: the learning rate is a schedule and ``step`` is missing.
    """
    if callable(learning_rate) and step is None:
        raise ValueError(
            "the inner learning rate is a schedule: pass step=, the inner steps done at the landing"
        )
    if callable(learning_rate):
        end = jnp.asarray(step, jnp.int32)
        mean_rate, log_kept = _along_schedule(learning_rate, weight_decay, staleness, end)
    else:
        mean_rate, steps = jnp.asarray(learning_rate, jnp.float32), staleness.astype(jnp.float32)
        log_kept = jax.tree.map(lambda wd: steps * jnp.log1p(-mean_rate * wd), weight_decay)
    return Flight(mean_rate, jax.tree.map(lambda x: -jnp.expm1(x), log_kept))


def _along_schedule(schedule, weight_decay: PyTree, staleness: jax.Array, end: jax.Array):
    """Mean rate and sum of log(1 - rate * weight_decay) over the counts [end - staleness, end)."""
    steps = jnp.maximum(staleness, 1)

    def advance(count, carry):
        total, log_kept = carry
        rate = jnp.asarray(schedule(count), jnp.float32)
        # A product of factors this close to 1 would lose the decay to rounding; logarithms keep it.
        longer = jax.tree.map(lambda x, wd: x + jnp.log1p(-rate * wd), log_kept, weight_decay)
        return total + rate, longer

    start = (jnp.zeros((), jnp.float32), jax.tree.map(lambda _: jnp.float32(0.0), weight_decay))
    total, log_kept = jax.lax.fori_loop(end - steps, end, advance, start)
    log_kept = jax.tree.map(lambda x: jnp.where(staleness > 0, x, 0.0), log_kept)
    return total / steps.astype(jnp.float32), log_kept
