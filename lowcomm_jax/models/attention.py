"""Mixes values by causal attention; positions enter by rotating queries and keys.

`wide_einsum` multiplies in the operands' dtype, and accumulates and answers in float32.

Shape suffixes: B batch, T query positions, S key positions, H query heads, K key heads, E head
width, F = E / 2 rotary frequencies.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compat import is_gpu
from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.train.batch_sharding import FSDP, TENSOR, automatic_axes

LANES = 128  # of a TPU: the splash kernel takes multiples of it
_HIDDEN = -1e30  # added to a score: its share underflows to exactly 0, yet stays finite


def rope_tables(positions_T: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Returns the cosines and sines [T, head_dim / 2], float32, of the rotary angles.

    Source: arXiv 2104.09864, frequencies `theta ** (-2 i / head_dim)`.
    """
    exponent_F = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle_TxF = positions_T.astype(jnp.float32)[:, None] * (theta**-exponent_F)[None, :]
    return jnp.cos(angle_TxF), jnp.sin(angle_TxF)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates each pair (i, i + E/2) of the last axis: LLaMA's half layout, not neighbours.

    Args:
      x: [..., T, E].
      tables: cosines and sines [T, E / 2] of `rope_tables`.
    """
    leading = tuple(range(x.ndim - 2))
    cos, sin = (table.astype(x.dtype) for table in tables)
    own = jnp.expand_dims(jnp.concatenate([cos, cos], axis=-1), leading)
    other = jnp.expand_dims(jnp.concatenate([-sin, sin], axis=-1), leading)
    # Halves change places by a reversal: unlike a concatenation, it fuses into its neighbours.
    swapped = jnp.flip(x.reshape(*x.shape[:-1], 2, -1), axis=-2).reshape(x.shape)
    return x * own + swapped * other


def masked_attention(
    q_BxHxTxE: Array, k_BxKxSxE: Array, v_BxKxSxE: Array, start: Array | int = 0
) -> Array:
    """Attends from the positions `start + t` to the keys at positions up to each of them.

    Each key head serves H / K = G consecutive query heads. These are folded into the rows, so
    that both products are plain batched matrix products without a transpose. On CPU that saves a
    twentieth of a small model's step against `jax.nn.dot_product_attention`, which moreover cannot
    be differentiated in bfloat16 under strict dtype promotion (jax 0.10).

    Returns:
      [B, T, H, E] in the dtype of `v`.
    """
    batch, heads, length, width = q_BxHxTxE.shape
    kv_heads, keys = k_BxKxSxE.shape[1:3]
    seen_TxS = jnp.arange(keys)[None, :] <= (start + jnp.arange(length))[:, None]
    hide_RxS = jnp.tile(jnp.where(seen_TxS, 0.0, _HIDDEN), (heads // kv_heads, 1))  # R = G * T

    q_BxKxRxE = (q_BxHxTxE * width**-0.5).reshape(batch, kv_heads, -1, width)
    scores_BxKxRxS = wide_einsum("bkre,bkse->bkrs", q_BxKxRxE, k_BxKxSxE) + hide_RxS[None, None]
    shares_BxKxRxS = jax.nn.softmax(scores_BxKxRxS, axis=-1).astype(v_BxKxSxE.dtype)
    mixed_BxKxRxE = jnp.einsum("bkrs,bkse->bkre", shares_BxKxRxS, v_BxKxSxE)
    return mixed_BxKxRxE.reshape(batch, heads, length, width).swapaxes(1, 2)


def cudnn_attention(q_BxHxTxE: Array, k_BxKxTxE: Array, v_BxKxTxE: Array) -> Array:
    """Attends to the positions up to one's own with cuDNN; returns [B, T, H, E]."""
    return on_shards(_cudnn)(q_BxHxTxE, k_BxKxTxE, v_BxKxTxE)


def _cudnn(q_BxHxTxE: Array, k_BxKxTxE: Array, v_BxKxTxE: Array) -> Array:
    q, k, v = (x.swapaxes(1, 2) for x in (q_BxHxTxE, k_BxKxTxE, v_BxKxTxE))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def splash_attention(q_BxHxTxE: Array, k_BxKxTxE: Array, v_BxKxTxE: Array) -> Array:
    """Attends to the positions up to one's own with JAX's splash kernel; returns [B, T, H, E]."""
    if q_BxHxTxE.shape[2] % LANES:
        return masked_attention(q_BxHxTxE, k_BxKxTxE, v_BxKxTxE)
    return on_shards(_splash)(q_BxHxTxE, k_BxKxTxE, v_BxKxTxE)


