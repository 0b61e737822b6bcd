"""How the parameters of a scanned transformer are cut into pipeline stages.

Stage s of S holds blocks [s C, (s+1) C) with C = ceil(L / S), and slice s of the vocabulary. Where
L or the vocabulary does not divide, zeros fill it up: blocks that return their input, and tokens
that are never drawn. No gradient reaches these, so that they stay zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.stages import STAGE
from lowcomm_jax.models.model import Model, Params

_TOKENS = "vocabulary"  # the name of that axis in `Model.axes`


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """One model cut into S stages.

    Attributes:
      model: the whole one, with `layer_loop="scan"`.
      stages: S.
    """

    model: Model
    stages: int

    @property
    def blocks(self) -> int:
        """Blocks a stage runs, padding included."""
        return -(-self.model.config.layers // self.stages)

    @property
    def rows(self) -> int:
        """Tokens of the vocabulary a stage holds, padding included."""
        return -(-self.model.config.vocab_size // self.stages)

    def cut(self, params: Params) -> Params:
        """Fills the parameters of `Model.init` (scan) up, so that they divide over the stages."""
        return self._resize(params, _grow, self.blocks * self.stages, self.rows * self.stages)

    def join(self, params: Params) -> Params:
        """Inverse of `cut`."""
        config = self.model.config
        return self._resize(params, _shrink, config.layers, config.vocab_size)

    def _resize(self, params: Params, resize: Callable, layers: int, tokens: int) -> Params:
        def leaf_of(leaf, names):
            if leaf.ndim > len(names):
                return resize(leaf, 0, layers)
            return resize(leaf, names.index(_TOKENS), tokens) if _TOKENS in names else leaf

        return jax.tree.map(leaf_of, params, self.model.axes)

    def specs(self, params: Params, axis_sizes: Mapping[str, int]) -> Params:
        """A PartitionSpec per leaf of cut parameters (or their shapes) over all axes of a region.

        The blocks' leading axis and the vocabulary are cut over `stage`, and so is the final norm
        where its width divides: every stage works on the output layer, so nothing of it is one
        stage's alone. The rest as in `sharding.parameter_specs`.
        """

        def spec_of(leaf, names, spec):
            axis = names.index(_TOKENS) if _TOKENS in names else 0
            axes = [*spec, *(None,) * (leaf.ndim - len(spec))]
            if leaf.shape[axis] % self.stages == 0:
                axes[axis] = self._with_stage(axes[axis], leaf.shape[axis], axis_sizes)
            return P(*axes)

        return jax.tree.map(spec_of, params, self.model.axes, self.model.specs(params, axis_sizes))

    def _with_stage(self, axis: str | None, size: int, axis_sizes: Mapping[str, int]):
        if axis is None or size // self.stages % axis_sizes.get(axis, 1):
            return STAGE
        return (STAGE, axis)


def _grow(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths)


def _shrink(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, 0, size, axis=axis)
