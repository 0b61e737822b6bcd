"""Turns a configuration into pure functions over a nested dict of parameters.

`build` makes a `Model`: initial parameters, logits, loss, shardings. `generate` continues a prompt
token by token, with a cache of keys and values. `masked_cross_entropy` is the loss over the targets
that count, plus z-loss; `scores` and `weighted_loss` are its two halves, for a vocabulary that is
cut over devices.

Shape suffixes: N tokens, V vocabulary, P prompt, L generated tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from lowcomm_jax.models import sharding
from lowcomm_jax.models.attention import kernel_for
from lowcomm_jax.models.config import TransformerConfig, flops_per_token, param_count
from lowcomm_jax.models.transformer import Transformer

Params = dict[Any, Any]  # nested; leaves are float32 arrays


@dataclasses.dataclass(frozen=True)
class Model:
    """Offers a transformer as pure functions; make one with `build`.

    `params` are a nested dict of float32 arrays. Paths: `embedding/table`, `final_norm/scale`,
    `head/kernel` (untied), and per layer `blocks/<i>/attention/query/kernel` ... (unrolled) or
    `blocks/attention/query/kernel` ... with a leading layer axis (scan).
    """

    config: TransformerConfig
    graph: nnx.GraphDef[Transformer] = dataclasses.field(compare=False, repr=False)

    @property
    def param_count(self) -> int:
        """Number of parameters; see `config.param_count`."""
        return param_count(self.config)

    def flops_per_token(self, seq_len: int) -> float:
        """Training arithmetic per token; see `config.flops_per_token` for the formula."""
        return flops_per_token(self.config, seq_len)

    def init(self, rng: Array) -> Params:
        """Draws the initial parameters; works under `jit` and `eval_shape`."""
        module = Transformer(self.config, rngs=nnx.Rngs(params=rng))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def logits(self, params: Params, tokens: Array) -> Array:
        """Returns [B, T, V] float32 for int32 `tokens` [B, T]: the scores of the next token."""
        return self.bind(params)(tokens).reshape(*tokens.shape, self.config.vocab_size)

    def loss_fn(
        self, params: Params, batch: Mapping[str, Array], rng: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the mean loss over the targets that count, and an aux dict of scalars.

        Args:
          params: as `init` returns them.
          batch: `tokens` int32 [B, T + 1]; optionally `mask` float32 [B, T], 1 where the target
            (the token after the position) counts.
          rng: unused, the model is deterministic.

        Returns:
          `(loss, aux)`: loss = ce + z_loss * mean(log-partition squared), float32; aux as in
          `masked_cross_entropy`: `ce`, `accuracy`, `tokens`.
        """
        del rng
        tokens = batch["tokens"]
        target_N = tokens[:, 1:].reshape(-1)
        mask = batch.get("mask")
        mask_N = jnp.ones(target_N.shape, jnp.float32) if mask is None else mask.reshape(-1)
        logits_NxV = self.bind(params)(tokens[:, :-1])
        return masked_cross_entropy(logits_NxV, target_N, mask_N, self.config.z_loss)

    def specs(self, params: Params, axis_sizes: Mapping[str, int] | None = None) -> Params:
        """Returns a PartitionSpec per leaf; see `sharding.parameter_specs`."""
        return sharding.parameter_specs(params, axis_sizes)

    def generate(
        self,
        params: Params,
        prompt_tokens: Array,
        length: int,
        rng: Array,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Array:
        """Continues `prompt_tokens` by `length` tokens; see the function `generate`."""
        return generate(self, params, prompt_tokens, length, rng, temperature, top_k)

    def bind(self, params: Params) -> Transformer:
        """Returns the NNX module with `params` in it."""
        return nnx.merge(self.graph, params)


def build(config: TransformerConfig, device: jax.Device | None = None) -> Model:
    """Builds the model of `config`, with "auto" resolved for a device.

    Args:
      device: that the model will run on, present or not (`aot.Target.devices`); default: the first
        device of the default backend.
    """
    device = device or jax.local_devices()[0]
    if config.layer_loop == "auto":
        loop = "unrolled" if device.platform == "cpu" else "scan"
        config = dataclasses.replace(config, layer_loop=loop)
    if config.attention == "auto":
        config = dataclasses.replace(config, attention=kernel_for(config, device))
    shapes = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0)))
    return Model(config=config, graph=nnx.graphdef(shapes))


# -- loss --------------------------------------------------------------------------------------


def masked_cross_entropy(
    logits_NxV: Array, target_N: Array, mask_N: Array, z_loss: float
) -> tuple[Array, dict[str, Array]]:
    """Returns the mean loss over the targets with mask 1, and its parts.

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


def weighted_loss(found: Scores, weight_N: Array, z_loss: float) -> tuple[Array, dict[str, Array]]:
    """Returns the loss summed with these weights, and its `ce` and `accuracy`."""
    ce = jnp.sum(weight_N * (found.partition_N - found.chosen_N))
    loss = ce
    if z_loss:
        loss = ce + z_loss * jnp.sum(weight_N * found.partition_N**2)
    accuracy = jnp.sum(jnp.where(found.chosen_N >= found.top_N, weight_N, 0.0))
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


# -- generation --------------------------------------------------------------------------------


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
      int32 [P + length]: the prompt and the sampled tokens.

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
    elif not isinstance(prompt_P, jax.core.Tracer):
        unknown = [t for t in np.asarray(prompt_P).tolist() if not 0 <= t < model.config.vocab_size]
        if unknown:
            problems.append(
                f"prompt has the tokens {unknown[:4]}: the vocabulary is 0 to "
                f"{model.config.vocab_size - 1}"
            )
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
