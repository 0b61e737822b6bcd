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

Devices of a region hold parts of $M$, and equal parts of the rows of $P$ and $Q$. Products gather
the rows of one factor that a device's part of $M$ meets, some columns at a time, and scatter the
sums. That moves r (N + M) fp32 values a matrix, besides those that `factors` regroups. $M$ itself
is not moved.

Columns of the kept $Q$ are scaled to unit size. A column that came out zero keeps its old value, so
that a round of zeros does not lose the basis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.base import PyTree
from lowcomm_jax.compression.codecs.cast import FP32
from lowcomm_jax.compression.codecs.integer import INT4
from lowcomm_jax.compression.grid import Shape, Unit
from lowcomm_jax.compression.leaf import InUnits, LeafCodec
from lowcomm_jax.compression.means import fold_regions
from lowcomm_jax.compression.placement import Axes, Placement, place
from lowcomm_jax.compression.units import SMALLEST, UnitCodec, not_of_units, reciprocal
from lowcomm_jax.refused import at_least, in_range, refuse

_EXACT = jax.lax.Precision.HIGHEST
_LARGEST = 1 << 26  # bytes of a factor that a device gathers at once


@dataclasses.dataclass(frozen=True)
class LowRank(LeafCodec):
    """Send rank-r factors of matrices; vectors and small matrices go to `dense`.

    Attributes:
      rank: r.
      factors: codec of P and Q', as leaves `[L, r, N]` and `[L, r, M]`, so that its units lie
        within columns.
      dense: codec of leaves that factors would not shrink by `least` times.
      least: smallest compression N M / (r (N + M)) at which a matrix is factored.
      basis: columns of Q kept between rounds, at least r (default r). Codecs of equal `basis` that
        differ in rank share a state, and factor the same tensors.

    Raises:
      ValueError: a setting out of range.
    """

    rank: int = 32
    factors: UnitCodec = FP32
    dense: UnitCodec = FP32
    least: float = 2.0
    basis: int | None = None

    def __post_init__(self) -> None:
        rank = at_least("rank", self.rank, 1)
        refuse(
            "LowRank",
            [
                rank,
                in_range("least", self.least, 1.0, float("inf")),
                None if rank else at_least("basis", self.width, self.rank),
                not_of_units("factors", self.factors),
                not_of_units("dense", self.dense),
            ],
        )

    @property
    def width(self) -> int:
        """Columns of the kept Q."""
        return self.rank if self.basis is None else self.basis

    @property
    def name(self) -> str:
        factors = "" if self.factors == FP32 else f"_{self.factors.name}"
        return f"low_rank{self.rank}{factors}"

    def factored(self, matrices: Shape) -> bool:
        """Whether a stack of this shape travels as factors."""
        _, n, m = matrices
        return min(n, m) > 1 and self.width * (n + m) * self.least <= n * m

    def unit_of(self, matrices: Shape) -> Unit:
        return Unit(1, 1) if self.factored(matrices) else self.dense.unit

    def in_shares(self, matrices: Shape) -> bool:
        return not self.factored(matrices)

    @property
    def _dense(self) -> InUnits:
        return InUnits(self.dense)

    @property
    def _coding(self) -> InUnits:
        return InUnits(self.factors)

    def init(self, place: Placement, seed: int) -> PyTree:
        if not self.factored(place.matrices):
            return self._dense.init(place, seed)
        layers, _, m = place.matrices
        start = jax.random.normal(jax.random.key(seed), (layers, m, self.width))
        return {"q": start}

    def state_specs(self, place: Placement) -> PyTree:
        if not self.factored(place.matrices):
            return ()
        return {"q": P(place.axes[0] or None, Parts(place).of_columns or None)}

    def encode(
        self, x: jax.Array, state: PyTree, place: Placement, params: jax.Array | None = None
    ) -> tuple[PyTree, PyTree]:
        if not self.factored(place.matrices):
            return self._dense.encode(x, state, place)
        parts = Parts(place)
        basis, spare = state["q"][..., : self.rank], state["q"][..., self.rank :]
        p, q = power_iteration(x, basis, parts)
        sent = {"p": self._sent(p, parts, 1), "q": self._sent(q, parts, 2)}
        kept = jnp.concatenate([unit_columns(q, basis, parts), spare], axis=-1)
        return sent, {"q": kept}

    def _sent(self, factor: jax.Array, parts: Parts, side: int) -> PyTree:
        """A device's rows of a factor, coded: some columns by each device."""
        at = self._placement(parts, side)
        given = at.split(at.enter(jnp.swapaxes(factor, 1, 2)))
        return self._coding.encode(at.whole(given), (), at)[0]

    def _received(self, payload: PyTree, parts: Parts, side: int) -> jax.Array:
        """As receivers decode it, a device's rows: `[l, r, n]`."""
        at = self._placement(parts, side)
        decoded = at.own(self._coding.decode(payload, at))
        return at.leave(decoded.reshape(-1, *at.part[1:]))

    def _placement(self, parts: Parts, side: int) -> Placement:
        """Of a factor as a leaf `[L, r, N]` or `[L, r, M]`."""
        held, layers = parts.place, parts.place.axes[0]
        shape = (held.matrices[0], self.rank, held.matrices[side])
        cut = P(layers or None, None, parts.of(side) or None)
        return place(self.factors.unit, shape, True, cut, dict(held.sizes), in_shares=True)

    def decode(self, payload: PyTree, place: Placement) -> jax.Array:
        if not self.factored(place.matrices):
            return self._dense.decode(payload, place)
        parts = Parts(place)
        chunks = column_chunks(place.matrices, self.rank)
        p = in_chunks(self._received(payload["p"], parts, 1), 1, chunks)
        q = in_chunks(self._received(payload["q"], parts, 2), 1, chunks)

        def term(i):
            part_p, part_q = parts.of_x(p[i], 1, axis=2), parts.of_x(q[i], 2, axis=2)
            return jnp.einsum("lrn,lrm->lnm", part_p, part_q, precision=_EXACT)

        return fold_regions(term, chunks)

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, place: Placement, energy: float
    ) -> jax.Array | None:
        """The rank of the product of the regions' factors side by side, the mean; at most r."""
        if not self.factored(place.matrices):
            return None
        parts = Parts(place)
        p, q = (
            jax.vmap(functools.partial(self._received, parts=parts, side=side))(payload_R[name])
            for side, name in ((1, "p"), (2, "q"))
        )
        # A payload of weight 0 is silenced whatever it holds.
        present = (weight_R > 0)[:, None, None, None]
        p = jnp.where(present, p * weight_R[:, None, None, None], 0.0)
        q = jnp.where(present, q, 0.0)

        def side_by_side(x_RxLxrxK):
            x_LxRxrxK = jnp.moveaxis(x_RxLxrxK, 0, 1)
            return x_LxRxrxK.reshape(len(x_LxRxrxK), -1, x_LxRxrxK.shape[-1])

        ranks = rank_of_products(side_by_side(p), side_by_side(q), energy, parts)
        return jnp.mean(jnp.minimum(ranks, self.rank).astype(jnp.float32))

    def payload_like(self, place: Placement) -> PyTree:
        if not self.factored(place.matrices):
            return self._dense.payload_like(place)
        return self._of_factors(place, self._coding.payload_like)

    def payload_specs(self, place: Placement) -> PyTree:
        if not self.factored(place.matrices):
            return self._dense.payload_specs(place)
        return self._of_factors(place, self._coding.payload_specs)

    def _of_factors(self, place: Placement, about: Callable[[Placement], PyTree]) -> PyTree:
        parts = Parts(place)
        return {name: about(self._placement(parts, side)) for side, name in ((1, "p"), (2, "q"))}


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which rows of the factors devices hold: equal parts over all devices that cut the matrix.

    Where a side does not divide over them, every device holds the whole factor.
    """

    place: Placement

    def of(self, side: int) -> Axes:
        """Mesh axes that cut the rows of P (side 1) or Q (side 2)."""
        return self.of_rows if side == 1 else self.of_columns

    @property
    def of_rows(self) -> Axes:
        _, rows, columns = self.place.axes
        return self._dividing(self.place.matrices[1], (*rows, *columns))

    @property
    def of_columns(self) -> Axes:
        _, rows, columns = self.place.axes
        return self._dividing(self.place.matrices[2], (*columns, *rows))

    def _dividing(self, n: int, axes: Axes) -> Axes:
        return axes if n % self.place.devices(axes) == 0 else ()

    def devices(self, side: int) -> int:
        return self.place.devices(self.of(side))

    def of_x(self, factor: jax.Array, side: int, axis: int) -> jax.Array:
        """The rows of a factor that the device's part of the matrix meets, of those it holds."""
        cut, other = self.place.axes[side], self.place.axes[3 - side]
        if self.of(side):
            gathered = jax.lax.all_gather(factor, other, axis=axis, tiled=True) if other else factor
            return gathered
        if not cut:
            return factor
        size = factor.shape[axis] // self.place.devices(cut)
        start = jax.lax.axis_index(cut) * size
        return jax.lax.dynamic_slice_in_dim(factor, start, size, axis)

    def summed(self, product: jax.Array, side: int, axis: int) -> jax.Array:
        """Rows of a product with the matrix, which devices hold terms of, as the factor lies."""
        cut, other = self.place.axes[side], self.place.axes[3 - side]
        if self.of(side):
            if not other:
                return product
            return jax.lax.psum_scatter(product, other, scatter_dimension=axis, tiled=True)
        whole = jax.lax.psum(product, other) if other else product
        return jax.lax.all_gather(whole, cut, axis=axis, tiled=True) if cut else whole

    def over_all(self, x: jax.Array, side: int, op: Callable = jax.lax.psum) -> jax.Array:
        """op over the devices that hold different rows of a factor."""
        axes = self.of(side)
        return op(x, axes) if axes else x


