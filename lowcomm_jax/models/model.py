"""Turns a configuration into pure functions over a nested dict of parameters.

`build` makes a `Model`: initial parameters, logits, loss, shardings. `Model.generate` continues a
prompt token by token, with a cache of keys and values.

Shape suffixes: N tokens, V vocabulary, P prompt, L generated tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from lowcomm_jax.compat import is_gpu
from lowcomm_jax.models import sharding
from lowcomm_jax.models.attention import kernel_for
from lowcomm_jax.models.config import TransformerConfig, ways
from lowcomm_jax.models.loss import masked_cross_entropy, scores_in_tiles
from lowcomm_jax.models.transformer import Transformer
from lowcomm_jax.refused import refuse

Params = dict[Any, Any]  # nested; leaves are float32 arrays


@dataclasses.dataclass(frozen=True)
class Model:
    """Offers a transformer as pure functions (`protocol.Trainable`); make one with `build`.

    `params` are a nested dict of float32 arrays. Paths: `embedding/table`, `final_norm/scale`,
    `head/kernel` (untied), and per layer `blocks/<i>/attention/query/kernel` ... (unrolled) or
    `blocks/attention/query/kernel` ... with a leading layer axis (scan).

    Attributes:
      config: with nothing left "auto".
      graph: the NNX module without its parameters.
      leaves: shapes of the parameters, with the names of their axes.
    """

    config: TransformerConfig
    graph: nnx.GraphDef[Transformer] = dataclasses.field(compare=False, repr=False)
    leaves: nnx.State[Any, Any] = dataclasses.field(compare=False, repr=False)

    @property
    def axes(self) -> Params:
        """Names of the axes of each parameter, without a leading layer axis; a tree of tuples."""
        return nnx.to_pure_dict(self.leaves, lambda leaf: leaf.axes)

    @property
    def stacked(self) -> tuple[str, ...]:
        """Path prefixes of leaves with a leading layer axis."""
        return ("blocks",) if self.config.layer_loop == "scan" else ()

    def flops_per_token(self, seq_len: int) -> float:
        """Counts the floating-point operations of one training step per token.

        `6 N + 6 layers heads head_dim seq_len`. The first term is a multiply and an add per weight
        in the forward pass and twice that backward. N counts the weights of matrix products: blocks
        and output layer, without the embedding look-up. The second term is the two products of
        attention, where a causal token attends to seq_len / 2 others on average. Recomputation
        (remat) is not counted.
        """
        config = self.config
        leaves = (leaf for _, leaf in nnx.to_flat_state(self.leaves))
        weights = sum(math.prod(leaf.shape) for leaf in leaves if any(leaf.axes))
        if not config.tie_embeddings:
            weights -= config.vocab_size * config.width
        attention = 6 * config.layers * config.heads * config.head_dim * seq_len
        return float(6 * weights + attention)

    @functools.partial(jax.jit, static_argnums=0)  # a start asks for its shapes eight times
    def init(self, rng: Array) -> Params:
        """Draws the initial parameters; works under `jit` and `eval_shape`."""
        module = Transformer(self.config, rngs=nnx.Rngs(params=rng))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def logits(self, params: Params, tokens: Array) -> Array:
        """Returns [B, T, V] float32 for int32 `tokens` [B, T]: the scores of the next token."""
        logits = self.bind(params)(tokens).astype(jnp.float32)
        return logits.reshape(*tokens.shape, self.config.vocab_size)

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
        module = self.bind(params)
        hidden_NxD = module.hidden(tokens[:, :-1])
        found = scores_in_tiles(module.leave, hidden_NxD, target_N, self.config.loss_tiles)
        return masked_cross_entropy(found, mask_N, self.config.z_loss)

    def specs(self, params: Params, axis_sizes: Mapping[str, int]) -> Params:
        """Returns a PartitionSpec per leaf; see `sharding.parameter_specs`."""
        return sharding.parameter_specs(params, self.axes, axis_sizes)

    def generate(
        self,
        params: Params,
        prompt_P: Array,
        length: int,
        rng: Array,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Array:
        """Samples `length` tokens after the prompt; compiled once per prompt length and `length`.

        Args:
          params: as `init` returns them.
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
        _check(self, prompt_P, length, temperature, top_k)
        prompt_P = jnp.asarray(prompt_P, jnp.int32)
        return _generate(self, params, prompt_P, length, rng, jnp.float32(temperature), top_k)

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
    if config.remat == "auto":
        config = ways(config)[0]
    if config.unroll is None:
        unroll = is_gpu(device) and config.remat != "full"
        config = dataclasses.replace(config, unroll=unroll)
    if config.attention == "auto":
        config = dataclasses.replace(config, attention=kernel_for(config, device))
    return _built(config)


@functools.lru_cache(maxsize=8)  # a start builds the same one several times
def _built(config: TransformerConfig) -> Model:
    graph, leaves = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0))))
    return Model(config, graph, leaves)


# -- generation --------------------------------------------------------------------------------


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
    refuse("generate", problems)
