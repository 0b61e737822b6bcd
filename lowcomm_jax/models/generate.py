"""Continues a prompt token by token, with a cache of keys and values.

Shape suffixes: P prompt, L generated tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from lowcomm_jax.models.model import Model


def generate(
    model: Model,
    params: Any,
    prompt_P: Array,
    length: int,
    rng: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Array:
    """Samples `length` tokens after the prompt; compiled once per prompt length and `length`.

    Args:
      model: the model that `params` belong to.
      params: parameters as `Model.init` returns them.
      prompt_P: int32 [P], at least one token.
      length: tokens to add.
      rng: key of the draws.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw among the `top_k` most likely tokens only; None draws among all.

    Returns:
      int32 [P + length]: the prompt and what follows it.

    Raises:
      ValueError: lists every argument out of range, with its fix.
    """
    _check(model, prompt_P, length, temperature, top_k)
    prompt_P = jnp.asarray(prompt_P, jnp.int32)
    return _generate(model, params, prompt_P, length, rng, jnp.float32(temperature), top_k)


def sample(logits_V: Array, rng: Array, temperature: Array, top_k: int | None) -> Array:
    """Draws one token from the tempered, truncated distribution; int32 scalar."""
    if top_k is not None and top_k < logits_V.shape[0]:
        # The k-th largest is the threshold; tokens tied with it stay in.
        threshold = jax.lax.top_k(logits_V, top_k)[0][-1]
        logits_V = jnp.where(logits_V < threshold, -jnp.inf, logits_V)
    drawn = jax.random.categorical(rng, logits_V / jnp.where(temperature > 0, temperature, 1.0))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 3, 6))
def _generate(model, params, prompt_P, length, rng, temperature, top_k):
    module = model.bind(params)
    prompt_length = prompt_P.shape[0]
    caches = module.empty_caches(batch=1, length=prompt_length + length)
    logits_PxV, caches = module.extend(prompt_P[None], caches, jnp.int32(0))

    def step(carry, rng_and_position):
        logits_V, caches = carry
        rng, position = rng_and_position
        token = sample(logits_V, rng, temperature, top_k)
        logits_1xV, caches = model.bind(params).extend(token[None, None], caches, position)
        return (logits_1xV[0], caches), token

    steps = (jax.random.split(rng, length), prompt_length + jnp.arange(length))
    _, tokens_L = jax.lax.scan(step, (logits_PxV[-1], caches), steps)
    return jnp.concatenate([prompt_P, tokens_L])


def _check(model, prompt_P, length, temperature, top_k) -> None:
    problems = []
    if jnp.ndim(prompt_P) != 1 or jnp.size(prompt_P) == 0:
        problems.append(f"prompt has shape {jnp.shape(prompt_P)}: give at least one token, [P]")
    if length < 1:
        problems.append(f"length={length}: give a whole number of at least 1")
    total, longest = jnp.size(prompt_P) + max(length, 0), model.config.max_seq_len
    if total > longest:
        problems.append(
            f"prompt and length make {total} tokens: the model is meant for {longest} "
            "(max_seq_len); shorten one of them"
        )
    if not temperature >= 0:
        problems.append(f"temperature={temperature}: give 0 (greedy) or a positive number")
    if top_k is not None and top_k < 1:
        problems.append(f"top_k={top_k}: give None (all) or a whole number of at least 1")
    if problems:
        raise ValueError("generate:\n" + "\n".join(f"  - {p}" for p in problems))
