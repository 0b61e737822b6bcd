r"""Isotropic merging (IsoLoCo, arXiv 2607.03011): equal singular values for the mean of a matrix.

$$\bar\Delta = U S V^\top \quad\longrightarrow\quad \operatorname{mean}(S)\, U V^\top$$

for matrices of two axes; vectors stay as they are. `mean(S)` is over the min(n, m) singular values.

Of the source only the code was read, which treats every two-axis tensor so, embeddings and head
included. A matrix that a region's devices share is gathered for its SVD. Directions of singular
value 0 get the mean, too, and rounding settles which they are: of a mean of low rank, two devices
with different arithmetic make different directions.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.merge.base import Merge
from lowcomm_jax.optimizers import Kind


@dataclasses.dataclass(frozen=True)
class Isotropic(Merge):
    """See `Merge`; reads the mean, so that it costs no bytes."""

    reads: ClassVar[Literal["payloads", "mean"]] = "mean"

    def tensor(
        self, delta_RxN: jax.Array, weight_R: jax.Array, kind: Kind, momentum: jax.Array | None
    ) -> jax.Array:
        del weight_R, momentum
        mean = delta_RxN[0]
        if kind == "vector" or mean.ndim != 2:
            return mean
        u, s, vt = jnp.linalg.svd(mean, full_matrices=False)
        return jnp.mean(s) * (u @ vt)