def power_iteration(
    x_LxNxM: jax.Array, q_LxMxR: jax.Array, parts: Parts
) -> tuple[jax.Array, jax.Array]:
    """One step of subspace iteration: orthonormal P `[l, n, r]` and Q' = X^T P `[l, m, r]`."""
    largest = jnp.max(jnp.abs(x_LxNxM), axis=(1, 2))
    axes = (*parts.place.axes[1], *parts.place.axes[2])
    largest = jax.lax.pmax(largest, axes) if axes else largest
    chunks = column_chunks(parts.place.matrices, q_LxMxR.shape[2])

    def left(q):
        met = parts.of_x(q, 2, axis=1)
        product = jnp.einsum("lnm,lmr->lnr", x_LxNxM, met, precision=_EXACT)
        return parts.summed(product, 1, axis=1)

    def right(p):
        met = parts.of_x(p, 1, axis=1)
        # As P^T X, which a CPU multiplies three times faster than X^T P.
        product = jnp.einsum("lnm,lnr->lrm", x_LxNxM, met, precision=_EXACT)
        return jnp.swapaxes(parts.summed(product, 2, axis=2), 1, 2)

    # Q is scaled by 1 / max |X|, so that X Q is of size 1 and its squares stay within fp32.
    scaled = q_LxMxR * reciprocal(largest)[:, None, None]
    p = orthonormal_over_rows(by_columns(left, scaled, chunks), parts)
    return p, by_columns(right, p, chunks)