def _splash(q_BxHxTxE: Array, k_BxKxTxE: Array, v_BxKxTxE: Array, interpret: bool = False) -> Array:
    # With the packages of their language they take 0.2 s of every start, and serve TPUs alone.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    batch, heads, length, width = q_BxHxTxE.shape
    kv_heads = k_BxKxTxE.shape[1]
    block = max(size for size in (128, 256, 512) if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = splash.BlockSizes(
        **{f"block_{name}": block for name in names}, use_fused_bwd_kernel=True
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * (heads // kv_heads))
    # One key head serves its query heads: the kernel reads it once for all of them.
    kernel = splash.make_splash_mqa_single_device(mask, block_sizes=sizes, interpret=interpret)
    q_BxKxGxTxE = (q_BxHxTxE * width**-0.5).reshape(batch, kv_heads, -1, length, width)
    mixed = jax.vmap(jax.vmap(kernel))(q_BxKxGxTxE, k_BxKxTxE, v_BxKxTxE)
    return mixed.reshape(batch, heads, length, width).swapaxes(1, 2)


def kernel_for(config: TransformerConfig, device: jax.Device) -> str:
    """The attention of `TransformerConfig` that suits a device, for "auto"."""
    if config.compute_dtype != "bfloat16":
        return "xla"
    if is_gpu(device) and config.head_dim % 8 == 0 and config.head_dim <= 128:
        capability = getattr(device, "compute_capability", "0")
        # That of other makers' cards is a name.
        cudnn = re.fullmatch(r"[\d.]+", capability) and float(capability) >= 8.0
        return "cudnn" if cudnn else "xla"
    if device.platform == "tpu" and config.head_dim % 64 == 0:
        return "splash"
    return "xla"


def on_shards(attend: Callable[[Array, Array, Array], Array]) -> Callable:
    """`attend(q, k, v)` on every device's own samples and heads; [B, H, T, E] to [B, T, H, E].

    Without it a kernel that the compiler cannot partition (cuDNN, Pallas) would be refused, or
    computed whole on every device. The backward pass does not repeat the forward pass: values kept
    for it go from one `shard_map` to the other, on the devices that computed them.
    """

    def call(q_BxHxTxE: Array, k_BxKxTxE: Array, v_BxKxTxE: Array) -> Array:
        axes = automatic_axes()
        if not {FSDP, TENSOR} <= axes.keys():
            return attend(q_BxHxTxE, k_BxKxTxE, v_BxKxTxE)
        heads = TENSOR if k_BxKxTxE.shape[1] % axes[TENSOR] == 0 else None
        into, out, kept = P(FSDP, heads), P(FSDP, None, heads), P(tuple(axes))

        def over(fn, in_specs, out_specs):
            names = frozenset(axes)
            return jax.shard_map(
                fn, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
            )

        @jax.custom_vjp
        def run(q, k, v):
            return over(attend, (into, into, into), out)(q, k, v)

        def forward(q, k, v):
            def part(q, k, v):
                mixed, pull = jax.vjp(attend, q, k, v)
                # Side by side along a new axis, whatever it is.
                return mixed, jax.tree.map(lambda x: x[None], pull)

            return over(part, (into, into, into), (out, kept))(q, k, v)

        def backward(pull, gradient):
            def part(pull, gradient):
                return jax.tree.map(lambda x: x[0], pull)(gradient)

            return over(part, (kept, out), (into, into, into))(pull, gradient)

        run.defvjp(forward, backward)
        return run(q_BxHxTxE, k_BxKxTxE, v_BxKxTxE)

    return call


# -- products in float32 -----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_einsum(spec: str, a: Array, b: Array) -> Array:
    """Returns `einsum(spec, a, b)` in float32, without rounding to the operands' dtype.

    The backward products run in the operands' dtype: plain differentiation would multiply the
    float32 cotangent with bfloat16 operands, which accelerators do at float32 speed.

    Args:
      spec: two inputs and an output written out; each index occurs in at least two of the three.
      a, b: operands of one dtype.
    """
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _forward(spec, a, b):
    return wide_einsum(spec, a, b), (a, b)


def _backward(spec, operands, cotangent):
    a, b = operands
    inputs, out = spec.split("->")
    a_axes, b_axes = inputs.split(",")
    cotangent = cotangent.astype(a.dtype)
    return (
        jnp.einsum(f"{out},{b_axes}->{a_axes}", cotangent, b),
        jnp.einsum(f"{out},{a_axes}->{b_axes}", cotangent, a),
    )


wide_einsum.defvjp(_forward, _backward)
