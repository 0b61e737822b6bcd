"""What one pipeline stage computes, from within it; sums go over all stages.

Shape suffixes: N tokens of one microbatch, D width, C the stage's part of the vocabulary, L the
stage's blocks.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from lowcomm_jax import stages
from lowcomm_jax.models import loss as losses
from lowcomm_jax.models.model import Model, Params
from lowcomm_jax.models.pipeline_layout import StageLayout
from lowcomm_jax.models.transformer import Transformer

_HIDDEN = -1e30  # logit of a padding token: its share underflows to exactly 0, yet stays finite


@dataclasses.dataclass(frozen=True)
class StagePart:
    """One stage of a model."""

    model: Model
    layout: StageLayout

    @property
    def config(self):
        return self.model.config

    def bind(self, params: Params) -> Transformer:
        """The NNX module of this stage's part."""
        scale = params["final_norm"]["scale"]
        if scale.shape[0] < self.config.width:
            scale = stages.whole(scale)
        return self.model.bind({**params, "final_norm": {"scale": scale}})

    def enter(self, module: Transformer, token_N: Array) -> Array:
        """Embeddings [N, D], the same in all stages."""
        rows = stages.total(module.embedding.part(token_N, stages.index() * self.layout.rows))
        # A token outside the vocabulary gives NaN: a wrong tokenizer shows in the first loss.
        known = (token_N >= 0) & (token_N < self.config.vocab_size)
        return jnp.where(known[:, None], rows, jnp.nan).astype(self.config.compute_dtype)

    def through(self, module: Transformer, x_NxD: Array, batch: int, length: int) -> Array:
        """Sends `batch` sequences of this length through the stage's blocks."""
        layout, real_L = self.layout, None
        if layout.padded.layers > self.config.layers:
            block_L = stages.index() * layout.blocks + jnp.arange(layout.blocks)
            real_L = block_L < self.config.layers
        return module.through(x_NxD, module.context(batch, jnp.arange(length)), real_L)

    def logits(self, module: Transformer, hidden_NxD: Array) -> Array:
        """Logits of this stage's tokens, float32 [N, C], from the last stage's activations."""
        last = stages.index() == self.layout.stages - 1
        hidden = jnp.where(last, hidden_NxD, jnp.zeros_like(hidden_NxD))
        shared = stages.total(hidden).astype(hidden_NxD.dtype)
        logits_NxC = module.leave(shared)
        if self.layout.padded.vocab_size == self.config.vocab_size:
            return logits_NxC
        token_C = stages.index() * self.layout.rows + jnp.arange(self.layout.rows)
        return jnp.where((token_C < self.config.vocab_size)[None], logits_NxC, _HIDDEN)

    def loss(self, module: Transformer, hidden_NxD: Array, target_N: Array, weight_N: Array):
        """(loss, aux) of `losses.weighted_loss`, the same in all stages."""
        logits_NxC = self.logits(module, hidden_NxD)
        first = stages.index() * self.layout.rows
        reductions = {"total": stages.total, "largest": stages.largest}
        found = losses.scores(logits_NxC, target_N, first, **reductions)
        return losses.weighted_loss(found, weight_N, self.config.z_loss)
