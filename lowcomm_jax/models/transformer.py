"""The decoder-only transformer in Flax NNX: table, blocks, final norm, output layer.

Activations are [N, D] with N = batch * time. On CPU a plain matrix product is about twice as fast
as one with a batch axis, and elsewhere as fast. Weights are [in, out].

Shape suffixes: B batch, T time, N = B * T, D width, V vocabulary, S cache length. I and O are
inputs and outputs of a projection, H query heads, K key heads, E head width, F MLP width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from lowcomm_jax.models.attention import (
    cudnn_attention,
    masked_attention,
    rope_tables,
    rotate,
    splash_attention,
    wide_einsum,
)
from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.train.batch_sharding import (
    FSDP,
    TENSOR,
    automatic_axes,
    shard_batch,
    summed_over_batch,
)

_ATTENTION = {
    "xla": masked_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}


class Context(NamedTuple):
    """Values that all blocks of one forward pass share."""

    batch: int  # sequences folded into the token axis
    rope: tuple[Array, Array]  # cosines and sines [T, E / 2], float32


class Cache(NamedTuple):
    """The keys and values of one layer for the tokens so far, in the compute dtype."""

    key_BxKxSxE: Array
    value_BxKxSxE: Array


class Transformer(nnx.Module):
    """A decoder-only transformer; `config.layer_loop` and `.attention` must be resolved.

    With "unrolled", `blocks` is a list of blocks; with "scan" it is one block whose parameters
    carry a leading layer axis. Both start from the same values for the same key.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs=rngs)
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        if not config.tie_embeddings:
            self.head = Projection(config.width, config.vocab_size, config.init_std, rngs=rngs)
        self.blocks = _make_blocks(config, rngs.params())

    def __call__(self, tokens_BxT: Array) -> Array:
        """Returns the logits [B * T, V], float32, of the token after each position."""
        x_NxD, context = self._enter(tokens_BxT, jnp.arange(tokens_BxT.shape[1]))
        return self.leave(self.through(x_NxD, context))

    def through(self, x_NxD: Array, context: Context, real_L: Array | None = None) -> Array:
        """Sends activations through the blocks.

        Args:
          real_L: bool, with "scan" only: blocks that are not real (padding) return their input.
        """
        layer = _rematerialised(lambda block, x: block(x, context), policy=self.config.remat)
        if self.config.layer_loop == "unrolled":
            for block in self.blocks:
                x_NxD = layer(*nnx.split(block), x_NxD)
            return x_NxD
        graph, stacked = nnx.split(self.blocks)

        def step(x, state_and_real):
            state, real = state_and_real
            y = layer(graph, state, x)
            return (y if real is None else jnp.where(real, y, x)), None

        return jax.lax.scan(step, x_NxD, (stacked, real_L))[0]

    def extend(self, tokens_BxT: Array, caches: Any, start: Array) -> tuple[Array, Any]:
        """Returns logits [B * T, V] of T new positions at `start`, and the caches with them in."""
        positions_T = start + jnp.arange(tokens_BxT.shape[1])
        x_NxD, context = self._enter(tokens_BxT, positions_T)
        if self.config.layer_loop == "scan":
            graph, stacked = nnx.split(self.blocks)

            def step(x, state_and_cache):
                state, cache = state_and_cache
                return nnx.merge(graph, state).extend(x, context, cache, start)

            x_NxD, caches = jax.lax.scan(step, x_NxD, (stacked, caches))
        else:
            advanced = []
            for block, cache in zip(self.blocks, caches, strict=True):
                x_NxD, cache = block.extend(x_NxD, context, cache, start)
                advanced.append(cache)
            caches = tuple(advanced)
        return self.leave(x_NxD), caches

    def empty_caches(self, batch: int, length: int) -> Any:
        """Returns zeroed caches of `length` positions for every layer."""
        c = self.config
        zeros = jnp.zeros((batch, c.kv_heads, length, c.head_dim), c.compute_dtype)
        if c.layer_loop == "scan":
            stacked = jnp.broadcast_to(zeros[None], (c.layers, *zeros.shape))
            return Cache(stacked, stacked)
        return tuple(Cache(zeros, zeros) for _ in range(c.layers))

    def _enter(self, tokens_BxT: Array, positions_T: Array) -> tuple[Array, Context]:
        token_N = shard_batch(tokens_BxT.reshape(-1))
        x_NxD = shard_batch(self.embedding(token_N, jnp.dtype(self.config.compute_dtype)))
        return x_NxD, self.context(tokens_BxT.shape[0], positions_T)

    def context(self, batch: int, positions_T: Array) -> Context:
        """The `Context` of a pass over `batch` sequences at these positions."""
        rope = rope_tables(positions_T, self.config.head_dim, self.config.rope_theta)
        return Context(batch=batch, rope=rope)

    def leave(self, x_NxD: Array) -> Array:
        """Turns the last block's activations into logits [N, V], float32."""
        x_NxD = shard_batch(self.final_norm(shard_batch(x_NxD)))
        if self.config.tie_embeddings:
            return shard_batch(self.embedding.attend(x_NxD), TENSOR)
        kernel_DxV = self.head.kernel[...].astype(x_NxD.dtype)
        return shard_batch(wide_einsum("nd,dv->nv", x_NxD, kernel_DxV), TENSOR)


