"""How the parameters of a scanned transformer are cut into pipeline stages.

Stage s of S holds blocks [s C, (s+1) C) with C = ceil(L / S), and slice s of the vocabulary. Where
L or the vocabulary does not divide, zeros fill it up: blocks that return their input, and tokens
that are never drawn. No gradient reaches these, so that they stay zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.stages import STAGE
from lowcomm_jax.models import sharding
from lowcomm_jax.models.config import TransformerConfig, param_count

Params = dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """One model cut into S stages.

    Attributes:
      config: of the whole model.
      stages: S.
    """

    config: TransformerConfig
    stages: int

    @property
    def blocks(self) -> int:
        """Blocks a stage runs, padding included."""
        return -(-self.config.layers // self.stages)

    @property
    def rows(self) -> int:
        """Tokens of the vocabulary a stage holds, padding included."""
        return -(-self.config.vocab_size // self.stages)

    @property
    def padded(self) -> TransformerConfig:
        """The model with its padding."""
        sizes = {"layers": self.blocks * self.stages, "vocab_size": self.rows * self.stages}
        return dataclasses.replace(self.config, **sizes)

    @property
    def waste(self) -> float:
        """Share of the parameters that is padding."""
        return 1 - param_count(self.config) / param_count(self.padded)

    def cut(self, params: Params) -> Params:
        """Fills the parameters of `Model.init` (scan) up, so that they divide over the stages."""
        return self._resize(params, lambda x, axis, size: _grow(x, axis, size), self.padded)

    def join(self, params: Params) -> Params:
        """Inverse of `cut`."""

        def shrink(x, axis, size):
            return jax.lax.slice_in_dim(x, 0, size, axis=axis)

        return self._resize(params, shrink, self.config)

    def _resize(self, params: Params, resize: Callable, to: TransformerConfig) -> Params:
        def one(path, leaf):
            names = tuple(str(entry.key) for entry in path)
            if names[0] == "blocks":
                return resize(leaf, 0, to.layers)
            if names in _VOCABULARY_AXIS:
                return resize(leaf, _VOCABULARY_AXIS[names], to.vocab_size)
            return leaf

        return jax.tree.map_with_path(one, params)

    def specs(self, params: Params, axis_sizes: Mapping[str, int]) -> Params:
        """A PartitionSpec per leaf of cut parameters (or their shapes) over all axes of a region.

        The blocks' leading axis and the vocabulary are cut over `stage`, and so is the final norm
        where its width divides: every stage works on the output layer, so nothing of it is one
        stage's alone. The rest as in `sharding.parameter_specs`.
        """

        def one(path, leaf, spec):
            names = tuple(str(entry.key) for entry in path)
            axis = _VOCABULARY_AXIS.get(names, 0)
            axes = [*spec, *(None,) * (leaf.ndim - len(spec))]
            if leaf.shape[axis] % self.stages == 0:
                axes[axis] = self._with_stage(axes[axis], leaf.shape[axis], axis_sizes)
            return P(*axes)

        whole = sharding.parameter_specs(params, axis_sizes)
        return jax.tree.map_with_path(one, params, whole)

    def _with_stage(self, axis: str | None, size: int, axis_sizes: Mapping[str, int]):
        if axis is None or size // self.stages % axis_sizes.get(axis, 1):
            return STAGE
        return (STAGE, axis)


_VOCABULARY_AXIS = {("embedding", "table"): 0, ("head", "kernel"): 1}


def _grow(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths)