def column_chunks(matrices: Shape, rank: int) -> int:
    """Into how many equal parts the columns of factors go, so that one is at most `_LARGEST`."""
    wanted = -(-4 * rank * max(matrices[1:]) // _LARGEST)
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


def orthonormal_over_rows(x_LxNxR: jax.Array, parts: Parts) -> jax.Array:
    """Orthonormal columns of every matrix, whose rows the devices of a region share.

    Where each holds at least R rows, it factorises those, and all factorise their triangles once
    more (TSQR, arXiv 0808.2664, section 4). Otherwise the matrix is gathered.
    """
    (_, n, r), axes = x_LxNxR.shape, parts.of_rows
    if not axes:
        return jax.vmap(orthonormal)(x_LxNxR)
    if n < r:
        whole = jax.vmap(orthonormal)(jax.lax.all_gather(x_LxNxR, axes, axis=1, tiled=True))
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axes) * n, n, axis=1)
    q, top = jax.vmap(factorised)(x_LxNxR)
    turn = jax.vmap(orthonormal)(jax.lax.all_gather(top, axes, axis=1, tiled=True))
    own = jax.lax.dynamic_slice_in_dim(turn, jax.lax.axis_index(axes) * r, r, axis=1)
    return jnp.einsum("lnr,lrs->lns", q, own, precision=_EXACT)


def unit_columns(q_LxMxR: jax.Array, old_LxMxR: jax.Array, parts: Parts) -> jax.Array:
    """Columns divided by their largest magnitude; zero columns keep the old ones."""
    largest = jnp.max(jnp.abs(q_LxMxR), axis=1, keepdims=True)
    largest = parts.over_all(largest, 2, jax.lax.pmax)
    return jnp.where(largest >= SMALLEST, q_LxMxR * reciprocal(largest), old_LxMxR)


def rank_of_products(
    p_LxRxN: jax.Array, q_LxRxM: jax.Array, energy: float, parts: Parts
) -> jax.Array:
    """Smallest number of singular values of every P Q^T that hold `energy` of its squared norm.

    Args:
      p_LxRxN, q_LxRxM: a device's part of fp32 factors, transposed, not necessarily orthonormal.
      energy: share of the squared Frobenius norm, in (0, 1]. Singular values below some 1e-3 of
        the largest are known in part only: their squares come from sums in fp32.

    Returns:
      int32 `[L]`, between 0 (zero matrix) and r.

    The squares of the singular values are the eigenvalues of (P^T P)^(1/2) Q^T Q (P^T P)^(1/2).
    Devices that hold parts of the rows of P and Q add up R x R products; no factor is gathered.
    """
    values, vectors = jax.vmap(eigen)(gram(p_LxRxN, parts, 1))
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None, :]
    within = gram(q_LxRxM, parts, 2)
    turned = jnp.einsum("lrs,lrt,ltu->lsu", root, within, root, precision=_EXACT)
    squares = jnp.maximum(jax.vmap(eigen)(turned)[0][:, ::-1], 0.0)
    kept = jnp.cumsum(squares * reciprocal(squares[:, :1]), axis=1)
    total = kept[:, -1:]
    short = jnp.sum(kept < energy * total, axis=1)
    return jnp.where(total[:, 0] > 0, 1 + short, 0)


def gram(x_LxRxN: jax.Array, parts: Parts, side: int) -> jax.Array:
    """X^T X of every matrix whose largest magnitude is scaled to 1, `[L, R, R]`."""
    largest = jnp.max(jnp.abs(x_LxRxN), axis=(1, 2), keepdims=True)
    scaled = x_LxRxN * reciprocal(parts.over_all(largest, side, jax.lax.pmax))
    product = jnp.einsum("lrn,lsn->lrs", scaled, scaled, precision=_EXACT)
    return parts.over_all(product, side)


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


NAMES = {"low_rank": LowRank(), "low_rank_int4": LowRank(factors=INT4)}
