r"""The k largest coefficients of every chunk's cosine transform.

$$\hat X = D_h X D_w^\top, \qquad (D_n)_{ij} = \sqrt{\tfrac{2 - [i = 0]}{n}}
  \cos\frac{\pi i (2j + 1)}{2n}$$

(orthonormal DCT-II over the chunks of `TopK`), then the k largest of each chunk travel.

Error: the norm of what is missed is that of the coefficients that a chunk does not send.

Source: DeMo, arXiv 2411.19870: chunks of 64 x 64, k = 32, and a coefficient is averaged over the
regions that sent it, not over all.

Differs from the paper: indices are packed (the published code sends 64-bit indices and fp32
values). The mean is taken in region order, so that it has the same bits everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.compression.codecs.cast import FP32
from lowcomm_jax.compression.codecs.top_k import TopK
from lowcomm_jax.compression.units import Matrix, Payload


@dataclasses.dataclass(frozen=True)
class DCTTopK(TopK):
    """`TopK` on cosine coefficients; by default averaged over a coefficient's senders."""

    k: int = 32
    mean: Literal["regions", "senders"] = "senders"

    @property
    def name(self) -> str:
        values = "" if self.values == FP32 else f"_{self.values.name}"
        return f"dct_topk{self.k}{values}"

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        # Coefficients of padded values are values like any other.
        return super().encode(_transform(matrix.filled(x), dct_matrix), matrix.unpadded)

    def finish(self, mean: jax.Array) -> jax.Array:
        return _transform(mean, lambda n: dct_matrix(n).T)


def dct_matrix(n: int) -> np.ndarray:
    """Orthonormal DCT-II, fp32 `[n, n]`: row i is the i-th frequency."""
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    basis = np.cos(np.pi * i * (2 * j + 1) / (2 * n)) * np.sqrt(2 / n)
    basis[0] /= np.sqrt(2)
    return basis.astype(np.float32)


def _transform(x: jax.Array, basis: Callable[[int], np.ndarray]) -> jax.Array:
    """`down @ x @ across.T` of every unit.

    A CPU takes unit after unit: how its library sums a product depends on the product's size, and
    how many units there are depends on the mesh.
    """
    down, across = basis(x.shape[3]), basis(x.shape[4])

    def transform(x):
        exact = jax.lax.Precision.HIGHEST
        x = jnp.einsum("...hw,vw->...hv", x, across, precision=exact)
        return jnp.einsum("uh,...hv->...uv", down, x, precision=exact)

    def in_turn(x):
        return jax.lax.map(transform, x.reshape(-1, *x.shape[3:])).reshape(x.shape)

    return jax.lax.platform_dependent(x, cpu=in_turn, default=transform)


NAMES = {"dct_topk": DCTTopK()}
