r"""Send low-rank factors of every matrix, from one warm-started power iteration (PowerSGD).

$$P = \mathrm{orth}(M Q), \qquad Q' = M^\top P, \qquad \hat M = P Q'^\top$$

$P$ (N x r) and $Q'$ (M x r) travel, coded by `factors`; $Q'$ is kept as the next round's $Q$. A
matrix of rank at most r is exact after one warm step.

Error: the norm of what is missed is that of $M - P P^\top M$, at most that of $M$; to it comes what
`factors` lose.

Source: PowerSGD, arXiv 1905.13727, Algorithm 1; with int4 factors the compressor of DiLoCoX, arXiv
2506.21263.

Differs from the papers: every region sends factors of its own matrix, with its own warm $Q$, in one
exchange. The mean over R regions therefore has rank up to r R, and no region waits in between. The
papers reduce $P$ first and then $Q'$, in two phases with one shared basis; their mean has rank r.

Where the devices of a region hold rows of $M$, $P$ is gathered and $Q'$ summed; for columns it is
the other way round. That moves r (N + M) fp32 values a matrix, besides those that `factors`
regroups. $M$ itself is not moved.

Columns of the kept $Q$ are scaled to unit size. A column that came out zero keeps its old value, so
that a round of zeros does not lose the basis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression.base import fold_regions
from lowcomm_jax.compression.cast import FP32
from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.compression.row_sharding import (
    axes_inside,
    axes_of_matrix,
    pin_columns,
    pin_rows,
    pin_split,
    pin_whole,
    split_spec,
)
from lowcomm_jax.refused import in_range, refuse

_EXACT = jax.lax.Precision.HIGHEST
_LARGEST = 1 << 26  # bytes of a factor that a device gathers at once


@dataclasses.dataclass(frozen=True)
class LowRank(MatrixCodec):
    """Send rank-r factors of matrices; vectors and small matrices go to `dense`.

    Attributes:
      rank: r.
      factors: codec of P (`[L, N, r]`) and Q' (`[L, M, r]`, both transposed on the wire, so that
        its blocks and rows lie within columns).
      dense: codec of leaves that factors would not shrink by `least` times.
      least: smallest compression N M / (r (N + M)) at which a matrix is factored.
      basis: columns of Q kept between rounds, at least r (default r). Codecs of equal `basis` that
        differ in rank share a state, and factor the same tensors.

    Raises:
      ValueError: a setting out of range.
    """

    rank: int = 32
    factors: MatrixCodec = FP32
    dense: MatrixCodec = FP32
    least: float = 2.0
    basis: int | None = None

    def __post_init__(self) -> None:
        refuse(
            "LowRank",
            [
                in_range("rank", self.rank, 1, float("inf")),
                in_range("least", self.least, 1.0, float("inf")),
                in_range("basis", self.width, self.rank, float("inf")),
            ],
        )

    @property
    def layers_apart(self) -> bool:
        return self.factors.layers_apart and self.dense.layers_apart

    @property
    def width(self) -> int:
        """Columns of the kept Q."""
        return self.rank if self.basis is None else self.basis

    @property
    def name(self) -> str:
        factors = "" if self.factors == FP32 else f"_{self.factors.name}"
        return f"low_rank{self.rank}{factors}"

    def factored(self, shape: Shape) -> bool:
        """Whether a stack of this shape travels as factors."""
        _, n, m = shape
        return min(n, m) > 1 and self.width * (n + m) * self.least <= n * m

    def _factor_shapes(self, shape: Shape) -> tuple[Shape, Shape]:
        layers, n, m = shape
        return (layers, self.rank, n), (layers, self.rank, m)

    def init(self, shape: Shape, seed: int) -> PyTree:
        if not self.factored(shape):
            return self.dense.init(shape, seed)
        p, q = self._factor_shapes(shape)
        start = jax.random.normal(jax.random.key(seed), (shape[0], shape[2], self.width))
        return {"q": start, "coding": (self.factors.init(p, seed), self.factors.init(q, seed + 1))}

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        if not self.factored(x_LxNxM.shape):
            return self.dense.encode(x_LxNxM, state)
        basis, spare = state["q"][..., : self.rank], state["q"][..., self.rank :]
        p, q = power_iteration(x_LxNxM, basis)
        coding_p, coding_q = state["coding"]
        # Every device codes some columns of the factors, which are rows on the wire.
        sent_p, coding_p = self.factors.encode(pin_split(jnp.swapaxes(p, 1, 2), 1), coding_p)
        sent_q, coding_q = self.factors.encode(pin_split(jnp.swapaxes(q, 1, 2), 1), coding_q)
        kept = jnp.concatenate([unit_columns(q, basis), spare], axis=-1)
        new_state = {"q": kept, "coding": (coding_p, coding_q)}
        return {"p": sent_p, "q": sent_q}, new_state

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        if not self.factored(shape):
            return self.dense.decode(payload, shape)
        p, q = self._factors(payload, shape)
        chunks = column_chunks(shape, self.rank)
        p, q = (in_chunks(pin_split(x, 2), 1, chunks) for x in (p, q))

        def term(i):
            # Gathered over devices as the matrix needs it, a chunk at a time.
            part_p, part_q = pin_rows(p[i], axis=2), pin_columns(q[i])
            return jnp.einsum("lrn,lrm->lnm", part_p, part_q, precision=_EXACT)

        return fold_regions(term, chunks)

    def _factors(self, payload, shape: Shape) -> tuple[jax.Array, jax.Array]:
        """Transposed factors as receivers decode them: `[L, r, N]` and `[L, r, M]`."""
        shape_p, shape_q = self._factor_shapes(shape)
        p = self.factors.decode(payload["p"], shape_p)
        q = self.factors.decode(payload["q"], shape_q)
        return pin_split(p, 1), pin_split(q, 1)

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, shape: Shape, energy: float
    ) -> jax.Array | None:
        """The rank of the product of the regions' factors side by side, the mean; at most r."""
        if not self.factored(shape):
            return None
        p, q = jax.vmap(lambda one: self._factors(one, shape))(payload_R)
        # A payload of weight 0 is silenced whatever it holds.
        present = (weight_R > 0)[:, None, None, None]
        p = jnp.where(present, p * weight_R[:, None, None, None], 0.0)
        q = jnp.where(present, q, 0.0)

        def own_rows(x_RxLxrxK):
            x_LxRxrxK = jnp.moveaxis(x_RxLxrxK, 0, 1)
            return pin_split(x_LxRxrxK.reshape(len(x_LxRxrxK), -1, x_LxRxrxK.shape[-1]), 2)

        ranks = rank_of_products(own_rows(p), own_rows(q), energy)
        return jnp.mean(jnp.minimum(ranks, self.rank).astype(jnp.float32))

    def rows_together(self, shape: Shape) -> int:
        # The compiler sums products with M over whatever axis is cut.

        return 0 if self.factored(shape) else self.dense.rows_together(shape)

    def unit(self, shape: Shape) -> int:
        return self.dense.unit(shape)

    def splits_over(self, shape: Shape, devices: int) -> bool:
        return self.dense.splits_over(shape, devices)

    def nbytes(self, shape: Shape) -> int:
        if not self.factored(shape):
            return self.dense.nbytes(shape)
        return sum(self.factors.nbytes(s) for s in self._factor_shapes(shape))


