"""Operations of a decoder whose backward pass is written out, so that it moves fewer bytes.

Between matrix products a training step on an accelerator does nothing but move bytes. What is here
keeps its inputs alone for the backward pass, reads them once, and leaves sums where a product can
take them in. Values and gradients are those of the plain formulas.

Shape suffixes: N tokens, D width, V vocabulary, C a device's part of D, I and O inputs and outputs
of a projection, E head width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from lowcomm_jax.models.attention import rotate
from lowcomm_jax.train.batch_sharding import (
    FSDP,
    TENSOR,
    automatic_axes,
    over_fsdp,
    shard_batch,
    summed_over_batch,
)

# -- products ----------------------------------------------------------------------------------


@jax.custom_vjp
def products(x_NxI: Array, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    """Multiplies `x` by each matrix [I, O]; all of one dtype.

    In the backward pass each product adds to the sum of those before. Differentiation adds a sum
    and a product in the other order, in which XLA finds no product that can take the sum in.
    """
    return tuple(x_NxI @ kernel for kernel in kernels)


def _products_forward(x_NxI, kernels):
    return products(x_NxI, kernels), (x_NxI, kernels)


def _products_backward(kept, gradients):
    x_NxI, kernels = kept
    pairs = zip(gradients, kernels, strict=True)
    total, *parts = (jnp.einsum("no,io->ni", g, kernel) for g, kernel in pairs)
    for part in parts:
        total = part + total
    return total, tuple(jnp.einsum("ni,no->io", x_NxI, g) for g in gradients)


products.defvjp(_products_forward, _products_backward)


# -- activations -------------------------------------------------------------------------------


# Recomputed in the backward pass: one fused loop over two inputs is cheaper than keeping more.
@jax.checkpoint
def gated(gate_NxF: Array, up_NxF: Array) -> Array:
    """SwiGLU without its products (arXiv 2002.05202)."""
    return jax.nn.silu(gate_NxF) * up_NxF


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """GELU by tanh. The backward pass keeps `x` alone: a product may then give both (cuBLASLt)."""
    return jax.nn.gelu(x)


def _gelu_forward(x):
    return gelu(x), x


def _gelu_backward(x, gradient):
    # tanh(z) as 2 sigmoid(2 z) - 1. With tanh XLA would find it in the forward pass, and keep it.
    wide = x.astype(jnp.float32)
    rate = 2 * (2 / jnp.pi) ** 0.5
    share = jax.nn.sigmoid(rate * (wide + 0.044715 * wide**3))
    slope = share + wide * share * (1 - share) * rate * (1 + 3 * 0.044715 * wide**2)
    return ((gradient.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


# -- norms -------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Divides `x` [..., E] by its root mean square in float32, and multiplies by `scale` [E].

    The backward pass keeps `x` alone and reads it anyway. A kept mean square would give `x` another
    reader, and XLA makes the forward pass in one kernel only where it has none.
    """
    wide = x.astype(jnp.float32)
    return (wide * _inverse(wide, eps) * _along_last(scale, x)).astype(x.dtype)


def _inverse(wide: Array, eps: float) -> Array:
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def _along_last(scale: Array, x: Array) -> Array:
    return jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))


def _rms_norm_forward(x, scale, eps):
    return rms_norm(x, scale, eps), (x, scale)


def _rms_norm_backward(eps, kept, gradient):
    x, scale = kept
    # The barrier hides that the forward pass took the same mean square, which would be kept.
    wide = jax.lax.optimization_barrier(x).astype(jnp.float32)
    inverse, gradient = _inverse(wide, eps), gradient.astype(jnp.float32)
    along = _along(wide, gradient * _along_last(scale, x), inverse)
    return _norm_gradients(x, scale, wide, gradient, inverse, along)


def _along(wide: Array, scaled: Array, inverse: Array) -> Array:
    """The part of a gradient that changes the length of `x` [..., 1], over its square."""
    return inverse**2 * jnp.mean(scaled * wide, axis=-1, keepdims=True)


