r"""Low-rank factors on bases that all regions share (two-phase PowerSGD, its phases a round apart).

Every matrix has orthonormal bases U of N x r and V of M x r, the same in all regions. Region i
sends its projections on both, and everybody reads the part of $M_i$ that lies in their span:

$$P_i = M_i V, \qquad Q_i = M_i^\top U, \qquad
  \hat M_i = U U^\top M_i + M_i V V^\top - U U^\top M_i V V^\top
           = P_i V^\top + U (Q_i^\top - U^\top P_i V^\top)$$

All of it is linear in $M_i$, so that the mean of the factors is the factors of the mean, exactly:
a landing multiplies once, whatever R is, and the mean keeps rank 2 r. The mean factors are the next
bases, as orthonormal columns:

$$U \leftarrow \mathrm{orth}(\bar P), \qquad V \leftarrow \mathrm{orth}(\bar Q)$$

which every region computes for itself from what it has received: bases do not travel. What a region
sends is as large as the factors of its own basis, r (N + M) values a matrix, coded by `factors`, in
one exchange a round. With error feedback what lies outside the span is kept for later bases.

Differs from PowerSGD, arXiv 1905.13727, Algorithm 1, and so from DiLoCoX, arXiv 2506.21263: there
$\bar P$ of a round is made orthonormal first and $Q_i = M_i^\top \mathrm{orth}(\bar P)$ sent then,
two exchanges that wait for one another. Here both factors travel at once, and orth(P) is that of
the round that landed last before the send: a subspace is one round old, or two where a payload is
always in flight. For that the decoder has both projections, and reads rank 2 r where PowerSGD
reads r.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import weighted_mean
from lowcomm_jax.compression.factorise import orthonormal
from lowcomm_jax.compression.low_rank import LowRank, measured_rank, unit_columns
from lowcomm_jax.compression.matrix import Shape
from lowcomm_jax.inside import pin_columns, pin_rows, pin_whole

PyTree = Any
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class SharedBasis(LowRank):
    """`LowRank` on shared bases; encodes and decodes once it has been given them (`on`).

    Attributes:
      held: `{"u": [L, N, basis], "v": [L, M, basis]}`, fp32 with orthonormal columns, of which the
        first `rank` count; () = none yet.
    """

    held: PyTree = dataclasses.field(default=(), init=False, compare=False, repr=False)
    shares_basis = True

    @property
    def name(self) -> str:
        return super().name.replace("low_rank", "low_rank_shared", 1)

    def bases(self, shape, seed):
        if not self.factored(shape):
            return ()
        layers, n, m = shape

        def start(seed, rows):
            return jax.vmap(orthonormal)(jax.random.normal(seed, (layers, rows, self.width)))

        of_u, of_v = jax.random.split(jax.random.key(seed))
        return {"u": start(of_u, n), "v": start(of_v, m)}

    def on(self, bases):
        given = copy.copy(self)
        object.__setattr__(given, "held", bases)
        return given

    def _used(self) -> tuple[jax.Array, jax.Array]:
        """U and V of this rank."""
        if self.held == ():
            raise ValueError(
                f"{self.name} needs the bases that the regions share: codec.on(codec.bases(like))"
            )
        return self.held["u"][..., : self.rank], self.held["v"][..., : self.rank]

    def init(self, shape, seed):
        if not self.factored(shape):
            return self.dense.init(shape, seed)
        p, q = self._factor_shapes(shape)
        return {"coding": (self.factors.init(p, seed), self.factors.init(q, seed + 1))}

    def encode(self, x_LxNxM, state):
        if not self.factored(x_LxNxM.shape):
            return self.dense.encode(x_LxNxM, state)
        u, v = self._used()
        # Transposed, as they travel. Inside a region P and Q are summed over devices, or gathered.
        v = pin_columns(v, axis=1)
        p = pin_whole(jnp.einsum("lnm,lmr->lrn", x_LxNxM, v, precision=_EXACT))
        q = pin_columns(jnp.einsum("lnm,lnr->lrm", x_LxNxM, pin_rows(u), precision=_EXACT))
        q = pin_whole(q)
        coding_p, coding_q = state["coding"] if state != () else ((), ())
        sent_p, coding_p = self.factors.encode(p, coding_p)
        sent_q, coding_q = self.factors.encode(q, coding_q)
        return {"p": sent_p, "q": sent_q}, {"coding": (coding_p, coding_q)}

    def decode(self, payload, shape):
        if not self.factored(shape):
            return self.dense.decode(payload, shape)
        return self._joined(*self._factors(payload, shape))

    def _joined(self, p_LxRxN: jax.Array, q_LxRxM: jax.Array) -> jax.Array:
        left, right = self._side_by_side(p_LxRxN, q_LxRxM)
        return jnp.einsum("lrn,lrm->lnm", left, right, precision=_EXACT)

    def _side_by_side(self, p_LxRxN, q_LxRxM) -> tuple[jax.Array, jax.Array]:
        """`[L, 2r, N]` and `[L, 2r, M]`, whose product is what the factors stand for."""
        u, v = (jnp.swapaxes(basis, 1, 2) for basis in self._used())
        core = jnp.einsum("lsn,lrn->lsr", u, p_LxRxN, precision=_EXACT)
        rest = q_LxRxM - jnp.einsum("lsr,lrm->lsm", core, v, precision=_EXACT)
        return jnp.concatenate([p_LxRxN, u], axis=1), jnp.concatenate([v, rest], axis=1)

    def _mean_factors(self, payload_R, weight_R, shape: Shape) -> tuple[jax.Array, jax.Array]:
        return weighted_mean(lambda payload: self._factors(payload, shape), payload_R, weight_R)

    def aggregate(self, payload_R, weight_R, shape):
        if not self.factored(shape):
            return self.dense.aggregate(payload_R, weight_R, shape)
        return self._joined(*self._mean_factors(payload_R, weight_R, shape))

    def turned(self, payload_R, weight_R, shape):
        """Orthonormal columns of the mean factors, then what is left of the old ones."""
        if not self.factored(shape):
            return ()
        p, q = self._mean_factors(payload_R, weight_R, shape)

        def turn(mean_LxRxN, old):
            used, spare = old[..., : self.rank], old[..., self.rank :]
            fresh = unit_columns(jnp.swapaxes(mean_LxRxN, 1, 2), used)
            return jax.vmap(orthonormal)(jnp.concatenate([fresh, spare], axis=-1))

        return {"u": turn(p, self.held["u"]), "v": turn(q, self.held["v"])}

    def mean_rank(self, payload_R, weight_R, shape, energy):
        """Of the mean itself; at most r."""
        if not self.factored(shape):
            return None
        left, right = self._side_by_side(*self._mean_factors(payload_R, weight_R, shape))
        ranks = jax.vmap(lambda a, b: measured_rank(a.T, b.T, energy))(left, right)
        return jnp.mean(jnp.minimum(ranks, self.rank).astype(jnp.float32))
