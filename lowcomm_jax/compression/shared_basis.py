r"""Low-rank factors on a basis that all regions share: PowerSGD in its two phases.

$$P_i = M_i V, \qquad U = \mathrm{orth}\Big(\frac{\sum_i w_i P_i}{\sum_i w_i}\Big), \qquad
  Q_i = M_i^\top U, \qquad \hat M_i = U Q_i^\top, \qquad
  V \leftarrow \frac{\sum_i w_i Q_i}{\sum_i w_i}$$

Regions first exchange P, N x r a matrix (`ahead`); all of them make the same U of the mean
(`agreed`), and Q, M x r, is the payload that the mean is made of. Both travel coded by `factors`,
everyone's to everyone, for rounded values cannot be added on the way. U follows from what everyone
has received, exactly, and does not travel. Everything but the rounding is linear in $M_i$: the mean
of what is decoded is $U U^\top$ times the mean, of rank r; a landing multiplies once, for any R. V,
the mean Q, is the next round's start, and the same in all regions.

Source: PowerSGD, arXiv 1905.13727, Algorithm 1; with int4 factors the compressor of DiLoCoX, arXiv
2506.21263.

Differs from the papers: a residual (Algorithm 2) misses what is decoded of its own region's
payload, $M_i - U Q_i^\top$, as with every other codec here; the authors' code subtracts the decoded
mean. The mean of the residuals is the same, and so is what they bring back; but a region's own is
known at the send, before a delayed mean, and holds nothing that only tells it from the others.
Columns of V are scaled to unit size, and a column that came out zero keeps its old value.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import weighted_mean
from lowcomm_jax.compression.low_rank import LowRank, measured_rank, orthonormal, unit_columns
from lowcomm_jax.compression.matrix import Shape
from lowcomm_jax.compression.row_sharding import pin_columns, pin_rows, pin_whole

PyTree = Any
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class SharedBasis(LowRank):
    """`LowRank` on a shared basis; encodes and decodes once it has been given one (`on`).

    Attributes:
      held: `{"u": [L, N, basis], "v": [L, M, basis]}`, fp32, of which the first `rank` columns
        count, those of u orthonormal; () = none yet.
    """

    held: PyTree = dataclasses.field(default=(), init=False, compare=False, repr=False)
    shares_basis = True
    layers_apart = False

    @property
    def name(self) -> str:
        return super().name.replace("low_rank", "low_rank_shared", 1)

    def bases(self, shape, seed):
        if not self.factored(shape):
            return ()
        layers, n, m = shape
        of_u, of_v = jax.random.split(jax.random.key(seed))
        u = jax.vmap(orthonormal)(jax.random.normal(of_u, (layers, n, self.width)))
        return {"u": u, "v": jax.random.normal(of_v, (layers, m, self.width))}

    def on(self, bases):
        given = copy.copy(self)
        object.__setattr__(given, "held", bases)
        return given

    def _used(self, key: str) -> jax.Array:
        """U or V of this rank."""
        if self.held == ():
            raise ValueError(
                f"{self.name} needs the bases that the regions share: codec.on(codec.bases(like))"
            )
        return self.held[key][..., : self.rank]

    def _replaced(self, key: str, used: jax.Array) -> PyTree:
        """The bases with other columns for those of this rank."""
        spare = self.held[key][..., self.rank :]
        return self.held | {key: jnp.concatenate([used, spare], axis=-1)}

    def init(self, shape, seed):
        if not self.factored(shape):
            return self.dense.init(shape, seed)
        p, q = self._factor_shapes(shape)
        return {"coding": (self.factors.init(p, seed), self.factors.init(q, seed + 1))}

    def ahead(self, x_LxNxM, state):
        return self._first(x_LxNxM, state)[0] if self.factored(x_LxNxM.shape) else ()

    def _first(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """(P coded, transposed, and the state of its codec)."""
        # Inside a region P and Q are summed over devices, or gathered.
        v = pin_columns(self._used("v"), axis=1)
        p = pin_whole(jnp.einsum("lnm,lmr->lrn", x_LxNxM, v, precision=_EXACT))
        return self.factors.encode(p, state["coding"][0] if state != () else ())

    def agreed(self, sent_R, weight_R, shape):
        if not self.factored(shape):
            return ()
        p_shape = self._factor_shapes(shape)[0]
        mean = weighted_mean(lambda sent: self.factors.decode(sent, p_shape), sent_R, weight_R)
        columns = unit_columns(jnp.swapaxes(mean, 1, 2), self._used("u"))
        return self._replaced("u", jax.vmap(orthonormal)(columns))

    def encode(self, x_LxNxM, state):
        if not self.factored(x_LxNxM.shape):
            return self.dense.encode(x_LxNxM, state)
        sent_p, coding_p = self._first(x_LxNxM, state)
        u = pin_rows(self._used("u"))
        q = pin_columns(jnp.einsum("lnm,lnr->lrm", x_LxNxM, u, precision=_EXACT))
        sent_q, coding_q = self.factors.encode(pin_whole(q), state["coding"][1] if state else ())
        return {"p": sent_p, "q": sent_q}, {"coding": (coding_p, coding_q)}

    def behind(self, payload, shape):
        return {"q": payload["q"]} if self.factored(shape) else payload

    def decode(self, payload, shape):
        if not self.factored(shape):
            return self.dense.decode(payload, shape)
        return self._joined(self._second(payload, shape))

    def _second(self, payload: PyTree, shape: Shape) -> jax.Array:
        """Q as receivers decode it, `[L, r, M]`."""
        return self.factors.decode(payload["q"], self._factor_shapes(shape)[1])

    def _joined(self, q_LxRxM: jax.Array) -> jax.Array:
        return jnp.einsum("lnr,lrm->lnm", self._used("u"), q_LxRxM, precision=_EXACT)

    def _mean_second(self, payload_R, weight_R, shape: Shape) -> jax.Array:
        return weighted_mean(lambda payload: self._second(payload, shape), payload_R, weight_R)

    def aggregate(self, payload_R, weight_R, shape):
        if not self.factored(shape):
            return self.dense.aggregate(payload_R, weight_R, shape)
        return self._joined(self._mean_second(payload_R, weight_R, shape))

    def turned(self, payload_R, weight_R, shape):
        """The mean Q in the place of V, then what is left of the old one."""
        if not self.factored(shape):
            return ()
        mean = jnp.swapaxes(self._mean_second(payload_R, weight_R, shape), 1, 2)
        return self._replaced("v", unit_columns(mean, self._used("v")))

    def mean_rank(self, payload_R, weight_R, shape, energy):
        """Of the mean itself."""
        if not self.factored(shape):
            return None
        q = jnp.swapaxes(self._mean_second(payload_R, weight_R, shape), 1, 2)
        ranks = jax.vmap(lambda a, b: measured_rank(a, b, energy))(self._used("u"), q)
        return jnp.mean(ranks.astype(jnp.float32))