def _norm_gradients(x, scale, wide, gradient, inverse, along):
    """Gradients of `x` and `scale`, of a float32 gradient behind the scale."""
    to_scale = jnp.sum(gradient * (wide * inverse), axis=tuple(range(x.ndim - 1)))
    to_x = inverse * (gradient * _along_last(scale, x) - wide * along)
    return to_x.astype(x.dtype), to_scale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rotated_norm(x: Array, scale: Array, tables: tuple[Array, Array], eps: float) -> Array:
    """`rotate(rms_norm(x, scale, eps), tables)`: two loops over `x`, sums first, not three.

    Args:
      tables: cosines and sines of `rope_tables`; no gradient flows to them.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.optimization_barrier(_inverse(wide, eps))
    return rotate((wide * inverse * _along_last(scale, x)).astype(x.dtype), tables)


def _rotated_norm_forward(x, scale, tables, eps):
    return rotated_norm(x, scale, tables, eps), (x, scale, tables)


def _rotated_norm_backward(eps, kept, gradient):
    x, scale, (cos, sin) = kept

    def before_rotation(gradient):
        return rotate(gradient, (cos, -sin)).astype(jnp.float32)

    wide = x.astype(jnp.float32)
    inverse = _inverse(wide, eps)
    along = _along(wide, before_rotation(gradient) * _along_last(scale, x), inverse)
    # Barriers, and rotated twice: so the first loop writes sums alone.
    inverse, along = jax.lax.optimization_barrier((inverse, along))
    gradient, x = jax.lax.optimization_barrier((gradient, x))
    wide = x.astype(jnp.float32)
    return *_norm_gradients(x, scale, wide, before_rotation(gradient), inverse, along), None


rotated_norm.defvjp(_rotated_norm_forward, _rotated_norm_backward)


# -- the table ---------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_scores(x_NxD: Array, table: Array, axes: str) -> Array:
    """Scores [N, V] by a table of `axes` "vd" or "dv"; all of one dtype.

    Over `fsdp` devices the table's gradient is summed beside the product that gives the gradient of
    `x`. Left to the compiler, that sum comes last of all, with nothing beside it.
    """
    return jnp.einsum(f"nd,{axes}->nv", x_NxD, table)


def _table_scores_forward(x_NxD, table, axes):
    return table_scores(x_NxD, table, axes), (x_NxD, table)


def _table_scores_backward(axes, kept, gradient_NxV):
    x_NxD, table = kept
    to_table = jnp.einsum(f"nv,nd->{axes}", gradient_NxV, x_NxD)
    to_x_NxD = jnp.einsum(f"nv,{axes}->nd", gradient_NxV, table)
    sizes, names = automatic_axes(), {"d": FSDP, "v": TENSOR}
    divides = {a: n % sizes.get(names[a], 1) == 0 for a, n in zip(axes, table.shape)}
    if sizes.get(FSDP, 1) > 1 and divides["d"]:
        lies = [names[a] if divides[a] else None for a in axes]
        to_table = jax.lax.with_sharding_constraint(to_table, P(*lies))
        to_x_NxD, to_table = jax.lax.optimization_barrier((shard_batch(to_x_NxD), to_table))
    return to_x_NxD, to_table


table_scores.defvjp(_table_scores_forward, _table_scores_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table_VxD: Array, row_N: Array, mode: str, dtype: jnp.dtype) -> Array:
    """Rows [N, D] of a table, in `dtype`; the gradient is summed in the table's dtype.

    A table that is cut over devices is gathered, in `dtype`. Where it is cut over its width, and a
    device has fewer tokens than a quarter of the table's rows, rows move instead: each device looks
    up its columns of all devices' tokens. Rows leave by a device's own network card, and a gather
    by all cards of a host, so the table moves sooner than by bytes alone. The gradient's rows move
    in either case: they travel beside products.

    Left to the compiler, the gradient brings all tokens' activations to every device. XLA also
    aborts the process on a gather from a sharded table where another axis is manual (jax 0.10.2).

    Args:
      mode: of `jnp.take`: what a row that is not there gives.
    """
    sizes = automatic_axes()
    few = 4 * row_N.shape[0] < sizes.get(FSDP, 1) * table_VxD.shape[0]
    if not (few and _rows_move(table_VxD, row_N)):
        if any(size > 1 for size in sizes.values()):
            table_VxD = jax.lax.with_sharding_constraint(table_VxD.astype(dtype), P())
        return jnp.take(table_VxD, row_N, axis=0, mode=mode).astype(dtype)

    def part(table_VxC, row_N):
        rows = jnp.take(table_VxC, _all_rows(row_N), axis=0, mode=mode).astype(dtype)
        return jax.lax.all_to_all(rows, FSDP, split_axis=0, concat_axis=1, tiled=True)

    return over_fsdp(part, (P(None, FSDP), P(FSDP)), P(FSDP))(table_VxD, row_N)


def _look_up_forward(table_VxD, row_N, mode, dtype):
    return look_up(table_VxD, row_N, mode, dtype), (table_VxD, row_N)


def _look_up_backward(mode, dtype, kept, gradient_NxD):
    table_VxD, row_N = kept

    def sums(row_N, gradient_NxC):
        # Rows that are not there: `take` gave NaN or another row, and `add` leaves them out.
        zeros = jnp.zeros((table_VxD.shape[0], gradient_NxC.shape[1]), table_VxD.dtype)
        return zeros.at[row_N].add(gradient_NxC.astype(zeros.dtype), mode="drop")

    if not _rows_move(table_VxD, row_N):
        # As `sharding.parameter_specs` has the table: cut over the width, where that divides.
        cut = 1 if table_VxD.shape[1] % automatic_axes().get(FSDP, 1) == 0 else -1
        return summed_over_batch(sums, cut, row_N, gradient_NxD), None

    def part(row_N, gradient_NxD):
        columns = jax.lax.all_to_all(gradient_NxD, FSDP, split_axis=1, concat_axis=0, tiled=True)
        return sums(_all_rows(row_N), columns)

    return over_fsdp(part, (P(FSDP), P(FSDP)), P(None, FSDP))(row_N, gradient_NxD), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def _rows_move(table_VxD: Array, row_N: Array) -> bool:
    """Whether the table is cut over its width alone, and the rows can be cut as well."""
    axes = automatic_axes()
    count = axes.get(FSDP, 1)
    divides = table_VxD.shape[1] % count == 0 and row_N.shape[0] % count == 0
    return count > 1 and axes.get(TENSOR, 1) == 1 and divides


def _all_rows(row_N: Array) -> Array:
    return jax.lax.all_gather(row_N, FSDP, axis=0, tiled=True)
