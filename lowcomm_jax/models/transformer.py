"""The decoder-only transformer in Flax NNX: table, blocks, final norm, output layer.

Activations are [N, D] with N = batch * time. On CPU a plain matrix product is about twice as fast
as one with a batch axis, and elsewhere as fast. Weights are [in, out].

Every parameter is made with the names of its `axes`: "width", "heads", "hidden", "vocabulary", and
None in scales. Layouts follow from these (`sharding`, `pipeline.layout`).

Shape suffixes: B batch, T time, N = B * T, D width, V vocabulary, S cache length. I and O are
inputs and outputs of a projection, H query heads, K key heads, E head width, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lowcomm_jax.models.attention import (
    cudnn_attention,
    masked_attention,
    rope_tables,
    rotate,
    splash_attention,
)
from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.operations import (
    gated,
    gelu,
    look_up,
    products,
    rms_norm,
    rotated_norm,
    table_scores,
)
from lowcomm_jax.train.batch_sharding import TENSOR, shard_batch

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
            axes = ("width", "vocabulary")
            self.head = Projection(
                config.width, config.vocab_size, axes, config.init_std, rngs=rngs
            )
        self.blocks = _make_blocks(config, rngs.params())

    def __call__(self, tokens_BxT: Array) -> Array:
        """Returns the logits [B * T, V], compute dtype, of the token after each position."""
        return self.leave(self.hidden(tokens_BxT))

    def hidden(self, tokens_BxT: Array) -> Array:
        """Returns the last block's activations [B * T, D], of which `leave` makes logits."""
        x_NxD, context = self._enter(tokens_BxT, jnp.arange(tokens_BxT.shape[1]))
        return self.through(x_NxD, context)

    def through(self, x_NxD: Array, context: Context, real_L: Array | None = None) -> Array:
        """Sends activations through the blocks.

        Args:
          real_L: bool, with "scan" only: blocks that are not real (padding) return their input.
        """
        layer = _rematerialised(lambda block, x: block(x, context), self.config.remat == "full")
        if self.config.layer_loop == "unrolled":
            for block in self.blocks:
                x_NxD = layer(*nnx.split(block), x_NxD)
            return x_NxD
        graph, stacked = nnx.split(self.blocks)

        def step(x, state_and_real):
            state, real = state_and_real
            y = layer(graph, state, x)
            return (y if real is None else jnp.where(real, y, x)), None

        return jax.lax.scan(step, x_NxD, (stacked, real_L), unroll=self.config.unroll or 1)[0]

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
        return self.leave(x_NxD).astype(jnp.float32), caches

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
        """Turns the last block's activations into logits [N, V], compute dtype."""
        x_NxD = shard_batch(self.final_norm(shard_batch(x_NxD)))
        if self.config.tie_embeddings:
            return shard_batch(self.embedding.attend(x_NxD), TENSOR)
        kernel_DxV = self.head.matrix(x_NxD.dtype)
        return shard_batch(table_scores(x_NxD, kernel_DxV, "dv"), TENSOR)


def _make_blocks(config: TransformerConfig, key: Array):
    # In a loop over layers: XLA compiles the drawing of a leaf once, and not once a layer.
    keys = jax.random.split(key, config.layers)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(params=0))))
    stacked = jax.lax.map(lambda k: nnx.state(Block(config, rngs=nnx.Rngs(params=k))), keys)
    if config.layer_loop == "scan":
        return nnx.merge(graph, stacked)
    layers = (jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.layers))
    return nnx.List([nnx.merge(graph, layer) for layer in layers])


def _rematerialised(apply: Callable[[Block, Array], Array], whole: bool) -> Callable:
    """Turns `apply(block, x)` into `f(graph, state, x)`; `whole`: the backward pass repeats it."""

    def layer(graph, state, x_NxD):
        def run(state, x_NxD):
            return apply(nnx.merge(graph, state), x_NxD)

        return (jax.checkpoint(run) if whole else run)(state, x_NxD)

    return layer


