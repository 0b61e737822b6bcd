r"""Isotropic merging (IsoLoCo, arXiv 2607.03011): equal singular values for the mean of a matrix.

$$\bar\Delta = U S V^\top \quad\longrightarrow\quad \operatorname{mean}(S)\, U V^\top$$

for matrices of two axes; vectors stay as they are. `mean(S)` is over the min(n, m) singular values.

Source: the published code; of the paper only the abstract was read. As in the code the rule holds
for tensors of two axes, embeddings and head included. Differs from it: those named `bias` or
`scale` count as vectors (`optimizers.kind_of`). Kernels of three axes or more keep their mean.

A matrix that is cut over a region's devices is gathered for its SVD. Directions of singular value 0
get the mean, too. Rounding decides which directions these are: for a mean of low rank, devices with
different arithmetic give different results.
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
    """Equal singular values for matrices; see `Merge`, reads the mean: no more bytes travel."""

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
