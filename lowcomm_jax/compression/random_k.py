"""One random value of every s, chosen by a seed that travels instead of indices.

A matrix is cut into groups of s = `one_in` values; each group sends one of them, drawn anew every
round. The seed of the round is eight bytes of the payload, so that a region that missed rounds is
still decoded rightly. Regions that took part in the same rounds choose the same entries.

Error: that of `values` for a value that is sent, the value itself for the others.

Differs from textbook random-k: the choice is stratified (one per group), which needs no permutation
and spreads evenly; every value is still sent with probability 1 / s.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression import nested_values
from lowcomm_jax.compression.blocks import Blocks
from lowcomm_jax.compression.cast import FP32
from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.compression.windows import leading
from lowcomm_jax.refused import in_range, refuse


@dataclasses.dataclass(frozen=True)
class RandomK(MatrixCodec):
    """Send a random 1 / `one_in` of the values, coded with `values`.

    Attributes:
      one_in: s, size of a group. 1 sends everything.
      values: codec of the chosen values (`[L, 1, groups]`).
      unbiased: multiply decoded values by s, so that the expectation is the input. Off by default:
        error feedback wants the plain projection.

    Raises:
      ValueError: one_in below 1.
    """

    one_in: int = 64
    values: MatrixCodec = FP32
    unbiased: bool = False
    takes_windows = True

    def __post_init__(self) -> None:
        refuse("RandomK", [in_range("one_in", self.one_in, 1, float("inf"))])

    @property
    def name(self) -> str:
        values = "" if self.values == FP32 else f"_{self.values.name}"
        return f"random_1in{self.one_in}{values}"

    def _groups(self, shape: Shape) -> Blocks:
        size = shape[1] * shape[2]
        return Blocks(-(-size // self.one_in), self.one_in)

    def _kept(self, shape: Shape) -> Shape:
        return shape[0], 1, self._groups(shape).count

    def init(self, shape: Shape, seed: int) -> PyTree:
        key = np.array([seed % 2**32, 0], np.uint32)
        return {"key": jnp.asarray(key), "values": self.values.init(self._kept(shape), seed)}

    def _mask(self, key: jax.Array, shape: Shape) -> jax.Array:
        """Which value of each group is chosen: bool `[L, groups, s]`, each device its own."""
        layers, groups = shape[0], self._groups(shape)
        rng = jax.random.fold_in(jax.random.key(key[0]), key[1])
        at = jax.random.randint(rng, (layers, groups.count, 1), 0, groups.width)
        return cutting.received(at, groups.width) == jnp.arange(groups.width)[None, None]

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        shape, key = x_LxNxM.shape, state["key"]
        groups = self._groups(shape)
        x = cutting.to_blocks(x_LxNxM, groups)
        mask = self._mask(key, shape) & self._real(shape)
        kept = jnp.sum(jnp.where(mask, x, 0.0), axis=-1)
        kept = cutting.sent(kept, groups.width)
        values, inner = nested_values.encode(self.values, kept[:, None], state["values"])
        after = {"key": key + jnp.array([0, 1], jnp.uint32), "values": inner}
        return {"key": key, "values": values}, after

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        values = nested_values.decode(self.values, payload["values"], self._kept(shape))
        values = cutting.received(values[:, 0, :, None], self.one_in)
        if self.unbiased:
            values = values * float(self.one_in)
        x = jnp.where(self._mask(payload["key"], shape), values, 0.0)
        return cutting.from_blocks(x, shape, by_row=False)

    def _real(self, shape: Shape) -> jax.Array:
        """Which values of the groups are not padding."""
        groups = self._groups(shape)
        real = cutting.real(shape, groups)
        if real is not None:
            return real
        return leading(groups.count, groups.width, *divmod(shape[1] * shape[2], groups.width))[None]

    def rows_together(self, shape: Shape) -> int:
        return self.one_in // math.gcd(self.one_in, shape[2])

    def unit(self, shape: Shape) -> int:
        return self.one_in

    def nbytes(self, shape: Shape) -> int:
        return 8 + self.values.nbytes(self._kept(shape))