def power_iteration(x_LxNxM: jax.Array, q_LxMxR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of subspace iteration: orthonormal P `[L, N, r]` and Q' = X^T P `[L, M, r]`.

    Devices of a region that hold parts of X hold parts of N rows of P and of M rows of Q'. The
    other factor of a product is gathered some columns at a time.
    """
    largest = jnp.max(cutting.largest_magnitude(x_LxNxM), axis=1)
    chunks = column_chunks(x_LxNxM.shape, q_LxMxR.shape[2])

    def left(q):
        q = pin_columns(q, axis=1)
        # Summed as X lies first. Without being told, the compiler would gather X.
        p = pin_rows(jnp.einsum("lnm,lmr->lnr", x_LxNxM, q, precision=_EXACT))
        return pin_split(p, 1)

    def right(p):
        # As P^T X, which a CPU multiplies three times faster than X^T P.
        q = jnp.einsum("lnm,lnr->lrm", x_LxNxM, pin_rows(p), precision=_EXACT)
        return jnp.swapaxes(pin_split(pin_columns(q), 2), 1, 2)

    # Q is scaled by 1 / max |X|, so that X Q is of size 1 and its squares stay within fp32.
    scaled = q_LxMxR * cutting.reciprocal(largest)[:, None, None]
    p = orthonormal_over_rows(by_columns(left, scaled, chunks))
    return p, by_columns(right, p, chunks)


def column_chunks(shape: Shape, rank: int) -> int:
    """Into how many equal parts the columns of factors go, so that one is at most `_LARGEST`."""
    wanted = -(-4 * rank * max(shape[1:]) // _LARGEST)
    return next(n for n in range(wanted, rank + 1) if rank % n == 0) if wanted < rank else rank


def in_chunks(x: jax.Array, axis: int, chunks: int) -> jax.Array:
    """`[..., R, ...]` -> `[chunks, ..., R / chunks, ...]`."""
    shape = (*x.shape[:axis], chunks, x.shape[axis] // chunks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def by_columns(fn: Callable[[jax.Array], jax.Array], x_LxKxR: jax.Array, chunks: int) -> jax.Array:
    """fn of every chunk of columns, side by side, one after the other."""
    if chunks == 1:
        return fn(x_LxKxR)
    parts = jax.lax.map(fn, in_chunks(x_LxKxR, 2, chunks))
    return jnp.moveaxis(parts, 0, 2).reshape(*parts.shape[1:3], x_LxKxR.shape[2])


def orthonormal_over_rows(x_LxNxR: jax.Array) -> jax.Array:
    """Orthonormal columns of every matrix, whose rows the devices of a region share.

    Where each holds at least R rows, it factorises those, and all factorise their triangles once
    more (TSQR, arXiv 0808.2664, section 4). Otherwise the matrix is gathered.
    """
    (_, n, r), sizes, axes = x_LxNxR.shape, axes_inside(), axes_of_matrix()
    spec, devices = split_spec(n, 1), math.prod(sizes[a] for a in axes)
    if spec is None or n < r * devices:
        return pin_split(jax.vmap(orthonormal)(pin_whole(x_LxNxR)), 1)

    def part(x_LxNxR):
        q, top = jax.vmap(factorised)(x_LxNxR)
        tops = jax.lax.all_gather(top, axes, axis=1, tiled=True)
        turn = jax.vmap(orthonormal)(tops)
        own = jax.lax.dynamic_slice_in_dim(turn, jax.lax.axis_index(axes) * r, r, axis=1)
        return jnp.einsum("lnr,lrs->lns", q, own, precision=_EXACT)

    run = jax.shard_map(
        part, in_specs=(spec,), out_specs=spec, axis_names=set(sizes), check_vma=False
    )
    return run(x_LxNxR)


def unit_columns(q_LxMxR: jax.Array, old_LxMxR: jax.Array) -> jax.Array:
    """Columns divided by their largest magnitude; zero columns keep the old ones."""
    largest = jnp.max(jnp.abs(q_LxMxR), axis=1, keepdims=True)
    scaled = q_LxMxR * cutting.reciprocal(largest)
    return jnp.where(largest >= cutting.SMALLEST, scaled, old_LxMxR)


def rank_of_products(p_LxRxN: jax.Array, q_LxRxM: jax.Array, energy: float) -> jax.Array:
    """Smallest number of singular values of every P Q^T that hold `energy` of its squared norm.

    Args:
      p_LxRxN, q_LxRxM: fp32 factors, transposed, not necessarily orthonormal.
      energy: share of the squared Frobenius norm, in (0, 1]. Singular values below some 1e-3 of
        the largest are known in part only: their squares come from sums in fp32.

    Returns:
      int32 `[L]`, between 0 (zero matrix) and r.

    The squares of the singular values are the eigenvalues of (P^T P)^(1/2) Q^T Q (P^T P)^(1/2).
    Devices that hold parts of the rows of P and Q add up R x R products; no factor is gathered.
    """
    values, vectors = jax.vmap(eigen)(gram(p_LxRxN))
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None, :]
    turned = jnp.einsum("lrs,lrt,ltu->lsu", root, gram(q_LxRxM), root, precision=_EXACT)
    squares = jnp.maximum(jax.vmap(eigen)(turned)[0][:, ::-1], 0.0)
    kept = jnp.cumsum(squares * cutting.reciprocal(squares[:, :1]), axis=1)
    total = kept[:, -1:]
    short = jnp.sum(kept < energy * total, axis=1)
    return jnp.where(total[:, 0] > 0, 1 + short, 0)


def gram(x_LxRxN: jax.Array) -> jax.Array:
    """X^T X of every matrix whose largest magnitude is scaled to 1, `[L, R, R]`."""
    scaled = x_LxRxN * cutting.reciprocal(jnp.max(jnp.abs(x_LxRxN), axis=(1, 2), keepdims=True))
    return jnp.einsum("lrn,lsn->lrs", scaled, scaled, precision=_EXACT)


# Factorisations take one matrix after the other, under `vmap` too. On a CPU, jaxlib 0.10 hands a
# batch of matrices to the threads that run the program, and the thread that hands them out waits.
# All threads may do so at once, when they are devices of one processor. Then no thread is left to
# do the work, and the program never ends. (Later versions of jaxlib take the matrices in turn.)


@sequential_vmap
def orthonormal(x_NxR: jax.Array) -> jax.Array:
    """Q of X = Q R, `[N, min(N, R)]`."""
    return jnp.linalg.qr(x_NxR)[0]


@sequential_vmap
def factorised(x_NxR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Q and R of X = Q R."""
    return jnp.linalg.qr(x_NxR)


@sequential_vmap
def eigen(x_RxR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues `[R]`, in ascending order, and eigenvectors `[R, R]` of a symmetric matrix."""
    return jnp.linalg.eigh(x_RxR)