# -- parts -------------------------------------------------------------------------------------


class Embedding(nnx.Module):
    """Looks tokens up in a table [V, D]; the same table may serve as the output layer."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        table = config.init_std * jax.random.normal(rngs.params(), shape)
        self.table = nnx.Param(table, axes=("vocabulary", "width"))

    def __call__(self, tokens_N: Array, dtype: jnp.dtype) -> Array:
        # A token outside the vocabulary gives NaN: a wrong tokenizer shows in the first loss.
        table = self.table[...]
        tokens_N = jnp.where(tokens_N < 0, table.shape[0], tokens_N)  # -1 would be the last row
        return look_up(table, tokens_N, "fill", dtype)

    def part(self, tokens_N: Array, first: Array) -> Array:
        """Looks up in a table of the tokens from `first` on; float32, 0 for all other tokens."""
        row_N = tokens_N - first
        here_N = (row_N >= 0) & (row_N < self.table.shape[0])
        rows_NxD = look_up(self.table[...], row_N, "clip", self.table.dtype)
        return jnp.where(here_N[:, None], rows_NxD, 0.0)

    def attend(self, x_NxD: Array) -> Array:
        """Scores every token, in the dtype of `x`."""
        return table_scores(x_NxD, self.table[...].astype(x_NxD.dtype), "vd")


class Block(nnx.Module):
    """One pre-norm decoder layer: attention, then the feed-forward part, both residual."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x_NxD: Array, context: Context) -> Array:
        x_NxD = shard_batch(x_NxD)
        x_NxD = x_NxD + self.attention(x_NxD, self.attention_norm, context)
        x_NxD = shard_batch(x_NxD)
        return shard_batch(x_NxD + self.mlp(x_NxD, self.mlp_norm))

    def extend(
        self, x_NxD: Array, context: Context, cache: Cache, start: Array
    ) -> tuple[Array, Cache]:
        """Advances by T positions against a cache; see `Attention.extend`."""
        mixed, cache = self.attention.extend(x_NxD, self.attention_norm, context, cache, start)
        x_NxD = x_NxD + mixed
        return x_NxD + self.mlp(x_NxD, self.mlp_norm), cache


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and optional QK-norm."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        into, out = ("width", "heads"), ("heads", "width")
        self.query = Projection(c.width, c.heads * c.head_dim, into, c.init_std, rngs=rngs)
        self.key = Projection(c.width, c.kv_heads * c.head_dim, into, c.init_std, rngs=rngs)
        self.value = Projection(c.width, c.kv_heads * c.head_dim, into, c.init_std, rngs=rngs)
        self.output = Projection(c.heads * c.head_dim, c.width, out, _residual_std(c), rngs=rngs)
        if c.qk_norm:
            self.query_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.key_norm = RMSNorm(c.head_dim, c.norm_eps)

    def __call__(self, x_NxD: Array, norm: RMSNorm, context: Context) -> Array:
        """Mixes the normalised `x`; `norm` is the block's."""
        q, k, v = self._project(x_NxD, norm, context)
        mixed = _ATTENTION[self.config.attention](q, k, v)
        return self.output(mixed.reshape(x_NxD.shape[0], -1))

    def extend(
        self, x_NxD: Array, norm: RMSNorm, context: Context, cache: Cache, start: Array
    ) -> tuple[Array, Cache]:
        """Attends from T new positions at `start` to the cache, and adds them to it."""
        q, k, v = self._project(x_NxD, norm, context)
        cache = Cache(*(_write(old, new, start) for old, new in zip(cache, (k, v), strict=True)))
        mixed = masked_attention(q, *cache, start)
        return self.output(mixed.reshape(x_NxD.shape[0], -1)), cache

    def _project(self, x_NxD: Array, norm: RMSNorm, context: Context) -> tuple[Array, Array, Array]:
        shape = (context.batch, x_NxD.shape[0] // context.batch, -1, self.config.head_dim)
        parts = (self.query, self.key, self.value)
        flat = normed_products(x_NxD, norm, parts, self.config.remat == "light")
        q, k, v = (y.reshape(shape).swapaxes(1, 2) for y in flat)
        if self.config.qk_norm:
            q = self.query_norm.rotated(q, context.rope)
            return q, self.key_norm.rotated(k, context.rope), v
        return rotate(q, context.rope), rotate(k, context.rope), v


class FeedForward(nnx.Module):
    """SwiGLU (arXiv 2002.05202), or a plain GELU layer."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.gated, self.light = c.mlp == "swiglu", c.remat == "light"
        into, out = ("width", "hidden"), ("hidden", "width")
        if self.gated:
            self.gate = Projection(c.width, c.mlp_width, into, c.init_std, rngs=rngs)
        self.up = Projection(c.width, c.mlp_width, into, c.init_std, rngs=rngs)
        self.down = Projection(c.mlp_width, c.width, out, _residual_std(c), rngs=rngs)

    def __call__(self, x_NxD: Array, norm: RMSNorm) -> Array:
        """Transforms the normalised `x`; `norm` is the block's."""
        parts = (self.gate, self.up) if self.gated else (self.up,)
        hidden = normed_products(x_NxD, norm, parts, self.light)
        down_FxD = self.down.matrix(x_NxD.dtype)

        def leave(*hidden):
            return (gated(*hidden) if self.gated else gelu(*hidden)) @ down_FxD

        if self.light:
            # The matrix is no argument: gathering it (FSDP) need not wait for the gradient.
            leave = jax.checkpoint(leave, prevent_cse=(True,) * len(hidden))
        return leave(*hidden)


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis in float32, then scales."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), axes=(None,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], self.eps)

    def rotated(self, x: Array, tables: tuple[Array, Array]) -> Array:
        """`rotate(self(x), tables)`, with less traffic."""
        return rotated_norm(x, self.scale[...], tables, self.eps)


class Projection(nnx.Module):
    """Multiplies by a matrix [in, out] held in float32, in the dtype of the activations."""

    def __init__(
        self, inputs: int, outputs: int, axes: tuple[str, str], std: float, *, rngs: nnx.Rngs
    ):
        kernel = std * jax.random.normal(rngs.params(), (inputs, outputs))
        self.kernel = nnx.Param(kernel, axes=axes)

    def __call__(self, x_NxI: Array) -> Array:
        return x_NxI @ self.matrix(x_NxI.dtype)

    def matrix(self, dtype: jnp.dtype) -> Array:
        """The matrix in the dtype of the activations."""
        return self.kernel[...].astype(dtype)


def normed_products(
    x_NxD: Array, norm: RMSNorm, parts: tuple[Projection, ...], light: bool
) -> tuple[Array, ...]:
    """The normalised `x` times the matrix of each part.

    Args:
      light: whether the backward pass normalises again, instead of keeping the result.
    """
    kernels = tuple(part.matrix(x_NxD.dtype) for part in parts)

    def run(x_NxD, kernels):
        return products(norm(x_NxD), kernels)

    if light:
        # Gathering the matrices (FSDP) need not wait for the gradient: no barrier around them.
        run = jax.checkpoint(run, prevent_cse=(True, False))
    return run(x_NxD, kernels)


def _residual_std(config: TransformerConfig) -> float:
    # Two additions a layer: this keeps the residual stream's variance independent of depth.
    return config.init_std / (2 * config.layers) ** 0.5


def _write(old_BxKxSxE: Array, new_BxKxTxE: Array, start: Array) -> Array:
    new = new_BxKxTxE.astype(old_BxKxSxE.dtype)
    return jax.lax.dynamic_update_slice_in_dim(old_BxKxSxE, new, start, axis=2)