def _make_blocks(config: TransformerConfig, key: Array):
    keys = jax.random.split(key, config.layers)
    if config.layer_loop == "unrolled":
        return nnx.List([Block(config, rngs=nnx.Rngs(params=k)) for k in keys])
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(params=0))))
    stacked = jax.vmap(lambda k: nnx.state(Block(config, rngs=nnx.Rngs(params=k))))(keys)
    return nnx.merge(graph, stacked)


def _rematerialised(apply: Callable[[Block, Array], Array], policy: str) -> Callable:
    """Turns `apply(block, x)` into `f(graph, state, x)` whose backward pass recomputes."""

    def layer(graph, state, x_NxD):
        def run(state, x_NxD):
            return apply(nnx.merge(graph, state), x_NxD)

        if policy == "full":
            run = jax.checkpoint(run)
        elif policy == "dots":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            run = jax.checkpoint(run, policy=saved)
        return run(state, x_NxD)

    return layer


# -- parts -------------------------------------------------------------------------------------


class Embedding(nnx.Module):
    """Looks tokens up in a table [V, D]; the same table may serve as the output layer."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        self.table = nnx.Param(config.init_std * jax.random.normal(rngs.params(), shape))

    def __call__(self, tokens_N: Array, dtype: jnp.dtype) -> Array:
        # A token outside the vocabulary gives NaN: a wrong tokenizer shows in the first loss.
        table = self.table[...]
        tokens_N = jnp.where(tokens_N < 0, table.shape[0], tokens_N)  # -1 would be the last row
        return _look_up(table, tokens_N, "fill").astype(dtype)

    def part(self, tokens_N: Array, first: Array) -> Array:
        """Looks up in a table of the tokens from `first` on; float32, 0 for all other tokens."""
        row_N = tokens_N - first
        here_N = (row_N >= 0) & (row_N < self.table.shape[0])
        rows_NxD = _look_up(self.table[...], row_N, "clip")
        return jnp.where(here_N[:, None], rows_NxD, 0.0)

    def attend(self, x_NxD: Array) -> Array:
        """Scores every token; float32 whatever the dtype of `x`."""
        return wide_einsum("nd,vd->nv", x_NxD, self.table[...].astype(x_NxD.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(table_VxD: Array, row_N: Array, mode: str) -> Array:
    """Rows [N, D] of a table that is gathered first; the gradient is summed on each device.

    Left to the compiler, the gradient brings all tokens' activations to every device. XLA also
    aborts the process on a gather from a sharded table where another axis is manual (jax 0.10.2).
    """
    return jnp.take(_whole(table_VxD), row_N, axis=0, mode=mode)


def _look_up_forward(table_VxD, row_N, mode):
    return _look_up(table_VxD, row_N, mode), (table_VxD, row_N)


def _look_up_backward(mode, kept, gradient_NxD):
    table_VxD, row_N = kept
    # As `sharding.parameter_specs` has the table: cut over the width, where that divides.
    cut = 1 if table_VxD.shape[1] % automatic_axes().get(FSDP, 1) == 0 else -1

    def part(row_N, gradient_NxD):
        # Rows that are not there: `take` gave NaN or another row, and `add` leaves them out.
        sums = jnp.zeros(table_VxD.shape, table_VxD.dtype)
        return sums.at[row_N].add(gradient_NxD.astype(sums.dtype), mode="drop")

    return summed_over_batch(part, cut, row_N, gradient_NxD), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _whole(x: Array) -> Array:
    """Replicates `x` over the axes inside a region."""
    several = any(size > 1 for size in automatic_axes().values())
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if several else x


class Block(nnx.Module):
    """One pre-norm decoder layer: attention, then the feed-forward part, both residual."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x_NxD: Array, context: Context) -> Array:
        x_NxD = shard_batch(x_NxD)
        x_NxD = x_NxD + self.attention(self.attention_norm(x_NxD), context)
        x_NxD = shard_batch(x_NxD)
        return shard_batch(x_NxD + self.mlp(self.mlp_norm(x_NxD)))

    def extend(
        self, x_NxD: Array, context: Context, cache: Cache, start: Array
    ) -> tuple[Array, Cache]:
        """Advances by T positions against a cache; see `Attention.extend`."""
        mixed, cache = self.attention.extend(self.attention_norm(x_NxD), context, cache, start)
        x_NxD = x_NxD + mixed
        return x_NxD + self.mlp(self.mlp_norm(x_NxD)), cache


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
        mixed = _ATTENTION[self.config.attention](q, k, v)
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


def _residual_std(config: TransformerConfig) -> float:
    # Two additions a layer: this keeps the residual stream's variance independent of depth.
    return config.init_std / (2 * config.layers) ** 0.5


def _write(old_BxKxSxE: Array, new_BxKxTxE: Array, start: Array) -> Array:
    new = new_BxKxTxE.astype(old_BxKxSxE.dtype)
    return jax.lax.dynamic_update_slice_in_dim(old_BxKxSxE, new, start, axis=2)
