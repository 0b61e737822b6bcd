r"""Radial-directional averaging (arXiv 2604.21428): mean length along the mean direction.

$$\bar\Delta = \Big(\sum_r w_r \lVert\Delta_r\rVert\Big)\;
  \varphi\Big(\sum_r w_r\,\varphi(\Delta_r)\Big), \qquad \varphi(x) = x / \lVert x\rVert,\;
  \varphi(0) = 0, \qquad \sum_r w_r = 1$$

per tensor; embeddings get the weighted mean. Leaves are embeddings by their names
(`optimizers.kind_of`): one of another name is averaged like a matrix. Pseudo-gradients of M
different learners are nearly orthogonal, so that a plain mean is about $1/\sqrt M$ as long; this
one keeps the length.

Source: second-hand; of the paper only abstract and introduction were read. Our reading: the printed
radial factor looks like the norm of a vector sum; implementations take the mean of norms, as here.
Where unit directions cancel (their mean is shorter than `floor`) the weighted mean is used, as in
implementations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax.merge.base import Merge, norm, share
from lowcomm_jax.optimizers import Kind


@dataclasses.dataclass(frozen=True)
class RadialDirectional(Merge):
    """Mean length along the mean direction; see `Merge`, reads payloads one by one.

    Attributes:
      floor: length of the mean of unit directions below which the weighted mean is used.
    """

    floor: float = 1e-6

    def violations(self) -> list[str]:
        if 0 <= self.floor < 1:
            return []
        return [f"floor={self.floor}: give a length of a mean of unit vectors, from 0 to below 1"]

    def tensor(
        self, delta_RxN: jax.Array, weight_R: jax.Array, kind: Kind, momentum: jax.Array | None
    ) -> jax.Array:
        del momentum
        shares = share(weight_R, delta_RxN.ndim)
        mean = jnp.sum(shares * delta_RxN, axis=0)
        if kind == "embedding":
            return mean
        norm_R = jax.vmap(norm)(delta_RxN)
        scale_R = jnp.where(norm_R > 0, 1.0 / jnp.where(norm_R > 0, norm_R, 1.0), 0.0)
        unit_RxN = delta_RxN * scale_R.reshape(shares.shape)
        direction = jnp.sum(shares * unit_RxN, axis=0)
        length, radius = norm(direction), jnp.sum(shares.reshape(-1) * norm_R)
        whole = length > self.floor
        return jnp.where(whole, direction * (radius / jnp.where(whole, length, 1.0)), mean)
