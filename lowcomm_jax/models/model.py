"""Turns a configuration into pure functions over a nested dict of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lowcomm_jax.models import counting, generate, sharding
from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.loss import masked_cross_entropy
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
    graph: nnx.GraphDef = dataclasses.field(compare=False, repr=False)

    @property
    def param_count(self) -> int:
        """Number of parameters; see `counting.param_count`."""
        return counting.param_count(self.config)

    def flops_per_token(self, seq_len: int) -> float:
        """Training arithmetic per token; see `counting.flops_per_token` for the formula."""
        return counting.flops_per_token(self.config, seq_len)

    def init(self, rng: Array) -> Params:
        """Draws the initial parameters; works under `jit` and `eval_shape`."""
        module = Transformer(self.config, rngs=nnx.Rngs(params=rng))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def logits(self, params: Params, tokens: Array) -> Array:
        """Returns [B, T, V] float32 for int32 `tokens` [B, T]: the scores of the next token."""
        return self.bind(params)(tokens).reshape(*tokens.shape, self.config.vocab_size)

    def loss_fn(self, params: Params, batch: Mapping[str, Array], rng: Array):
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

    def specs(self, params: Params, axis_sizes: Mapping[str, int] | None = None):
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
        """Continues `prompt_tokens` by `length` tokens; see `generate.generate`."""
        return generate.generate(self, params, prompt_tokens, length, rng, temperature, top_k)

    def bind(self, params: Params) -> Transformer:
        """Returns the NNX module with `params` in it."""
        return nnx.merge(self.graph, params)


def build(config: TransformerConfig) -> Model:
    """Builds the model of `config`, resolving `layer_loop="auto"` for the default backend."""
    if config.layer_loop == "auto":
        loop = "unrolled" if jax.default_backend() == "cpu" else "scan"
        config = dataclasses.replace(config, layer_loop=loop)
    shapes = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0)))
    return Model(config=config, graph=nnx.graphdef(shapes))
