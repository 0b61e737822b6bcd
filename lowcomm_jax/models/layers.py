"""Builds the parts of a decoder block as Flax NNX modules.

Activations are [N, D] with N = batch * time: on CPU a plain matrix product is about twice as fast
as one with a batch axis, and elsewhere it is the same. Weights are [in, out].
Shape suffixes: N tokens, D width, I / O inputs / outputs of a projection, B batch, T time, S cache
length, H query heads, K key heads, E head width, F MLP width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lowcomm_jax.models.attention import cudnn_attention, masked_attention, rotate
from lowcomm_jax.models.config import TransformerConfig


class Context(NamedTuple):
    """Carries what every block of one forward pass shares."""

    batch: int  # sequences folded into the token axis
    rope: tuple[Array, Array]  # cosines and sines [T, E / 2], float32


class Cache(NamedTuple):
    """Holds the keys and values of one layer seen so far, in the compute dtype."""

    key_BxKxSxE: Array
    value_BxKxSxE: Array


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis in float32, then scales."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return (wide * inverse * scale).astype(x.dtype)


class Projection(nnx.Module):
    """Multiplies by a matrix [in, out] held in float32, in the dtype of the activations."""

    def __init__(self, inputs: int, outputs: int, std: float, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, outputs)))

    def __call__(self, x_NxI: Array) -> Array:
        return x_NxI @ self.kernel[...].astype(x_NxI.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and optional QK-norm."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        self.query = Projection(c.width, c.heads * c.head_dim, c.init_std, rngs=rngs)
        self.key = Projection(c.width, c.kv_heads * c.head_dim, c.init_std, rngs=rngs)
        self.value = Projection(c.width, c.kv_heads * c.head_dim, c.init_std, rngs=rngs)
        self.output = Projection(c.heads * c.head_dim, c.width, _residual_std(c), rngs=rngs)
        if c.qk_norm:
            self.query_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.key_norm = RMSNorm(c.head_dim, c.norm_eps)

    def __call__(self, x_NxD: Array, context: Context) -> Array:
        q, k, v = self._project(x_NxD, context)
        attend = cudnn_attention if self.config.attention == "cudnn" else masked_attention
        mixed = attend(q, k, v)
        return self.output(mixed.reshape(x_NxD.shape[0], -1))

    def extend(
        self, x_NxD: Array, context: Context, cache: Cache, start: Array
    ) -> tuple[Array, Cache]:
        """Attends from T new positions at `start` to the cache, and adds them to it."""
        q, k, v = self._project(x_NxD, context)
        cache = Cache(*(_write(old, new, start) for old, new in zip(cache, (k, v), strict=True)))
        mixed = masked_attention(q, *cache, start)
        return self.output(mixed.reshape(x_NxD.shape[0], -1)), cache

    def _project(self, x_NxD: Array, context: Context) -> tuple[Array, Array, Array]:
        shape = (context.batch, x_NxD.shape[0] // context.batch, -1, self.config.head_dim)
        parts = (self.query, self.key, self.value)
        q, k, v = (part(x_NxD).reshape(shape).swapaxes(1, 2) for part in parts)
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate(q, context.rope), rotate(k, context.rope), v


class FeedForward(nnx.Module):
    """SwiGLU (arXiv 2002.05202), or a plain GELU layer."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.gated = c.mlp == "swiglu"
        if self.gated:
            self.gate = Projection(c.width, c.mlp_width, c.init_std, rngs=rngs)
        self.up = Projection(c.width, c.mlp_width, c.init_std, rngs=rngs)
        self.down = Projection(c.mlp_width, c.width, _residual_std(c), rngs=rngs)

    def __call__(self, x_NxD: Array) -> Array:
        if self.gated:
            return self.down(_gated(self.gate(x_NxD), self.up(x_NxD)))
        return self.down(jax.nn.gelu(self.up(x_NxD)))


# Recomputed in the backward pass: one fused loop over two inputs is cheaper than keeping more.
@jax.checkpoint
def _gated(gate_NxF: Array, up_NxF: Array) -> Array:
    return jax.nn.silu(gate_NxF) * up_NxF


class Block(nnx.Module):
    """One pre-norm decoder layer: attention, then the feed-forward part, both residual."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x_NxD: Array, context: Context) -> Array:
        x_NxD = x_NxD + self.attention(self.attention_norm(x_NxD), context)
        return x_NxD + self.mlp(self.mlp_norm(x_NxD))

    def extend(
        self, x_NxD: Array, context: Context, cache: Cache, start: Array
    ) -> tuple[Array, Cache]:
        """Advances by T positions against a cache; see `Attention.extend`."""
        mixed, cache = self.attention.extend(self.attention_norm(x_NxD), context, cache, start)
        x_NxD = x_NxD + mixed
        return x_NxD + self.mlp(self.mlp_norm(x_NxD)), cache


def _residual_std(config: TransformerConfig) -> float:
    # Two additions a layer: this keeps the residual stream's variance independent of depth.
    return config.init_std / (2 * config.layers) ** 0.5


def _write(old_BxKxSxE: Array, new_BxKxTxE: Array, start: Array) -> Array:
    new = new_BxKxTxE.astype(old_BxKxSxE.dtype)
    return jax.lax.dynamic_update_slice_in_dim(old_BxKxSxE, new, start, axis=2)
